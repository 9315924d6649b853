"""An error that nobody waited for makes the job fail at its end."""

import torch

table = torch.nn.Embedding(4, 2).cuda()
table(torch.tensor([0, 1], device="cuda"))
table(torch.tensor([0, 9], device="cuda"))
print("end of script")
