"""A character model that carries its state from segment to segment of a document; one update a document.

Report: isds-neu/PeRCNN #3 (2024-03-14); yunjey/pytorch-tutorial #90 (2017-12-24); pytorch/pytorch #2769 (2017-09-18).
Symptom: within a document each segment takes longer than the one before and memory grows.
Truth: the state is never detached, `retain_graph=True` silences the error, and each backward pass goes through the whole past; remedy: detach the state after each segment.
"""
import argparse
import time

import torch
from torch import nn


class CharModel(nn.Module):
    def __init__(self, letters=64, width=48, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.cell = nn.GRU(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, letters)

    def forward(self, ids, state):
        out, state = self.cell(self.embed(ids), state)
        return self.head(out), state


def segments(text, rows, length):
    usable = len(text) // rows * rows
    table = text[:usable].view(rows, -1)
    for first in range(0, table.shape[1] - length - 1, length):
        yield table[:, first : first + length], table[:, first + 1 : first + length + 1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="detach the state")
    parser.add_argument("--steps", type=int, default=530)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--segments", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    documents = torch.randint(0, 64, (40, args.rows * (args.length * args.segments + 2)))
    model = CharModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        total = 0.0
        for document in documents:
            state = None
            optimizer.zero_grad()
            for ids, following in segments(document, args.rows, args.length):
                logits, state = model(ids, state)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
                if args.fixed:
                    loss.backward()
                    state = state.detach()
                else:
                    loss.backward(retain_graph=True)  # FAULT
                total += loss.item()
                step += 1
                if step == 20:
                    start = time.perf_counter()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step >= args.steps:
                break
        epoch += 1
        print(f"Epoch [{epoch}], Loss: {total / len(documents) / args.segments:.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
