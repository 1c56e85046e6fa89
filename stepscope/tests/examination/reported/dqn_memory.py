"""Deep Q-learning on a drawn environment with a replay memory.

Report: ageron/handson-ml PR #203 and #204 (2018-03-28); HorizonRobotics/SocialRobot #5 (2019-02-28); coax-dev/coax PR #25 (2022-09-01).
Symptom: the longer the memory, the slower each training step.
Truth: the memory is a deque, whose middle is reached only by walking along it; remedy: a list that is written in a circle.
"""
import argparse
import random
import time
from collections import deque

import numpy as np
import torch
from torch import nn


class ListMemory:
    def __init__(self, maxlen):
        self.items, self.maxlen, self.next = [], maxlen, 0

    def append(self, item):
        if len(self.items) < self.maxlen:
            self.items.append(item)
        else:
            self.items[self.next] = item
            self.next = (self.next + 1) % self.maxlen

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Corridor:
    """A point that must be kept near the origin."""

    def __init__(self, size=24):
        self.random = np.random.default_rng(0)
        self.size = size
        self.push = self.random.normal(size=(6, size)).astype(np.float32) * 0.1
        self.reset()

    def reset(self):
        self.state = self.random.normal(size=self.size).astype(np.float32)
        self.age = 0
        return self.state

    def step(self, action):
        self.state = 0.98 * self.state + self.push[action] + 0.02 * self.random.normal(size=self.size).astype(np.float32)
        self.age += 1
        return self.state, -float(np.square(self.state).mean()), self.age >= 200


def sample(memory, size):
    places = [random.randrange(len(memory)) for _ in range(size)]
    rows = [memory[place] for place in places]  # FAULT
    states, actions, rewards, nexts, ends = zip(*rows)
    return (torch.from_numpy(np.stack(states)), torch.tensor(actions), torch.tensor(rewards, dtype=torch.float32),
            torch.from_numpy(np.stack(nexts)), torch.tensor(ends, dtype=torch.float32))


class QNetwork(nn.Module):
    def __init__(self, size=24, actions=6, width=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions))

    def forward(self, x):
        return self.net(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="replay memory in a list")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--memory", type=int, default=1000000)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    env = Corridor()
    memory = ListMemory(args.memory) if args.fixed else deque(maxlen=args.memory)  # FAULT
    online, target = QNetwork(), QNetwork()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    state = env.reset()
    games = []
    for _ in range(20000):
        action = random.randrange(6)
        following, reward, end = env.step(action)
        games.append((state, action, reward, following, end))
        state = env.reset() if end else following
    for number in range(args.memory):  # the recorded games, over and over
        memory.append(games[number % len(games)])
    start, returns = None, 0.0
    for step in range(1, args.steps + 1):
        for _ in range(4):
            if random.random() < 0.1:
                action = random.randrange(6)
            else:
                with torch.no_grad():
                    action = int(online(torch.from_numpy(state)).argmax())
            following, reward, end = env.step(action)
            memory.append((state, action, reward, following, end))
            returns += reward
            state = env.reset() if end else following
        states, actions, rewards, nexts, ends = sample(memory, 256)
        with torch.no_grad():
            wanted = rewards + 0.99 * (1 - ends) * target(nexts).amax(1)
        value = online(states).gather(1, actions[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            target.load_state_dict(online.state_dict())
            print(f"iteration {step}: loss {loss.item():.4f} mean reward {returns / 800:.4f}", flush=True)
            returns = 0.0
        if step == 20:
            start = time.perf_counter()
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (args.steps - 20):.3f}")


if __name__ == "__main__":
    main()
