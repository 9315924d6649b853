"""The variational autoencoder of PyTorch's examples: noise drawn on the device, by randn_like."""

import report
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 40), nn.Linear(40, 8), nn.Linear(40, 8)
        self.fc3, self.fc4 = nn.Linear(8, 40), nn.Linear(40, 64)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


data = torch.tensor(load_digits().data, dtype=torch.float32)[:256] / 16
model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
    x = batch.to(device)
    optimizer.zero_grad()
    out, mu, logvar = model(x)
    loss = F.binary_cross_entropy(out, x, reduction="sum") - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss.backward()
    optimizer.step()
    report.loss(loss)
report.weights(model)
