"""A mixture of experts: as many tokens for an expert as its router says (where, index_add, argsort, split, scatter)."""

import report
import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class MoE(nn.Module):
    def __init__(self, d, n, k):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.w1 = nn.Parameter(torch.randn(n, d, 2 * d) * 0.1)
        self.w2 = nn.Parameter(torch.randn(n, 2 * d, d) * 0.1)
        self.k, self.n = k, n
        self.register_buffer("load", torch.zeros(n))

    def forward(self, x):
        sh = x.shape
        x = x.reshape(-1, sh[-1])
        p = self.gate(x).softmax(-1)
        w, i = p.topk(self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(self.n):
            t, k = torch.where(i == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, w[t, k, None] * (F.silu(x[t] @ self.w1[e]) @ self.w2[e]))
        cnt = torch.bincount(i.flatten(), minlength=self.n)
        self.load.add_(cnt)
        aux = (cnt / cnt.sum() * p.mean(0)).sum() * self.n
        return out.view(sh), aux


class Grouped(MoE):
    def forward(self, x):
        sh = x.shape
        x = x.reshape(-1, sh[-1])
        p = self.gate(x).softmax(-1)
        w, i = p.topk(self.k, -1)
        flat = i.flatten()
        order = flat.argsort(stable=True)
        tok = order // self.k
        counts = torch.histc(flat.float(), self.n, 0, self.n - 1).long().tolist()
        hs = [F.silu(a @ self.w1[e]) @ self.w2[e] for e, a in enumerate(x[tok].split(counts))]
        h = torch.cat(hs) * w.flatten()[order, None]
        return torch.zeros_like(x).scatter_add_(0, tok[:, None].expand_as(h), h).view(sh), (p * p).mean()


torch.manual_seed(0)
g = torch.Generator().manual_seed(2)
for cls in (MoE, Grouped):
    m = cls(16, 4, 2).to(device)
    opt = torch.optim.AdamW(m.parameters(), 1e-2)
    for _it in range(4):
        x = torch.randn(4, 10, 16, generator=g).to(device)
        y, aux = m(x)
        loss = (y - x.roll(1, 1)).pow(2).mean() + 0.01 * aux
        opt.zero_grad()
        loss.backward()
        opt.step()
        report.loss(loss)
    report.weights(m)
