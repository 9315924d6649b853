"""A small BERT, fine-tuned as a classifier by the Trainer of transformers; dropout on the device."""

import sys
import tempfile

import report
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Sentences(Dataset):
    def __init__(self, n: int) -> None:
        g = torch.Generator().manual_seed(7)
        self.ids = torch.randint(5, 200, (n, 16), generator=g)
        self.labels = (self.ids.sum(1) % 2).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(16, dtype=torch.long), "labels": self.labels[i]}


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            report.loss(logs["loss"])


options = {
    "bf16": {"bf16": True, "use_cpu": not torch.cuda.is_available()},
    "checkpointing": {"gradient_checkpointing": True},
}.get(sys.argv[1] if len(sys.argv) > 1 else "", {})
torch.manual_seed(0)
config = BertConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2,
    max_position_embeddings=32,
)  # fmt: skip
if "gradient_checkpointing" in options:
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
model = BertForSequenceClassification(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-3,
        report_to=[], save_strategy="no", seed=3, optim="adamw_torch_fused", **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(32), callbacks=[Losses()])
    trainer.train()
    report.loss(trainer.evaluate(Sentences(16))["eval_loss"])
report.weights(model)
