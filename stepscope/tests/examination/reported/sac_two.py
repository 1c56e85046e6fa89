"""Soft actor-critic on drawn transitions. Two faults.

Report: leggedrobotics/rsl_rl PR #69 (2025-02-25), ray-project/ray PR #50440 (2025-02-11), Toni-SM/skrl PR #233; sdpkjc/abcdrl PR #31 (2022-12-04).
Symptom: an update takes several times as long as the networks need.
Truth: drawing the batch without replacement permutes all positions of the replay buffer, remedy: draw with replacement;
the distributions check their arguments in every call, remedy: `set_default_validate_args(False)`.
"""
import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Independent, Normal


class ReplayBuffer:
    def __init__(self, capacity, observation, action, replace):
        self.random = np.random.default_rng(0)
        draw = lambda *shape: self.random.normal(size=shape).astype(np.float32)
        self.observations, self.nexts = draw(capacity, observation), draw(capacity, observation)
        self.actions, self.rewards = np.tanh(draw(capacity, action)), draw(capacity)
        self.dones = (self.random.random(capacity) < 0.01).astype(np.float32)
        self.size, self.replace = capacity, replace

    def sample(self, batch_size):
        if self.replace:
            chosen = np.random.choice(self.size, size=batch_size, replace=True)
        else:
            chosen = np.random.choice(self.size, size=batch_size, replace=False)  # FAULT
        return [torch.from_numpy(field[chosen]) for field in (self.observations, self.actions, self.rewards, self.nexts, self.dones)]


def mlp(inputs, outputs, width=128):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


class Actor(nn.Module):
    def __init__(self, observation, action):
        super().__init__()
        self.net = mlp(observation, 2 * action)

    def forward(self, x):
        mean, spread = self.net(x).chunk(2, -1)
        policy = Independent(Normal(mean, spread.clamp(-5, 2).exp()), 1)  # FAULT
        raw = policy.rsample()
        action = torch.tanh(raw)
        return action, policy.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6).sum(-1)  # FAULT


class Critic(nn.Module):
    def __init__(self, observation, action):
        super().__init__()
        self.first, self.second = mlp(observation + action, 1), mlp(observation + action, 1)

    def forward(self, x, action):
        both = torch.cat([x, action], -1)
        return self.first(both)[:, 0], self.second(both)[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=2190)
    parser.add_argument("--capacity", type=int, default=200000)
    args = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    if args.fixed:
        torch.distributions.Distribution.set_default_validate_args(False)
    buffer = ReplayBuffer(args.capacity, 24, 6, args.fixed)
    actor, critic, target = Actor(24, 6), Critic(24, 6), Critic(24, 6)
    target.load_state_dict(critic.state_dict())
    target.requires_grad_(False)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    start = None
    for step in range(1, args.steps + 1):
        observations, actions, rewards, nexts, dones = buffer.sample(256)
        with torch.no_grad():
            following, entropy = actor(nexts)
            value = torch.min(*target(nexts, following)) - 0.2 * entropy
            wanted = rewards + 0.99 * (1 - dones) * value
        first, second = critic(observations, actions)
        critic_loss = nn.functional.mse_loss(first, wanted) + nn.functional.mse_loss(second, wanted)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        if step % 2 == 0:
            critic.requires_grad_(False)
            action, entropy = actor(observations)
            actor_loss = (0.2 * entropy - torch.min(*critic(observations, action))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            critic.requires_grad_(True)
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), 0.005)
        if step == 20:
            start = time.perf_counter()
        if step % 250 == 0:
            print(f"global_step={step} qf_loss={critic_loss.item():.4f} actor_loss={actor_loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (args.steps - 20):.3f}")


if __name__ == "__main__":
    main()
