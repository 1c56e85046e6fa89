"""Depth estimation: a frozen feature network in front of a small head that is trained.

Report: alexrich021/3dvnet #11 (2022-09-15); nianticlabs/ace #28 (2023-09-28).
Symptom: a step with the frozen network takes as long as a step in which everything is trained.
Truth: `eval()` freezes only the statistics; gradients of the whole network are still computed, the optimizer merely does not use them; remedy: no gradients for it.
"""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Inverted(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(width, 3 * width, 1, bias=False), nn.BatchNorm2d(3 * width), nn.ReLU(),
                                 nn.Conv2d(3 * width, 3 * width, 3, stride, 1, groups=3 * width, bias=False), nn.BatchNorm2d(3 * width),
                                 nn.ReLU(), nn.Conv2d(3 * width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.same = stride == 1

    def forward(self, x):
        return x + self.net(x) if self.same else self.net(x)


class Backbone(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.blocks = nn.Sequential(*[Inverted(width, 2 if number == 2 else 1) for number in range(6)])

    def forward(self, x):
        return self.blocks(self.stem(x))


class DepthNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.backbone = Backbone(width)
        self.head = nn.Sequential(nn.Conv2d(width, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 1, 1))

    def forward(self, pictures):
        features = self.backbone(pictures)  # FAULT
        return nn.functional.interpolate(self.head(features), scale_factor=4)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()  # FAULT
        return self


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(320, 3, 64, 64), torch.rand(320, 1, 64, 64)), batch_size=4, shuffle=True)
    model = DepthNet().train()
    if args.fixed:
        model.backbone.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for pictures, depth in loader:
            loss = nn.functional.l1_loss(model(pictures), depth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch}: train/loss {loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
