"""A force field on a hundred structures: short epochs, training and validation loaders with workers.

Report: metatensor/metatrain PR #1271 (2026-09-18); openclimatefix/pvnet PR #436 (2025-08-01); open-mmlab/mmhuman3d PR #233 (2022-07-24).
Symptom: much of an epoch passes before its first batch; 1.10 s an epoch instead of 0.74 s.
Truth: the workers are started and stopped in each epoch, for each loader; remedy: `persistent_workers=True`.
"""
import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Structures(Dataset):
    def __init__(self, count, atoms=24, seed=0):
        random = np.random.default_rng(seed)
        self.positions = random.normal(size=(count, atoms, 3)).astype(np.float32) * 2
        self.energies = random.normal(size=count).astype(np.float32)
        self.grid = np.linspace(0.5, 5.0, 12, dtype=np.float32)

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, index):
        rotation, _ = np.linalg.qr(np.random.normal(size=(3, 3)))
        positions = self.positions[index] @ rotation.astype(np.float32)
        distances = np.sqrt(((positions[:, None] - positions[None]) ** 2).sum(-1) + 1e-9)
        radial = np.exp(-4 * (distances[..., None] - self.grid) ** 2)
        return torch.from_numpy(radial), torch.tensor(self.energies[index])


class Potential(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(12, width), nn.SiLU(), nn.Linear(width, width))
        self.atom = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, radial):
        return self.atom(self.pair(radial).sum(2)).sum((1, 2))


def make_loaders(persistent):
    options = {"batch_size": 8, "num_workers": 2, "persistent_workers": persistent}  # FAULT
    train = DataLoader(Structures(96, seed=1), shuffle=True, **options)
    valid = DataLoader(Structures(16, seed=2), **options)
    return train, valid


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    errors = [(model(radial) - energy).abs().mean().item() for radial, energy in loader]
    model.train()
    return float(np.mean(errors))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="persistent workers")
    parser.add_argument("--steps", type=int, default=1090)
    args = parser.parse_args()
    torch.manual_seed(0)
    train, valid = make_loaders(args.fixed)
    model = Potential()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for radial, energy in train:
            loss = nn.functional.mse_loss(model(radial), energy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        error = evaluate(model, valid)
        if epoch % 5 == 0:
            print(f"epoch {epoch}: train {loss.item():.4f} valid MAE {error:.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
