"""A detector of torchvision trained and evaluated: proposals, nms and roi_align inside a model."""

import report
import torch
import torchvision

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
    weights=None, weights_backbone=None, num_classes=3, min_size=96, max_size=96
).to(device)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005)
images = [torch.rand(3, 96, 96).to(device) for _ in range(2)]
targets = [
    {
        "boxes": torch.tensor([[8.0, 8, 60, 60], [30, 20, 80, 90]], device=device),
        "labels": torch.tensor([1, 2]).to(device),
    }
    for _ in range(2)
]
for _ in range(2):
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.loss(loss)
with torch.no_grad():
    for found in model.eval()(images):
        report.tensor("boxes", found["boxes"])
report.weights(model)
