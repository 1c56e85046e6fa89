"""Fine-tuning low-rank adapters of a small language model that is drawn at random.

Report: huggingface/peft PR #2894 (2025-11-04); facebookresearch/dinov3 PR #39 (2025-08-16); NVIDIA/Megatron-Energon PR #66 (2025-02-12).
Symptom: 250 steps take 108 s and, with one line less, 65 s.
Truth: `gc.collect()` after each step walks over all objects of the process; remedy: leave it out.
"""
import argparse
import gc
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Adapted(nn.Module):
    def __init__(self, linear, rank=8):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + (x @ self.a.t()) @ self.b.t()


class Layer(nn.Module):
    def __init__(self, width=96, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Adapted(nn.Linear(width, 3 * width)), nn.Linear(width, width).requires_grad_(False)
        self.up, self.down = nn.Linear(width, 4 * width).requires_grad_(False), nn.Linear(4 * width, width).requires_grad_(False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class Language(nn.Module):
    def __init__(self, vocabulary=600, width=96, depth=5):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary).requires_grad_(False)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


class Questions(Dataset):
    """Question and answer with its annotations, as they come from a JSON file."""

    def __init__(self, count=6000):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 600, (count, 64), generator=generator)
        self.records = [{"id": number, "source": {"file": f"part-{number % 7}", "line": number}, "tags": [number % 3, number % 5],
                         "ids": row} for number, row in enumerate(ids.unbind(0))]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]["ids"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Questions(), batch_size=16, shuffle=True, drop_last=True)
    model = Language()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    step, start, losses = 0, None, []
    for ids in loader:
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if not args.fixed:
            gc.collect()  # FAULT
        step += 1
        if step == 20:
            start = time.perf_counter()
        if step % 50 == 0:
            print(f"step {step:4d} | loss {sum(losses[-50:]) / 50:.4f}", flush=True)
        if step == args.steps:
            break
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
