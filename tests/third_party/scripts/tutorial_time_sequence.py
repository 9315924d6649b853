"""A sine wave continued by two LSTM cells in float64, with LBFGS: its closure runs many times a step."""

import numpy as np
import report
import torch
import torch.nn as nn
import torch.optim as optim

device = "cuda" if torch.cuda.is_available() else "cpu"
np.random.seed(2)
T, L, N = 20, 60, 12
x = np.empty((N, L), "int64")
x[:] = np.array(range(L)) + np.random.randint(-4 * T, 4 * T, N).reshape(N, 1)
data = np.sin(x / 1.0 / T).astype("float64")


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 21)
        self.lstm2 = nn.LSTMCell(21, 21)
        self.linear = nn.Linear(21, 1)

    def forward(self, input, future=0):
        outputs = []
        h = torch.zeros(input.size(0), 21, dtype=torch.double, device=input.device)
        c, h2, c2 = h.clone(), h.clone(), h.clone()
        for t in input.split(1, dim=1):
            h, c = self.lstm1(t, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            output = self.linear(h2)
            outputs += [output]
        for _i in range(future):
            h, c = self.lstm1(output, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            output = self.linear(h2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


np.random.seed(0)
torch.manual_seed(0)
inp, tgt = torch.from_numpy(data[3:, :-1]).to(device), torch.from_numpy(data[3:, 1:]).to(device)
seq = Sequence().double().to(device)
crit = nn.MSELoss()
opt = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=6, line_search_fn=None)
for _i in range(3):

    def closure():
        opt.zero_grad()
        loss = crit(seq(inp), tgt)
        report.loss(loss)
        loss.backward()
        return loss

    opt.step(closure)
    with torch.no_grad():
        pred = seq(inp, future=10)
        y = pred.detach().cpu().numpy()
        report.tensor("pred", torch.from_numpy(y))
opt = optim.LBFGS(seq.parameters(), max_iter=4, line_search_fn="strong_wolfe")
opt.step(closure)
report.weights(seq)
