"""Trains with Lightning's Trainer; items are slow."""

import torch
from lightning.pytorch import LightningModule, Trainer
from slow_items import Items
from torch.utils.data import DataLoader

from stepscope.lightning import Diagnose


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch["numbers"]), batch["labels"])

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[Diagnose(steps=5)],
)  # fmt: skip
trainer.fit(Network(), DataLoader(Items(640), 32, num_workers=1), DataLoader(Items(64), 32))
print("updates:", trainer.global_step)
