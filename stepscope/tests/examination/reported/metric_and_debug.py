"""Click prediction with a metric over the epoch and a training log. Two faults.

Report: pytorch/ignite PR #967 (2020-04-22), sktime/pytorch-forecasting PR #2371 (2026-08-06); NVIDIA-NeMo/Emerging-Optimizers PR #255 (2026-07-22), vllm-project/vllm-ascend PR #15552 (2026-09-02).
Symptom: updating the metric takes longer the longer the epoch lasts; a hot path is slow although debug messages are off.
Truth: each update concatenates everything seen so far with the new batch (quadratic), remedy: keep a list, concatenate once;
the messages are f-strings with tensors, formatted even if no one logs them, remedy: pass the tensors as arguments of the logging call.
"""
import argparse
import logging
import time

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

logger = logging.getLogger("clicks")


class GrowingTensor:
    def __init__(self):
        self.reset()

    def reset(self):
        self.predictions, self.targets = torch.empty(0, 8), torch.empty(0)

    def update(self, predictions, targets):
        self.predictions = torch.cat([self.predictions, predictions], dim=0)  # FAULT
        self.targets = torch.cat([self.targets, targets], dim=0)  # FAULT

    def compute(self):
        return ranking(self.predictions, self.targets)


class KeptList(GrowingTensor):
    def reset(self):
        self.predictions, self.targets = [], []

    def update(self, predictions, targets):
        self.predictions.append(predictions)
        self.targets.append(targets)

    def compute(self):
        return ranking(torch.cat(self.predictions), torch.cat(self.targets))


def ranking(predictions, targets):
    order = predictions.mean(1).argsort()
    ranks = torch.empty(len(order), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(order) + 1, dtype=torch.float64)
    positive = targets.bool()
    count = positive.sum().item()
    return (ranks[positive].sum().item() - count * (count + 1) / 2) / max(count * (len(order) - count), 1)


class Clicks(nn.Module):
    def __init__(self, width=128, experts=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.Linear(width, experts)

    def forward(self, x):
        return self.heads(self.body(x))


def log_step(step, logits, loss, eager):
    if eager:
        logger.debug(f"step {step}: logits {logits[:24]} loss {loss}")  # FAULT
    else:
        logger.debug("step %s: logits %s loss %s", step, logits, loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="list of batches, lazy messages")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200000, 40), (torch.rand(200000) < 0.2).float())
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 256, True), batch_size=None)
    model = Clicks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    metric = KeptList() if args.fixed else GrowingTensor()
    step, start = 0, None
    while step < args.steps:
        metric.reset()
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, y[:, None].expand_as(logits))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metric.update(logits.detach(), y)
            log_step(step, logits, loss, not args.fixed)
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        logger.info("step %d auc %.4f", step, metric.compute())
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
