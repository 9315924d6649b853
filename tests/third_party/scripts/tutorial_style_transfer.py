"""Neural style transfer, as in PyTorch's tutorial, on a VGG with random weights: LBFGS over an image."""

import report
import torch
import torchvision
from torch.nn import functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_default_device(device)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
with torch.device("cpu"):
    cnn = torchvision.models.vgg11(weights=None).features[:9].eval()
cnn = cnn.to(device).requires_grad_(False)
content, style = (torch.rand(1, 3, 32, 32, generator=generator, device="cpu").to(device) for _ in range(2))


def features(x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for layer in cnn:
        x = layer(x) if not isinstance(layer, torch.nn.ReLU) else torch.relu(x)
        if isinstance(layer, torch.nn.Conv2d):
            found.append(x)
    return found


def gram(x: torch.Tensor) -> torch.Tensor:
    a, b, c, d = x.size()
    flat = x.view(a * b, c * d)
    return torch.mm(flat, flat.t()).div(a * b * c * d)


wanted_content = features(content)[2].detach()
wanted_style = [gram(f).detach() for f in features(style)]
image = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([image], max_iter=4)
for _ in range(2):

    def closure():
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        found = features(image)
        loss = F.mse_loss(found[2], wanted_content) + 1e6 * sum(
            F.mse_loss(gram(f), w) for f, w in zip(found, wanted_style, strict=True)
        )
        loss.backward()
        report.loss(loss)
        return loss

    optimizer.step(closure)
report.tensor("image", image)
