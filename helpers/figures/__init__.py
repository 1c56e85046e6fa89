"""Every figure of the course, by subject. Each function returns a `Picture`: shown in a notebook it is an image with an
alternative text for those who cannot see it.

`source` says what was measured, on which machine, and which part is simulated. It appears below the figure and in the
alternative text.
"""

from helpers.figures.data_parallel import communication, rank_timeline, scaling
from helpers.figures.drawing import Picture
from helpers.figures.ladders import calculated, ladder, on_a_gpu, ratios
from helpers.figures.networks import (
    accuracies,
    curves,
    gradients,
    memory_formats,
    number_formats,
    roofline,
    time_to_accuracy,
)
from helpers.figures.pipelines import access, image_grid, item_timeline, memory, throughput
from helpers.figures.profiles import breakdown, gpu, kernel_classes, kernels, memory_curves, utilization_and_efficiency
from helpers.figures.timings import comparison, phases, run_ahead, time_lines, two_clocks
