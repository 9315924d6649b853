"""A sentence encoder of sentence-transformers from a random BERT, trained on pairs by hand, then searched."""

import tempfile
from pathlib import Path

import report
import torch
from sentence_transformers import SentenceTransformer, losses, models, util
from transformers import BertConfig, BertModel, BertTokenizerFast

torch.manual_seed(0)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["a", "rank", "writes", "to", "ring", "the", "device", "reads", "from", "it", "bits", "stay", "same"]
with tempfile.TemporaryDirectory() as folder:
    vocabulary = Path(folder, "vocab.txt")
    vocabulary.write_text("\n".join(WORDS))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    BertModel(
        BertConfig(vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=64, max_position_embeddings=32)
    ).save_pretrained(folder)  # fmt: skip
    words = models.Transformer(folder, max_seq_length=16)
    model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())])
loss_function = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pairs = [("a rank writes", "the device reads"), ("bits stay same", "it stay"), ("to ring", "from ring")]
for _ in range(3):
    sides = [model.tokenize(list(side)) for side in zip(*pairs, strict=True)]
    sides = [{k: v.to(model.device) for k, v in side.items() if isinstance(v, torch.Tensor)} for side in sides]
    loss = loss_function(sides, None)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.loss(loss)
found = model.encode([first for first, _ in pairs], convert_to_tensor=True)
report.tensor("similarity", util.cos_sim(found, found))
report.weights(model)
