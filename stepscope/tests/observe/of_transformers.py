"""Trains with Hugging Face's Trainer, two batches an update; items are slow. Arguments: ``callback``, or none."""

import sys

import torch
from slow_items import Items
from transformers import Trainer, TrainingArguments

from stepscope.transformers import Diagnose


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))

    def forward(self, numbers, labels):
        scores = self.layers(numbers)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


trainer = Trainer(
    Network(),
    TrainingArguments(
        "out", num_train_epochs=4, per_device_train_batch_size=16, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    ),
    train_dataset=Items(640),
    callbacks=[Diagnose(steps=5)] if "callback" in sys.argv else [],
)  # fmt: skip
trainer.train()
print("updates:", trainer.state.global_step)
