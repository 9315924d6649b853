"""Sequence to sequence with attention, as in PyTorch's translation tutorial: GRU cells, embeddings, teacher forcing."""

import random

import report
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
random.seed(0)
HIDDEN, WORDS, LENGTH = 32, 30, 7


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(WORDS, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x):
        return self.gru(self.embedding(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.wa, self.ua, self.va = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.gru, self.out = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True), nn.Linear(HIDDEN, WORDS)

    def forward(self, keys, hidden, target):
        word = torch.zeros(keys.size(0), 1, dtype=torch.long, device=device)
        outputs = []
        for i in range(LENGTH):
            query = hidden.permute(1, 0, 2)
            scores = self.va(torch.tanh(self.wa(query) + self.ua(keys))).squeeze(2).unsqueeze(1)
            context = torch.bmm(torch.softmax(scores, -1), keys)
            output, hidden = self.gru(torch.cat((self.embedding(word), context), 2), hidden)
            output = self.out(output)
            outputs.append(output)
            forced = random.random() < 0.5
            word = target[:, i].unsqueeze(1) if forced else output.topk(1)[1].squeeze(-1).detach()
        return torch.log_softmax(torch.cat(outputs, 1), -1)


encoder, decoder = Encoder().to(device), Decoder().to(device)
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (encoder, decoder)]
for _ in range(4):
    x = torch.randint(0, WORDS, (8, LENGTH)).to(device)
    y = x.flip(1)
    keys, hidden = encoder(x)
    loss = nn.functional.nll_loss(decoder(keys, hidden, y).view(-1, WORDS), y.reshape(-1))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    report.loss(loss)
report.weights(encoder, decoder)
