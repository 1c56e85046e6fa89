"""Portrait segmentation with colour augmentation of large photographs.

Report: anilsathyan7/Portrait-Segmentation #33 (2020-12-18); torchgeo/torchgeo PR #3539 (2026-03-25); weiliu89/caffe #830 (2018-01-15).
Symptom: the augmentation is the bottleneck; an epoch takes five times as long as with another order.
Truth: brightness, contrast and saturation are changed on the complete photograph before it is cropped and made smaller; remedy: crop and resize first.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

ROOT = Path("case-data/portrait_order")


def prepare(count=48):
    ROOT.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(count):
        path = ROOT / f"{number:03d}.jpg"
        if not path.exists():
            small = random.integers(0, 255, (15, 20, 3)).astype(np.uint8)
            Image.fromarray(small).resize((640, 480), Image.BICUBIC).save(path, quality=80)


def make_transform(small_first):
    colour = [transforms.ColorJitter(0.4, 0.4, 0.4), transforms.RandomGrayscale(0.1)]
    shape = [transforms.RandomCrop(384), transforms.Resize(80), transforms.RandomHorizontalFlip()]
    if small_first:
        return transforms.Compose([*shape, *colour, transforms.ToTensor()])
    return transforms.Compose([*colour, *shape, transforms.ToTensor()])  # FAULT


class Portraits(Dataset):
    def __init__(self, transform):
        self.paths = sorted(ROOT.glob("*.jpg"))
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        picture = self.transform(Image.open(self.paths[index]).convert("RGB"))
        return picture, (picture.mean(0, keepdim=True) > 0.5).float()


class Mobile(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(),
                                  nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * width, width, 2, 2), nn.ReLU(), nn.ConvTranspose2d(width, 1, 2, 2))

    def forward(self, x):
        return self.up(self.down(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=790)
    args = parser.parse_args()
    torch.manual_seed(0)
    prepare()
    loader = DataLoader(Portraits(make_transform(args.fixed)), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    model = Mobile()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for pictures, masks in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(pictures), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"Epoch {epoch}: loss {loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
