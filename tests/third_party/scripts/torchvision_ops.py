"""Compiled operators of torchvision, imported after the device was used: nms, roi_align, deform_conv2d, others."""

import report
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
first = torch.ones(3, device=device).sum().item()

import torchvision  # noqa: E402
from torchvision.ops import batched_nms, deform_conv2d, nms, ps_roi_align, roi_align, roi_pool  # noqa: E402

torch.manual_seed(0)
corners = torch.rand(50, 2) * 20
boxes = torch.cat([corners, corners + torch.rand(50, 2) * 10 + 1], 1).to(device)
scores = torch.rand(50).to(device)
print("nms", nms(boxes, scores, 0.3).tolist())
print("batched_nms", batched_nms(boxes, scores, torch.arange(50, device=device) % 3, 0.3).tolist())
features = torch.randn(2, 8, 16, 16).to(device).requires_grad_()
rois = torch.cat([torch.zeros(10, 1, device=device), boxes[:10] / 2], 1)
for name, op in (("roi_align", roi_align), ("roi_pool", roi_pool)):
    out = op(features, rois, (3, 3))
    (gradient,) = torch.autograd.grad(out.square().sum(), features)
    report.tensor(name, out)
    report.tensor(name + " gradient", gradient)
report.tensor("ps_roi_align", ps_roi_align(features, rois, (2, 2)))
weight = torch.randn(6, 8, 3, 3).to(device).requires_grad_()
offset = torch.randn(2, 18, 14, 14).to(device).requires_grad_()
out = deform_conv2d(features, offset, weight)
report.tensor("deform_conv2d", out)
for i, gradient in enumerate(torch.autograd.grad(out.square().sum(), (features, weight, offset))):
    report.tensor(f"deform_conv2d gradient {i}", gradient)
report.tensor("box_iou", torchvision.ops.box_iou(boxes, boxes))
