"""Morphological inflection with Lightning; a checkpoint is written after each short epoch.

Report: CUNY-CL/yoyodyne #32 (2023-01-27); Lightning-AI/pytorch-lightning #21017 (2025-07-31), #10389 (2021-11, comment of 2024-11-02).
Symptom: checkpoints are far bigger than the model and the time between epochs is long.
Truth: `save_hyperparameters()` keeps each argument of the constructor, the training set among them, and writes it into each checkpoint; remedy: exclude the dataset.
"""
import argparse
import logging
import random
import shutil
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Words(Dataset):
    def __init__(self, count):
        chooser = random.Random(0)
        self.samples = []
        for number in range(count):
            source = "".join(chooser.choice(LETTERS) for _ in range(12))
            self.samples.append({"source": source, "target": source[::-1], "features": [f"V{number % 9}", f"N{number % 4}"],
                                 "position": number})
        self.vocabulary = {letter: number for number, letter in enumerate(LETTERS)}

    def __len__(self):
        return len(self.samples)

    def encode(self, text):
        return torch.tensor([self.vocabulary[letter] for letter in text])

    def __getitem__(self, index):
        sample = self.samples[index]
        return self.encode(sample["source"]), self.encode(sample["target"])


class Inflector(L.LightningModule):
    def __init__(self, dataset, width=64, lr=1e-3, ignore=()):
        super().__init__()
        self.save_hyperparameters(ignore=list(ignore))  # FAULT
        self.lr = lr
        self.embed = nn.Embedding(len(dataset.vocabulary), width)
        self.rnn = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, len(dataset.vocabulary))

    def training_step(self, batch, _):
        source, target = batch
        logits = self.head(self.rnn(self.embed(source))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Clock(Callback):
    start = None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 20:
            self.start = time.perf_counter()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=1250)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shutil.rmtree("case-data/lit_hparams", ignore_errors=True)
    L.seed_everything(0)
    data = Words(20000)
    few = torch.utils.data.Subset(data, range(1280))
    loader = DataLoader(few, batch_size=32, shuffle=True)
    model = Inflector(data, ignore=["dataset"] if args.fixed else ())
    clock = Clock()
    keeper = ModelCheckpoint("case-data/lit_hparams", every_n_epochs=1)
    trainer = L.Trainer(max_steps=args.steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[clock, keeper])
    trainer.fit(model, loader)
    print(f"step_ms={1e3 * (time.perf_counter() - clock.start) / (trainer.global_step - 20):.3f}")


if __name__ == "__main__":
    main()
