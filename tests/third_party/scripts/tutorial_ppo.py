"""Proximal policy optimisation: clipped ratios, minibatches, an early stop on a divergence that the device computes."""

import report
import torch
import torch.nn as nn
from torch.distributions import Normal, kl_divergence

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
g = torch.Generator().manual_seed(7)
actor = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
log_std = nn.Parameter(torch.zeros(1, device=device))
critic = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
opt = torch.optim.Adam([*actor.parameters(), log_std, *critic.parameters()], lr=3e-3)
for it in range(6):
    obs = torch.randn(256, 3, generator=g).to(device)
    with torch.no_grad():
        mu = actor(obs)
        dist = Normal(mu, log_std.exp())
        act = mu + log_std.exp() * torch.randn(256, 1, generator=g).to(device)
        lp_old = dist.log_prob(act).sum(-1)
        rew = -(act.squeeze() - obs.sum(-1)).pow(2)
        val = critic(obs).squeeze()
        adv = rew - val
        adv = (adv - adv.mean()) / adv.std()
    for epoch in range(10):
        perm = torch.randperm(256, generator=g)
        stop = False
        for idx in perm.split(64):
            idx = idx.to(device)
            d = Normal(actor(obs[idx]), log_std.exp())
            ratio = (d.log_prob(act[idx]).sum(-1) - lp_old[idx]).exp()
            with torch.no_grad():
                kl = ((ratio - 1) - ratio.log()).mean()
            if kl > 0.02:
                stop = True
                break
            clip = torch.clamp(ratio, 0.8, 1.2)
            loss = (
                -torch.min(ratio * adv[idx], clip * adv[idx]).mean()
                + 0.5 * (critic(obs[idx]).squeeze() - rew[idx]).pow(2).mean()
                - 0.01 * d.entropy().mean()
            )
            opt.zero_grad(set_to_none=True)
            loss.backward()
            n = nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            if torch.isfinite(n):
                opt.step()
        if stop:
            print("early stop", it, epoch)
            break
    report.loss(loss)
    report.loss(kl)
    q = kl_divergence(Normal(mu, 1.0), Normal(mu * 0, 2.0)).mean()
    report.loss(q)
report.weights(actor, critic)
