"""Classifiers of torchvision in a training loop with transforms on the device."""

import sys

import report
import torch
import torchvision
from torch import nn
from torchvision.transforms import v2

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torchvision.models.get_model(sys.argv[1], weights=None, num_classes=5).to(device)
augment = v2.Compose([v2.CenterCrop(64), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
images = torch.randint(0, 256, (12, 3, 72, 72), dtype=torch.uint8)
labels = torch.randint(0, 5, (12,))
for step in range(3):
    batch = slice(4 * step, 4 * step + 4)
    loss = nn.functional.cross_entropy(model(augment(images[batch].to(device))), labels[batch].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.loss(loss)
with torch.no_grad():
    report.tensor("logits", model.eval()(augment(images.to(device))))
report.weights(model)
