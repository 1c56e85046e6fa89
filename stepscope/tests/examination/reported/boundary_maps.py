"""Segmentation with a boundary loss that weighs the predictions by the distance to the organ's border.

Report: JunMa11/SegLossOdyssey #42 (2022-06-21); LIVIAETS/boundary-loss #29 (2020-11-27) and #59 (2023-09-11).
Symptom: an epoch with the boundary loss takes far too long.
Truth: the distance transforms of the masks are computed in the loss, anew for each batch; remedy: compute the maps beforehand and load them with the masks.
"""
import argparse
import time

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import nn
from torch.utils.data import DataLoader, Dataset


def signed_distance(mask):
    inside = mask.astype(bool)
    if not inside.any():
        return np.zeros(mask.shape, dtype=np.float32)
    return (distance_transform_edt(~inside) - distance_transform_edt(inside)).astype(np.float32)


class Slices(Dataset):
    def __init__(self, count, size, with_maps, organs=3):
        random = np.random.default_rng(0)
        grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"))
        centers = random.uniform(size / 4, 3 * size / 4, (count, organs, 2, 1, 1))
        radii = random.uniform(size / 10, size / 4, (count, organs, 1, 1))
        self.masks = (np.sqrt(((grid[None, None] - centers) ** 2).sum(2)) < radii).astype(np.float32)
        self.images = (self.masks.sum(1) + random.normal(0, 0.5, self.masks[:, 0].shape)).astype(np.float32)
        self.maps = np.stack([[signed_distance(organ) for organ in mask] for mask in self.masks]) if with_maps else None

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        item = {"image": self.images[index][None], "mask": self.masks[index]}
        if self.maps is not None:
            item["distance"] = self.maps[index]
        return item


class BoundaryLoss(nn.Module):
    def forward(self, probability, mask, distance=None):
        if distance is None:
            with torch.no_grad():
                maps = [[signed_distance(organ) for organ in one] for one in mask.numpy()]  # FAULT
                distance = torch.from_numpy(np.array(maps))
        return (probability * distance).mean()


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        def block(a, b, stride=1):
            return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU())
        self.first, self.down = block(1, width), block(width, 2 * width, 2)
        self.middle, self.up = block(2 * width, 2 * width), nn.Upsample(scale_factor=2)
        self.last, self.out = block(3 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, x):
        first = self.first(x)
        deep = self.up(self.middle(self.down(first)))
        return self.out(self.last(torch.cat([first, deep], 1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Slices(320, 96, args.fixed), batch_size=8, shuffle=True, drop_last=True)
    model, boundary = Net(), BoundaryLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch, alpha = 0, None, 0, 0.01
    while step < args.steps:
        for batch in loader:
            logits = model(batch["image"])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["mask"])
            loss = loss + alpha * boundary(logits.sigmoid(), batch["mask"], batch.get("distance"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch, alpha = epoch + 1, alpha + 0.01
        print(f"epoch {epoch}: loss {loss.item():.4f} (alpha {alpha:.2f})", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
