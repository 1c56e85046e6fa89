"""Training: the step, its networks and workloads, number formats, compilation, and which limit a step meets."""

from helpers.training.compiling import graphed
from helpers.training.models import Workload, launch_bound_workload, resnet_workload
from helpers.training.training_step import (
    Augmented,
    OutOfMemory,
    TrainingStep,
    WithTF32,
    crop_and_flip,
    gpu_step,
    losses,
    seed_everything,
    set_tf32,
)
