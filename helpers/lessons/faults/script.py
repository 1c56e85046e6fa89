"""Trains a small network on images of 32 × 32 pixels, one PNG file each."""

import csv
import os
import time
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

DATA = Path("data/cifar10/train")
CHECKPOINT = Path(__file__).with_name("checkpoint.pt")
IMAGES, BATCH, SEED = 512, 64, 0
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TO_TENSOR = transforms.PILToTensor()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Images(Dataset):
    def __init__(self, folder, count):
        with open(folder / "labels.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))[:count]
        self.paths = [folder / row["file"] for row in rows]
        self.labels = [int(row["label"]) for row in rows]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path, label = self.paths[index], self.labels[index]
        image = Image.open(path).convert("RGB")
        if image.size != (32, 32):
            raise ValueError(f"{path}: expected 32 × 32 pixels, found {image.size}")
        return TO_TENSOR(image), label


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, images):
        images = (images / 255 - self.mean) / self.std
        return self.layers(images)


def make_loader():
    images, order = Images(DATA, IMAGES), torch.Generator().manual_seed(SEED)
    return DataLoader(
        images,
        batch_size=BATCH,
        sampler=RandomSampler(images, generator=order),
        num_workers=min(4, os.cpu_count()),
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )


def make_model():
    torch.manual_seed(SEED)
    model = Network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def train_step(model, optimizer, images, labels):
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    correct = (logits.argmax(1) == labels).sum()
    return loss.detach(), correct


def main(epochs=3):
    loader = make_loader()
    model, optimizer = make_model()
    for epoch in range(epochs):
        start, losses, right = time.perf_counter(), [], 0
        for images, labels in loader:
            loss, correct = train_step(model, optimizer, images, labels)
            losses.append(loss)
            right += correct
        torch.save(model.state_dict(), CHECKPOINT)
        loss, rate = sum(losses).item() / len(losses), IMAGES / (time.perf_counter() - start)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {int(right) / IMAGES:.1%}, {rate:,.0f} images/s")


if __name__ == "__main__":
    main()
