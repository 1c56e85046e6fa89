"""Patches of CT-like volumes for a small U-Net in three dimensions.

Report: MIC-DKFZ/nnUNet #566 (2021-03-24), #2380 (2024-07-19) and #1332 (2023-03-16).
Symptom: training with the compressed files is bound by the processors.
Truth: a compressed archive cannot be read in part, so each patch decompresses its whole case; remedy: unpack to .npy once and map it.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path("case-data/volume_npz")
SHAPE, PATCH = (64, 80, 80), 24


def prepare(cases=16):
    ROOT.mkdir(parents=True, exist_ok=True)
    for case in range(cases):
        packed, plain = ROOT / f"case_{case:02d}.npz", ROOT / f"case_{case:02d}.npy"
        if packed.exists() and plain.exists():
            continue
        random = np.random.default_rng(case)
        image = random.normal(0, 60, SHAPE).astype(np.float32).round(0)
        mask = (image > 40).astype(np.float32)
        both = np.stack([image / 100, mask])
        np.savez_compressed(packed, data=both)
        np.save(plain, both)


def load_case(stem, unpacked):
    if unpacked:
        return np.load(f"{stem}.npy", mmap_mode="r")
    return np.load(f"{stem}.npz")["data"]  # FAULT


class Patches(Dataset):
    def __init__(self, length, unpacked):
        self.stems = sorted(str(path.with_suffix("")) for path in ROOT.glob("*.npz"))
        self.length, self.unpacked = length, unpacked

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        case = load_case(self.stems[index % len(self.stems)], self.unpacked)
        corner = [int(torch.randint(0, size - PATCH + 1, ())) for size in SHAPE]
        box = tuple(slice(start, start + PATCH) for start in corner)
        patch = np.ascontiguousarray(case[(slice(None),) + box])
        return torch.from_numpy(patch[:1]), torch.from_numpy(patch[1:])


def block(inputs, outputs):
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01))


class Unet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.pool, self.grow = nn.MaxPool3d(2), nn.Upsample(scale_factor=2)
        self.out = nn.Conv3d(width, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.bottom(self.pool(second))
        x = self.up2(torch.cat([self.grow(x), second], 1))
        return self.out(self.up1(torch.cat([self.grow(x), first], 1)))


def dice_loss(logits, target):
    probability = logits.sigmoid()
    overlap = (probability * target).sum((1, 2, 3, 4))
    size = probability.sum((1, 2, 3, 4)) + target.sum((1, 2, 3, 4))
    return 1 - ((2 * overlap + 1) / (size + 1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="use the unpacked files")
    parser.add_argument("--steps", type=int, default=280)
    args = parser.parse_args()
    torch.manual_seed(0)
    prepare()
    loader = DataLoader(Patches(128, args.fixed), batch_size=2, num_workers=2, persistent_workers=True)
    model = Unet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.99, nesterov=True)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        losses = []
        for image, mask in loader:
            logits = model(image)
            loss = dice_loss(logits, mask) + nn.functional.binary_cross_entropy_with_logits(logits, mask)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 12)
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch}: train loss {np.mean(losses):.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
