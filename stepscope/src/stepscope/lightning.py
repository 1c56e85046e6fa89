"""A callback for the Trainer of Lightning; install it with ``pip install "./stepscope[lightning]"``."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from stepscope import run


class Diagnose(Callback):  # type: ignore[misc]
    """Diagnoses the training, as `stepscope.watch` does: ``Trainer(callbacks=[Diagnose()])``.

    See `stepscope.watch` for `steps` and `folder`.
    """

    def __init__(self, steps: int = 20, folder: str | Path = "diagnosis"):
        self.steps, self.folder = steps, folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch = run.begin(self.steps, self.folder)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is not None:
            self.watch.end()
