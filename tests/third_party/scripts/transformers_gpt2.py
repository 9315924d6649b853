"""A small GPT-2 language model, trained by the Trainer of transformers with a tokenizer built here, then sampled."""

import tempfile

import report
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

TEXT = ["the device is far away", "a rank sends words over a ring", "bits stay the same", "one step after another"] * 8


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            report.loss(logs["loss"])


raw = Tokenizer(models.WordLevel(unk_token="[UNK]"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
raw.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]")
data = [tokenizer(text, truncation=True, max_length=12) for text in TEXT]

torch.manual_seed(0)
pad = tokenizer.pad_token_id
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=2, pad_token_id=pad,
               bos_token_id=pad, eos_token_id=pad)
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
        report_to=[], save_strategy="no", seed=3, optim="adamw_torch", max_grad_norm=0.5,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[Losses()],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    trainer.train()
prompt = tokenizer("the device", return_tensors="pt").to(model.device)
prompt.pop("token_type_ids", None)
print(model.eval().generate(**prompt, max_new_tokens=8, do_sample=False).tolist())
report.weights(model)
