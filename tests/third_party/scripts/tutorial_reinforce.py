"""REINFORCE with a critic on a cart-pole made here: the host decides on values of the device at every step."""

import math
from collections import namedtuple

import numpy as np
import report
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CartPole:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.s = self.rng.uniform(-0.05, 0.05, 4)
        return self.s.astype(np.float32)

    def step(self, a):
        x, xd, t, td = self.s
        f = 10.0 if a else -10.0
        ct, st = math.cos(t), math.sin(t)
        tmp = (f + 0.05 * td * td * st) / 1.1
        tacc = (9.8 * st - ct * tmp) / (0.5 * (4 / 3 - 0.1 * ct * ct / 1.1))
        xacc = tmp - 0.05 * tacc * ct / 1.1
        self.s = np.array([x + 0.02 * xd, xd + 0.02 * xacc, t + 0.02 * td, td + 0.02 * tacc])
        return self.s.astype(np.float32), 1.0, bool(abs(self.s[0]) > 2.4 or abs(self.s[2]) > 0.2095)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


Saved = namedtuple("Saved", "log_prob value")
torch.manual_seed(543)
model = Policy().to(device)
opt = optim.Adam(model.parameters(), lr=3e-2)
eps = np.finfo(np.float32).eps.item()
gen = torch.Generator().manual_seed(1)
env = CartPole(543)
running = 10.0
for ep in range(12):
    state = env.reset()
    total = 0
    for _t in range(200):
        probs, value = model(torch.from_numpy(state).to(device))
        m = Categorical(probs)
        action = torch.multinomial(probs.detach().cpu(), 1, generator=gen).to(device).squeeze()
        model.saved_actions.append(Saved(m.log_prob(action), value))
        state, r, done = env.step(action.item())
        model.rewards.append(r)
        total += r
        if done:
            break
    running = 0.05 * total + 0.95 * running
    R, returns = 0, []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns, device=device)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    pl, vl = [], []
    for (lp, v), R in zip(model.saved_actions, returns, strict=True):
        adv = R - v.item()
        pl.append(-lp * adv)
        vl.append(F.smooth_l1_loss(v, torch.stack([R])))
    opt.zero_grad()
    loss = torch.stack(pl).sum() + torch.stack(vl).sum()
    loss.backward()
    opt.step()
    del model.rewards[:], model.saved_actions[:]
    print(f"Episode {ep}\tLast reward: {total:.2f}\tAverage reward: {running:.2f}")
    report.loss(loss)
report.weights(model)
