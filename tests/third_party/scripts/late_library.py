"""A loop with torchvision's own operators, which registers them after the device is in use."""

import report
import torch

torch.manual_seed(0)
weights = torch.randn(8, 8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=1e-2)

from torchvision import ops  # noqa: E402

for step in range(400):
    generator = torch.Generator().manual_seed(step)
    corners = torch.rand(40, 2, generator=generator).cuda() * 20
    boxes = torch.cat([corners, corners + 2 + torch.rand(40, 2, generator=generator).cuda() * 8], 1)
    kept = ops.nms(boxes, torch.rand(40, generator=generator).cuda(), 0.3)
    features = torch.randn(1, 8, 30, 30, generator=generator).cuda()
    regions = ops.roi_align(features, [boxes[kept]], output_size=4)
    loss = (regions.mean((2, 3)) @ weights).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        report.loss(loss)
report.tensor("result", weights)
