"""Semi-supervised image classification: a labelled and an unlabelled loader and an averaged model. Two faults.

Report: leohsuofnthu/Pytorch-IterativeFCN #7 (2021-12-15) and duoke360.com/post/34440 (`next(iter(loader))`); lightly-ai/lightly PR #1899 (2026-03-03), ultralytics PR #25315 (2026-07-20) (averaged model).
Symptom: an iteration takes many times as long as its forward and backward passes.
Truth: `next(iter(loader))` builds a new iterator, starts its worker and fetches anew in each iteration, remedy: one iterator that is renewed when it ends;
the averaged model is updated by two new tensors per entry of the state dict, remedy: one in-place foreach call.
"""
import argparse
import copy
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, count, labelled, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pixels = torch.randint(0, 256, (500, 3, 32, 32), generator=generator, dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (count,), generator=generator).tolist()
        self.labelled, self.count = labelled, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        picture = self.pixels[index % 500].float() / 255
        if torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        if self.labelled:
            return picture, self.labels[index]
        dx, dy = torch.randint(-4, 5, (2,)).tolist()
        return picture, picture.roll((dx, dy), (1, 2))


def wide_block(inputs, outputs, stride):
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.LeakyReLU(0.1), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False))


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        blocks = []
        for number in range(20):
            blocks.append(wide_block(width if number < 3 else 2 * width, 2 * width if number >= 2 else width, 2 if number in (2, 6) else 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Forever:
    def __init__(self, loader):
        self.loader, self.iterator = loader, iter(loader)

    def draw(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


class Averaged:
    def __init__(self, model, decay, at_once):
        self.model, self.decay, self.at_once = copy.deepcopy(model).requires_grad_(False), decay, at_once

    @torch.no_grad()
    def update(self, model):
        if self.at_once:
            torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - self.decay)
            torch._foreach_copy_(list(self.model.buffers()), list(model.buffers()))
            return
        mine, other = self.model.state_dict(), model.state_dict()
        for key in mine:
            if mine[key].dtype.is_floating_point:
                mine[key] = self.decay * mine[key] + (1 - self.decay) * other[key].detach().clone()  # FAULT
        self.model.load_state_dict(mine)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    labelled = DataLoader(Pictures(4000, True, 1), batch_size=8, shuffle=True, drop_last=True, num_workers=1)
    unlabelled = DataLoader(Pictures(50000, False, 2), batch_size=24, shuffle=True, drop_last=True, num_workers=1)
    model = Net()
    average = Averaged(model, 0.999, args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    draw_labelled, draw_unlabelled = Forever(labelled), Forever(unlabelled)
    start = None
    for step in range(1, args.steps + 1):
        if args.fixed:
            pictures, labels = draw_labelled.draw()
            weak, strong = draw_unlabelled.draw()
        else:
            pictures, labels = next(iter(labelled))  # FAULT
            weak, strong = next(iter(unlabelled))  # FAULT
        logits = model(torch.cat([pictures, strong]))
        with torch.no_grad():
            confidence, pseudo = model(weak).softmax(-1).max(-1)
        supervised = nn.functional.cross_entropy(logits[: len(labels)], labels)
        unsupervised = (nn.functional.cross_entropy(logits[len(labels) :], pseudo, reduction="none") * (confidence > 0.95)).mean()
        loss = supervised + unsupervised
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        if step == 20:
            start = time.perf_counter()
        if step % 100 == 0:
            print(f"iteration {step} loss {loss.item():.4f} x {supervised.item():.4f} u {unsupervised.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (args.steps - 20):.3f}")


if __name__ == "__main__":
    main()
