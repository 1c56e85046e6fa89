"""Classification of skin-like pictures with class weights and TensorBoard. Two faults.

Report: mlcommons/GaNDLF #362 (2022-03-21); owkin/FLamby PR #247 (2022-11-02), deepmodeling/deepmd-kit PR #996 (2021-08-19).
Symptom: long pauses before each epoch, and steps that take three times as long with TensorBoard as without.
Truth: the class weights are counted by going through the loader with all its pictures in each epoch, remedy: count them in the table of labels;
histograms of all weights are written in each step, remedy: write them once an epoch.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

ROOT = Path("case-data/weights_histograms")


def prepare(count=240):
    (ROOT / "images").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    labels = random.choice(6, count, p=[0.5, 0.2, 0.1, 0.1, 0.06, 0.04])
    for number in range(count):
        path = ROOT / "images" / f"{number:04d}.jpg"
        if not path.exists():
            Image.fromarray(random.integers(0, 255, (6, 6, 3)).astype(np.uint8)).resize((96, 96)).save(path)
    return labels


class Skin(Dataset):
    def __init__(self, labels):
        self.labels = labels
        self.paths = [ROOT / "images" / f"{number:04d}.jpg" for number in range(len(labels))]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = np.asarray(Image.open(self.paths[index]).resize((64, 64)), dtype=np.float32)
        return torch.from_numpy(picture).permute(2, 0, 1) / 255 - 0.5, int(self.labels[index])


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        layers, inputs = [], 3
        for number in range(6):
            outputs = width * (1 + number // 2)
            layers += [nn.Conv2d(inputs, outputs, 3, 2 if number % 2 == 0 else 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        self.body, self.head = nn.Sequential(*layers), nn.Linear(inputs, 6)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def weights_from_loader(loader, classes=6):
    counts = torch.zeros(classes)
    for _, labels in loader:  # FAULT
        counts += torch.bincount(labels, minlength=classes)
    return counts.sum() / counts / classes


def weights_from_labels(labels, classes=6):
    counts = torch.from_numpy(np.bincount(labels, minlength=classes)).float()
    return counts.sum() / counts / classes


def write_histograms(writer, model, step):
    for name, parameter in model.named_parameters():
        writer.add_histogram(name, parameter.detach(), step)  # FAULT


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=270)
    args = parser.parse_args()
    torch.manual_seed(0)
    labels = prepare()
    loader = DataLoader(Skin(labels), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    writer = SummaryWriter("case-data/weights_histograms/runs")
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        weights = weights_from_labels(labels) if args.fixed else weights_from_loader(loader)
        criterion = nn.CrossEntropyLoss(weight=weights)
        for pictures, target in loader:
            loss = criterion(model(pictures), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            writer.add_scalar("loss", loss.item(), step)
            if not args.fixed:
                write_histograms(writer, model, step)
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        if args.fixed:
            write_histograms(writer, model, step)
        print(f"Epoch {epoch} train loss {loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")
    writer.close()


if __name__ == "__main__":
    main()
