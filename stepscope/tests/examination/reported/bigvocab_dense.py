"""Text classification with a large vocabulary and a recurrent network.

Report: pytorch/pytorch #5309 (2018-02-20).
Symptom: with an embedding of several hundred thousand words the optimization is slow, on CPU as on GPU.
Truth: the gradient of the embedding is a dense matrix of the table's size although a batch touches few rows; remedy: `sparse=True`.
"""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, words, sparse, width=64, hidden=96, classes=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=sparse)  # FAULT
        self.rnn = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0].mean(1))


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=1080)
    parser.add_argument("--words", type=int, default=100000)
    args = parser.parse_args()
    torch.manual_seed(0)
    ids = (torch.rand(4800, 40) ** 3 * args.words).long()
    labels = torch.randint(0, 4, (4800,))
    loader = DataLoader(TensorDataset(ids, labels), batch_size=16, shuffle=True)
    model = Classifier(args.words, args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        scores = []
        for batch, target in loader:
            logits = model(batch)
            loss = nn.functional.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scores.append(accuracy(logits, target))
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch}: loss {loss.item():.4f} acc {sum(scores) / len(scores):.3f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
