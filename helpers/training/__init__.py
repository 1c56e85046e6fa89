"""Training: the step, its networks and workloads, number formats, compilation, and which limit a step meets."""

from helpers.training.augmenting import Augmented, crop_and_flip
from helpers.training.epochs import Epoch, evaluate, seed_everything, train_epoch
from helpers.training.graphs import graphed
from helpers.training.steps import (
    OutOfMemory,
    TrainingStep,
    WithTF32,
    accelerator_step,
    device_of,
    name_of,
    new_accuracy,
    set_tf32,
)
from helpers.training.workloads import Workload, launch_bound_workload, resnet_workload

__all__ = [
    "Augmented",
    "Epoch",
    "OutOfMemory",
    "TrainingStep",
    "WithTF32",
    "Workload",
    "accelerator_step",
    "crop_and_flip",
    "device_of",
    "evaluate",
    "graphed",
    "launch_bound_workload",
    "name_of",
    "new_accuracy",
    "resnet_workload",
    "seed_everything",
    "set_tf32",
    "train_epoch",
]
