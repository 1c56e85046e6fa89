"""Classification of X-ray-like pictures that stay inside one tar archive.

Report: thammegowda/mtdata #78 (2021-10-28); mlmed/torchxrayvision PR #27 (2020-08-06); zerothi/sisl PR #914 (2025-04-27).
Symptom: reading members from the archive without extracting it is slow.
Truth: a tar has no table of contents; who opens it anew and asks for a name reads all headers before it; remedy: read the list of members once and keep the archive open.
"""
import argparse
import io
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

ARCHIVE = Path("case-data/archive_tar/images.tar")
COUNT = 320


def prepare():
    if ARCHIVE.exists():
        return
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    part = ARCHIVE.with_suffix(".part")
    with tarfile.open(part, "w") as archive:
        for number in range(COUNT):
            picture = np.kron(random.integers(0, 255, (12, 12)), np.ones((8, 8))).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(picture).save(buffer, "PNG")
            info = tarfile.TarInfo(f"images/{number:05d}.png")
            info.size = buffer.tell()
            buffer.seek(0)
            archive.addfile(info, buffer)
    part.rename(ARCHIVE)


class Xrays(Dataset):
    def __init__(self, keep_open):
        self.names = [f"images/{number:05d}.png" for number in range(COUNT)]
        self.keep_open, self.archive, self.members = keep_open, None, None

    def __len__(self):
        return COUNT

    def read(self, name):
        if self.keep_open:
            if self.archive is None:
                self.archive = tarfile.open(ARCHIVE)
                self.members = {member.name: member for member in self.archive.getmembers()}
            return self.archive.extractfile(self.members[name]).read()
        with tarfile.open(ARCHIVE) as archive:
            return archive.extractfile(name).read()  # FAULT

    def __getitem__(self, index):
        picture = Image.open(io.BytesIO(self.read(self.names[index])))
        pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255 - 0.5)
        return pixels[None], index % 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [1, 16, 32, 64]
        layers = []
        for inputs, outputs in zip(widths, widths[1:]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=270)
    args = parser.parse_args()
    torch.manual_seed(0)
    prepare()
    loader = DataLoader(Xrays(args.fixed), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch:3d} loss {loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
