"""A callback for the Trainer of Hugging Face; install it with ``pip install "./stepscope[transformers]"``."""

from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stepscope import run


class Diagnose(TrainerCallback):  # type: ignore[misc]
    """Diagnoses the training, as `stepscope.watch` does: ``Trainer(…, callbacks=[Diagnose()])``.

    See `stepscope.watch` for `steps` and `folder`.
    """

    def __init__(self, steps: int = 20, folder: str | Path = "diagnosis"):
        self.steps, self.folder = steps, folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        self.watch = run.begin(self.steps, self.folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        if self.watch is not None:
            self.watch.end()
