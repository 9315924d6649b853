"""Ranks that `accelerate launch` starts; dropout on the device."""

import sys

import report
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
x = torch.randn(64, 10)
data = TensorDataset(x, (x @ torch.randn(10, 1)).squeeze(1))
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if epoch % 20 == 0 and accelerator.is_main_process:
        report.loss(loss)
if accelerator.is_main_process:
    report.tensor("world size", torch.tensor([accelerator.num_processes]))
    report.weights(accelerator.unwrap_model(model))
