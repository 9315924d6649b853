"""The MNIST example of PyTorch on scikit-learn's digits: convolutions, two dropouts, Adadelta, a test loop."""

import report
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        x = self.dropout1(nn.functional.max_pool2d(x, 2)).flatten(1)
        return torch.log_softmax(self.fc2(self.dropout2(torch.relu(self.fc1(x)))), 1)


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:512], labels[:512]), batch_size=64, shuffle=True, pin_memory=True)
model = Net().to(device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
for _ in range(2):
    model.train()
    for x, y in train:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        report.loss(loss)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        found = model(images[512:].to(device)).argmax(1, keepdim=True)
        print("correct", found.eq(labels[512:].to(device).view_as(found)).sum().item())
report.weights(model)
