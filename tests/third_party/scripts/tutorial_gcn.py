"""A graph convolution over a sparse adjacency, and the same aggregation by index_add, bincount and scatter_reduce."""

import report
import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphConv(nn.Module):
    def __init__(self, i, o, bias=False):
        super().__init__()
        self.kernel = nn.Parameter(torch.Tensor(i, o))
        nn.init.xavier_normal_(self.kernel)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.Tensor(o))
            nn.init.zeros_(self.bias)

    def forward(self, x, a):
        s = torch.mm(x, self.kernel)
        o = torch.spmm(a, s)
        return o if self.bias is None else o + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(32, 16, True), GraphConv(16, 4)
        self.d = nn.Dropout(0.5)

    def forward(self, x, a):
        return F.log_softmax(self.gc2(self.d(F.relu(self.gc1(x, a))), a), dim=1)


torch.manual_seed(42)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
n = 50
e = torch.randint(0, n, (2, 200))
A = torch.sparse_coo_tensor(e, torch.ones(200), (n, n)).coalesce()
A = (A + A.t()).coalesce()
A = A.to_dense()
A[A > 0] = 1
A = A + torch.eye(n)
d = A.sum(1).pow(-0.5)
A = (d.view(-1, 1) * A * d.view(1, -1)).to_sparse().to(device)
x = torch.rand(n, 32).to(device)
y = torch.randint(0, 4, (n,)).to(device)
idx = torch.arange(n).to(device)
model = GCN().to(device)
opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for _i in range(6):
    model.train()
    opt.zero_grad()
    out = model(x, A)
    loss = F.nll_loss(out[idx[:30]], y[idx[:30]])
    loss.backward()
    opt.step()
    report.loss(loss)
model.eval()
out = model(x, A)
print("correct", out.argmax(1).eq(y).sum().item())
report.weights(model)
report.tensor("adj", A.coalesce().values())
# and with scatter
src, dst = e.to(device)
agg = torch.zeros(n, 32, device=device).index_add_(0, dst, x[src])
deg = torch.bincount(dst, minlength=n).clamp(min=1)
report.tensor("agg", agg / deg[:, None])
r = torch.zeros(n, 32, device=device).scatter_reduce(
    0, dst[:, None].expand(-1, 32), x[src], reduce="amax", include_self=False
)
report.tensor("amax", r)
