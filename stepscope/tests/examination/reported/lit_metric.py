"""Tagging with Lightning and metrics of torchmetrics that are logged once an epoch.

Report: Lightning-AI/torchmetrics #1217 (2022-09-13); Lightning-AI/pytorch-lightning #20160 (comment of 2025-01-30, quoting the documentation).
Symptom: the metrics take a large part of each training step though only their value at the epoch's end is wanted.
Truth: calling the metric (`forward`) updates it and computes the value of the batch as well; remedy: call `update` and let the epoch's end compute.
"""
import argparse
import logging
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MultilabelAUROC, MultilabelAveragePrecision, MultilabelF1Score


class Tagger(L.LightningModule):
    def __init__(self, only_update, tags=12, width=320):
        super().__init__()
        self.only_update = only_update
        self.net = nn.Sequential(nn.Linear(96, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, tags))
        self.metrics = MetricCollection({
            "auroc": MultilabelAUROC(tags, thresholds=20), "ap": MultilabelAveragePrecision(tags, thresholds=20),
            "f1": MultilabelF1Score(tags)}, prefix="train_")

    def training_step(self, batch, _):
        features, tags = batch
        logits = self.net(features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, tags.float())
        if self.only_update:
            self.metrics.update(logits.detach(), tags)
        else:
            self.metrics(logits.detach(), tags)  # FAULT
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(Callback):
    start = None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 20:
            self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer, *_):
        print(f"epoch {trainer.current_epoch} step {trainer.global_step}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=860)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0)
    data = TensorDataset(torch.randn(51200, 96), (torch.rand(51200, 12) < 0.2).long())
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 512, True), batch_size=None)
    clock = Clock()
    trainer = L.Trainer(max_steps=args.steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                        enable_model_summary=False, enable_checkpointing=False, callbacks=[clock])
    trainer.fit(Tagger(args.fixed), loader)
    print(f"step_ms={1e3 * (time.perf_counter() - clock.start) / (trainer.global_step - 20):.3f}")


if __name__ == "__main__":
    main()
