"""The spatial transformer of PyTorch's tutorial: affine_grid and grid_sample inside a classifier."""

import report
import torch
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)
        self.localization = nn.Sequential(
            nn.Conv2d(1, 8, 7), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
            nn.Conv2d(8, 10, 5), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
        )  # fmt: skip
        self.fc_loc = nn.Sequential(nn.Linear(90, 32), nn.ReLU(True), nn.Linear(32, 6))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x):
        theta = self.fc_loc(self.localization(x).view(-1, 90)).view(-1, 2, 3)
        x = F.grid_sample(x, F.affine_grid(theta, list(x.size()), align_corners=False), align_corners=False)
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).view(-1, 320)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    x, y = torch.randn(8, 1, 28, 28).to(device), torch.randint(0, 10, (8,)).to(device)
    optimizer.zero_grad()
    loss = F.nll_loss(model(x), y)
    loss.backward()
    optimizer.step()
    report.loss(loss)
report.weights(model)
