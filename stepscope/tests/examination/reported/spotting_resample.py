"""Keyword spotting on 22 kHz recordings that the model wants at 16 kHz.

Report: pytorch/audio PR #1499 (2021-05-11), and sgl-project/sglang-omni PR #1539 (2026-08-14).
Symptom: resampling in the data pipeline takes far more time than the convolution it is made of.
Truth: the windowed sinc kernel depends only on the two rates, yet it is built anew in each call; remedy: build it once and keep it.
"""
import argparse
import math
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KERNELS = {}


def sinc_kernel(source, target, zeros=24, rolloff=0.99):
    common = math.gcd(source, target)
    source, target = source // common, target // common
    base = min(source, target) * rolloff
    width = math.ceil(zeros * source / base)
    index = torch.arange(-width, width + source, dtype=torch.float64) / source
    times = (-torch.arange(target, dtype=torch.float64) / target)[:, None] + index[None]
    times = (times * base).clamp(-zeros, zeros)
    window = torch.cos(times * math.pi / zeros / 2) ** 2
    kernel = torch.where(times == 0, torch.ones((), dtype=torch.float64), torch.sin(times * math.pi) / (times * math.pi))
    return (kernel * window * base / source).float()[:, None], width


def cached_kernel(source, target):
    if (source, target) not in KERNELS:
        KERNELS[source, target] = sinc_kernel(source, target)
    return KERNELS[source, target]


def apply_kernel(wave, kernel, width, source, target):
    common = math.gcd(source, target)
    source, target = source // common, target // common
    length = math.ceil(target * wave.shape[-1] / source)
    padded = nn.functional.pad(wave[None, None], (width, width + source))
    return nn.functional.conv1d(padded, kernel, stride=source)[0].t().reshape(-1)[:length]


class Commands(Dataset):
    def __init__(self, waves, labels, cache):
        self.waves, self.labels, self.cache = waves, labels, cache
        self.window = torch.hann_window(400)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        wave = torch.from_numpy(self.waves[index])
        if self.cache:
            kernel, width = cached_kernel(22050, 16000)
        else:
            kernel, width = sinc_kernel(22050, 16000)  # FAULT
        wave = apply_kernel(wave, kernel, width, 22050, 16000)
        spectrum = torch.stft(wave, 400, 160, window=self.window, return_complex=True).abs()
        return torch.log1p(spectrum[:64, :96]), self.labels[index]


class Spotter(nn.Module):
    def __init__(self, classes=12):
        super().__init__()
        layers = []
        for inputs, outputs in [(1, 12), (12, 16), (16, 24)]:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.body(x[:, None]).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="keep the kernel")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    waves = random.normal(size=(1600, 22050)).astype(np.float32)
    labels = random.integers(0, 12, 1600)
    loader = DataLoader(Commands(waves, labels, args.fixed), batch_size=args.batch_size, shuffle=True, drop_last=True,
                        num_workers=2, persistent_workers=True)
    model = Spotter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        total = 0.0
        for features, target in loader:
            loss = nn.functional.cross_entropy(model(features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch}: {step} steps, loss {total / len(loader):.3f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
