"""Names to languages by a character RNN, as in PyTorch's tutorial, its cell written out."""

import random

import report
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
random.seed(0)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = [("anna", 0), ("petra", 0), ("otto", 1), ("hannes", 1), ("lovro", 2), ("zoran", 2)]


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.h2h, self.h2o = nn.Linear(26, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, letter, hidden):
        hidden = torch.tanh(self.i2h(letter) + self.h2h(hidden))
        return torch.log_softmax(self.h2o(hidden), 1), hidden


def as_tensor(name: str) -> torch.Tensor:
    tensor = torch.zeros(len(name), 1, 26)
    for i, letter in enumerate(name):
        tensor[i][0][LETTERS.index(letter)] = 1
    return tensor


rnn = RNN().to(device)
for _ in range(8):
    name, label = random.choice(NAMES)
    hidden = torch.zeros(1, 24, device=device)
    rnn.zero_grad()
    for letter in as_tensor(name).to(device):
        output, hidden = rnn(letter, hidden)
    loss = nn.functional.nll_loss(output, torch.tensor([label], device=device))
    loss.backward()
    for p in rnn.parameters():
        p.data.add_(p.grad.data, alpha=-0.05)
    report.loss(loss)
report.weights(rnn)
