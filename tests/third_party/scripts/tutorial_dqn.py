"""Deep Q-learning, as in PyTorch's tutorial, on an environment made here: replay memory, target network."""

import math
import random
from collections import deque, namedtuple

import report
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
random.seed(0)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class Walk:
    """Walk to the end of a line."""

    def reset(self) -> list[float]:
        self.at, self.time = 0, 0
        return self.state()

    def state(self) -> list[float]:
        return [self.at / 5, math.sin(self.at), math.cos(self.at), self.time / 20]

    def step(self, action: int) -> tuple[list[float], float, bool]:
        self.at, self.time = max(0, self.at + (1 if action else -1)), self.time + 1
        return self.state(), 1.0 if self.at == 5 else -0.05, self.at == 5 or self.time == 20


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)


policy, target = network(), network()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
memory: deque[Transition] = deque(maxlen=200)
steps = 0
for _ in range(3):
    env = Walk()
    state = torch.tensor(env.reset(), device=device).unsqueeze(0)
    done = False
    while not done:
        steps += 1
        if random.random() > 0.1 + 0.8 * math.exp(-steps / 30):
            with torch.no_grad():
                action = policy(state).max(1).indices.view(1, 1)
        else:
            action = torch.tensor([[random.randrange(2)]], device=device)
        observed, reward, done = env.step(action.item())
        following = None if done else torch.tensor(observed, device=device).unsqueeze(0)
        memory.append(Transition(state, action, following, torch.tensor([reward], device=device)))
        state = following
        if len(memory) < 16:
            continue
        batch = Transition(*zip(*random.sample(memory, 16), strict=True))
        mask = torch.tensor([s is not None for s in batch.next_state], device=device, dtype=torch.bool)
        values = policy(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
        following_values = torch.zeros(16, device=device)
        with torch.no_grad():
            following_values[mask] = target(torch.cat([s for s in batch.next_state if s is not None])).max(1).values
        loss = nn.SmoothL1Loss()(values, (following_values * 0.99 + torch.cat(batch.reward)).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        weights = target.state_dict()
        for key, value in policy.state_dict().items():
            weights[key] = value * 0.05 + weights[key] * 0.95
        target.load_state_dict(weights)
        report.loss(loss)
report.weights(policy, target)
