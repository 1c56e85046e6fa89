"""A radiance field on drawn rays: coarse network, positional encoding, volume rendering.

Report: yenchenlin/nerf-pytorch #42 (2021-08-16); Xingyu-Lin/mbpo_pytorch #8 (2022-04-17); icon-lab/SynDiff #43 (2024-05-17).
Symptom: an iteration takes up to twice the time it should.
Truth: autograd's anomaly detection was left on; remedy: turn it off once the search for a NaN is over.
"""
import argparse
import time

import torch
from torch import nn


def encode(x, frequencies):
    parts = [x]
    for power in range(frequencies):
        for function in (torch.sin, torch.cos):
            parts.append(function(x * 2.0**power))
    return torch.cat(parts, -1)


class Field(nn.Module):
    def __init__(self, depth=5, width=48, skip=2):
        super().__init__()
        self.skip = skip
        layers = [nn.Linear(63, width)]
        for number in range(1, depth):
            layers.append(nn.Linear(width + (63 if number == skip else 0), width))
        self.layers = nn.ModuleList(layers)
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    def forward(self, points, directions):
        x = hidden = encode(points, 10)
        for number, layer in enumerate(self.layers):
            if number == self.skip:
                hidden = torch.cat([hidden, x], -1)
            hidden = torch.relu(layer(hidden))
        density = self.density(hidden)[..., 0]
        view = torch.cat([self.feature(hidden), encode(directions, 4)], -1)
        return torch.sigmoid(self.colour(torch.relu(self.view(view)))), density


def render(model, origins, directions, samples, near=2.0, far=6.0):
    depths = torch.linspace(near, far, samples).expand(len(origins), samples)
    middle = 0.5 * (depths[:, 1:] + depths[:, :-1])
    upper, lower = torch.cat([middle, depths[:, -1:]], -1), torch.cat([depths[:, :1], middle], -1)
    depths = lower + (upper - lower) * torch.rand_like(depths)
    points = origins[:, None] + directions[:, None] * depths[..., None]
    views = nn.functional.normalize(directions, dim=-1)[:, None].expand_as(points)
    colour, density = model(points, views)
    distance = torch.cat([depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1e10)], -1)
    alpha = 1 - torch.exp(-torch.relu(density) * distance)
    passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * passed
    return (weights[..., None] * colour).sum(1), weights


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="without anomaly detection")
    parser.add_argument("--steps", type=int, default=1230)
    parser.add_argument("--rays", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.fixed:
        torch.autograd.set_detect_anomaly(True)  # FAULT
    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999))
    origins, directions = torch.randn(20000, 3) * 0.1, torch.randn(20000, 3)
    colours = torch.rand(20000, 3)
    decay = 0.1 ** (1 / 2000)
    start = None
    for step in range(1, args.steps + 1):
        chosen = torch.randint(0, len(origins), (args.rays,))
        rgb, _ = render(model, origins[chosen], directions[chosen], 32)
        loss = nn.functional.mse_loss(rgb, colours[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= decay
        if step == 20:
            start = time.perf_counter()
        if step % 100 == 0:
            psnr = -10 * torch.log10(loss.detach())
            print(f"[TRAIN] Iter: {step} Loss: {loss.item():.5f} PSNR: {psnr.item():.2f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (args.steps - 20):.3f}")


if __name__ == "__main__":
    main()
