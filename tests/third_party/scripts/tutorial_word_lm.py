"""The word language model of PyTorch's examples, with a Transformer encoder, or an LSTM as the argument says."""

import math
import sys

import report
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1111)
WORDS, WIDTH, LENGTH = 40, 32, 12


class TransformerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pe = torch.zeros(LENGTH, WIDTH)
        position = torch.arange(0, LENGTH).unsqueeze(1)
        scale = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * scale), torch.cos(position * scale)
        self.register_buffer("pe", pe.unsqueeze(1))
        self.embed, self.decode = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.2), 2)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), device=x.device)
        return self.decode(self.encoder(self.embed(x) * math.sqrt(WIDTH) + self.pe[: len(x)], mask=mask))


class RecurrentModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.hidden = None

    def forward(self, x):
        out, hidden = self.rnn(self.embed(x), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.decode(out)


model = (RecurrentModel() if sys.argv[1:] == ["lstm"] else TransformerModel()).to(device)
data = torch.randint(0, WORDS, (5 * LENGTH + 1, 8)).to(device)
lr = 1.0
for i in range(0, data.size(0) - 1, LENGTH):
    model.train()
    model.zero_grad()
    out = model(data[i : i + LENGTH])
    loss = nn.functional.nll_loss(torch.log_softmax(out, -1).view(-1, WORDS), data[i + 1 : i + 1 + LENGTH].view(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-lr)
    report.loss(loss)
report.weights(model)
