"""Models of timm in its own training style: optimizer factory, scheduler, label smoothing, EMA."""

import sys

import report
import timm
import timm.optim
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.utils import ModelEmaV2

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
size = {"img_size": 32} if "vit" in sys.argv[1] else {}
model = timm.create_model(sys.argv[1], pretrained=False, num_classes=7, **size).to(device)
ema = ModelEmaV2(model, decay=0.9)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
criterion = LabelSmoothingCrossEntropy(0.1)
for _ in range(3):
    x, y = torch.randn(4, 3, 32, 32).to(device), torch.randint(0, 7, (4,)).to(device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ema.update(model)
    report.loss(loss)
report.weights(model, ema.module)
