"""An operator that fails on the device after its call has returned: the device is lost, as on CUDA."""

import torch
from expect import raises

table = torch.nn.Embedding(4, 2).cuda()
table(torch.tensor([0, 1], device="cuda"))
# An unknown call is waited for: its error is torch's own and comes at its line, and nothing is lost.
raises((IndexError, RuntimeError), "out of", lambda: table(torch.tensor([0, 9, 1], device="cuda")))
assert table.weight.sum().isfinite().item()

bad = table(torch.tensor([0, 9], device="cuda"))
text = raises(torch.AcceleratorError, "device-side assert", torch.cuda.synchronize)
assert "aten::embedding" in text and "ERGO_LAUNCH_BLOCKING" in text, text
for _ in range(2):
    raises(torch.AcceleratorError, "device-side assert", torch.cuda.synchronize)
    raises(torch.AcceleratorError, "device-side assert", lambda: torch.ones(3, device="cuda"))
    raises(torch.AcceleratorError, "device-side assert", lambda: table.weight.cpu())
    raises(torch.AcceleratorError, "device-side assert", lambda: table.weight.sum().item())
assert torch.ones(3).sum().item() == 3.0, "the host goes on"
print("ok")
