"""Action recognition on clips that are kept as one JPEG per frame; eight frames of a clip go into the network.

Report: NVIDIA/Isaac-GR00T PR #743 (2026-08-07); facebookresearch/pytorchvideo #45 (2021-05-21).
Symptom: almost the whole time goes into reading clips.
Truth: the complete clip is decoded and most frames are thrown away; remedy: decide first which frames are wanted and decode only those.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path("case-data/clip_frames")
CLIPS, FRAMES = 96, 40


def prepare():
    if (ROOT / "done").exists():
        return
    random = np.random.default_rng(0)
    for clip in range(CLIPS):
        folder = ROOT / f"{clip:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        still = np.kron(random.integers(0, 255, (15, 20, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        for frame in range(FRAMES):
            Image.fromarray(np.roll(still, frame * 2, axis=1)).save(folder / f"{frame:03d}.jpg", quality=85)
    (ROOT / "done").touch()


def decode(path):
    return np.asarray(Image.open(path).convert("RGB").resize((80, 60)))


class Clips(Dataset):
    def __init__(self, segments, only_needed):
        self.folders = sorted(path for path in ROOT.iterdir() if path.is_dir())
        self.segments, self.only_needed = segments, only_needed

    def __len__(self):
        return len(self.folders)

    def sample(self, count):
        borders = torch.linspace(0, count, self.segments + 1)
        return (borders[:-1] + torch.rand(self.segments) * (borders[1:] - borders[:-1])).long().tolist()

    def __getitem__(self, index):
        paths = sorted(self.folders[index].glob("*.jpg"))
        wanted = self.sample(len(paths))
        if self.only_needed:
            frames = [decode(paths[number]) for number in wanted]
        else:
            video = [decode(path) for path in paths]  # FAULT
            frames = [video[number] for number in wanted]
        clip = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2).float() / 255
        return clip, index % 8


class Tower(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        widths = [3, 8, 16, 32]
        layers = []
        for inputs, outputs in zip(widths, widths[1:]):
            layers += [nn.Conv3d(inputs, outputs, 3, stride=(1, 2, 2), padding=1), nn.BatchNorm3d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3, 4)))


def train_one_epoch(model, loader, optimizer, clock, limit):
    for clips, labels in loader:
        loss = nn.functional.cross_entropy(model(clips), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock["steps"] += 1
        if clock["steps"] == 20:
            clock["start"] = time.perf_counter()
        if clock["steps"] == limit:
            break
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=280)
    args = parser.parse_args()
    torch.manual_seed(0)
    prepare()
    loader = DataLoader(Clips(8, args.fixed), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    clock = {"steps": 0}
    epoch = 0
    while clock["steps"] < args.steps:
        loss = train_one_epoch(model, loader, optimizer, clock, args.steps)
        epoch += 1
        print(f"epoch {epoch} loss {loss:.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - clock['start']) / (clock['steps'] - 20):.3f}")


if __name__ == "__main__":
    main()
