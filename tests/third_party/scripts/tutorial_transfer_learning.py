"""Transfer learning and a Siamese pair, as in PyTorch's tutorials: a frozen trunk, a new head, a shared encoder."""

import copy

import report
import torch
import torchvision
from torch import nn

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torchvision.models.resnet18(weights=None)
for parameter in model.parameters():
    parameter.requires_grad = False
model.fc = nn.Linear(model.fc.in_features, 2)
model = model.to(device)
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
best, lowest = copy.deepcopy(model.state_dict()), float("inf")
for _ in range(3):
    x, y = torch.randn(4, 3, 64, 64).to(device), torch.randint(0, 2, (4,)).to(device)
    optimizer.zero_grad()
    with torch.set_grad_enabled(True):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
    scheduler.step()
    report.loss(loss)
    if loss.item() < lowest:
        best, lowest = copy.deepcopy(model.state_dict()), loss.item()
model.load_state_dict(best)
report.weights(model)

trunk = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 16)).to(device)
head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()).to(device)
optimizer = torch.optim.Adadelta([*trunk.parameters(), *head.parameters()], lr=1.0)
for _ in range(3):
    a, b = torch.rand(8, 1, 8, 8).to(device), torch.rand(8, 1, 8, 8).to(device)
    same = torch.randint(0, 2, (8,)).float().to(device)
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy(head(torch.cat((trunk(a), trunk(b)), 1)).squeeze(), same)
    loss.backward()
    optimizer.step()
    report.loss(loss)
report.weights(trunk, head)
