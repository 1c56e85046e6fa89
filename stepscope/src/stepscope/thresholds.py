"""All tuned constants, with their units and origins.

The first part decides whether measurements become a finding, and which finding comes first. The replayed examination
(``stepscope/tests/examination/examine.py --set NAME=VALUE``) shows how a value changes the diagnoses of all recorded
loops. The second part decides how long and how finely to measure; it does not change facts that are already recorded.
"""

# Part 1: from facts to findings.

# Share of a step that is not worth a sentence.
SLIGHT_SHARE = 0.005
# Timed steps: of fewer steps, the evidence shows the shortest and the longest.
FEW_STEPS = 10
# Share of a step that is worth a change, as in TensorBoard's profiler tab. Two traces of one loop differ by 2%.
WORTH = 0.05
# Share of the largest gain: findings with this gain count as equal, and a finding that names a line comes first.
ABOUT_EQUAL = 0.75
# Share of a float64 step on the CPU that float32 saves: about, at least and at most. A vector register holds half as
# many float64 numbers; in one examined loop float32 saved half of a step.
SINGLE_PRECISION = (0.5, 0.25, 0.7)
# The same for the kernels of a GPU: by the table of throughputs in NVIDIA's CUDA C++ Programming Guide, float64 has
# half of float32's rate with the compute capabilities 8.0 and 9.0, a 32nd or 64th with 7.5, 8.6 and 8.9. Not measured.
SINGLE_PRECISION_OF_A_GPU = (0.5, 0.4, 0.98)
# Share of the cores' time: if the loop uses less of it, more threads may help.
USED_CORES = 0.7
# Share of the backward passes in the kernels of a step: for each product of a forward pass they compute two.
BACKWARD = 2 / 3
# Recompilations: with dynamic sizes, PyTorch compiles a function again once or twice.
COMPILED_AGAIN = 3
# Share of the gradients: from this share on, gradients that no optimizer uses are worth a change.
UNUSED_GRADIENTS = 0.1
# Share of the time in which other processes used the cores: with a larger share the verdict may be wrong.
BUSY = 0.1
# Factors for the part of a step that stays without the fault, for the ends of a gain's range: the fault may also slow
# this part, and the change may not remove all of the fault's time. In nine of ten recorded loops the range contains the
# true gain.
SHORTER_REST, LONGER_REST, INEXACT = 0.8, 1.15, 0.02

# Loading. Factor over the number of workers that can work at once. On two cores, a factor of two made no measurable
# difference; sixteen workers reduced throughput to a third, and took five seconds to start.
TOO_MANY_WORKERS = 2
# Share of an item's time: a part with this share counts as the whole item, since profilers are inexact.
DOMINANT_PART = 0.75
# Share of the work between epochs from which on the start and end of workers is its cause.
SLOW_STARTS = 0.3
# Factor by which a busy machine may slow making a batch in the loop.
SLOWED_BATCH = 5
# Largest recommended number of workers per core: more were not tried, and each worker takes memory.
MOST_WORKERS_PER_CORE = 4
# Minimum saving before advising zero workers, as a share of a step: two timings of one loop differ by as much.
NO_WORKERS_MARGIN = 0.1
# ms until a ready batch arrives from a worker, at least: 1.7 to 3 ms on two cores, for 1 image as for 128 images.
ARRIVAL_MS = 1.0
# ms, and share of a step: without workers, a wait shorter than both is no fault, since making a batch takes time.
SLIGHT_WAIT_MS, SLIGHT_WAIT = 2.0, 0.15
# ms: with fast enough workers, a wait shorter than this and than SLIGHT_WAIT of a step is no fault; see ARRIVAL_MS.
ARRIVED_MS = 3.0
# Bytes that a fast disk reads at 500 MB/s in 2 ms, the time to open a file on a shared file system.
SMALL_FILE_BYTES = 1_000_000
# Share of the time between epochs: an evaluation after each epoch usually takes less.
BETWEEN_EPOCHS = 0.25
# CPU utilization at which workers contend with the step; or the time in which a worker is queued for a core, as a part
# of the CPU time of a batch. Beside steps of two threads on two cores, two workers were queued for 0.8 to 1.8 of it.
ALL_CORES_BUSY, QUEUED_WORKERS = 0.9, 0.5
# Tensors in a batch: a worker shares each tensor separately, in 0.2 to 0.4 ms.
MANY_TENSORS = 16
# ms of an item: some tens of Python calls, which load an item, take as long.
TINY_ITEM_MS = 0.03
# Bytes of NumPy arrays in a batch: a worker pickles fewer bytes in less than 1 ms.
PICKLED_BYTES = 100_000
# Share of the mean wait: if the median wait is shorter, a few steps have most of the wait.
USUAL_WAIT = 0.5
# Share of an item's time: for a part with at least this share, the item's slowest line counts as the part's line.
MOST_OF_AN_ITEM = 0.5

# Share of an item's time in functions of a package: with a larger share the advice is about the package.
LIBRARY = 0.2
# Reads from datasets of h5py for an item: each takes 20 µs or more on one core, and an item needs few.
MANY_READS = 8

# Share of the additional time of long steps, or of the part of it that was sampled: with this much time for lines that
# usual steps do not run, long steps do other work; otherwise their batches are larger, or the machine stalled.
OTHER_WORK = 0.5

# Padding. Share of all positions: lengths that are spread evenly from 0 leave half of a batch as padding.
PADDING = 0.5
# Share of the positions that are padding in every sequence of a batch: a batch of all lengths has none.
PADDING_OF_ALL = 0.2

# The host. Share of a step for the work of one function: with 200 samples, 10% is measured as 8 to 12%.
HOST_WORK = 0.1
# Share of a step for large elementwise operators that the user's lines call: any network has some.
ELEMENTWISE = 0.3
# Share of a step for the optimizer.
UPDATES = 0.5
# Factor by which the profiler may slow a sampled step.
SLOWED_BY_SAMPLING = 1.5
# Share of a step without operators and loading, on a machine without a GPU: with a larger share no verdict is possible.
UNEXPLAINED = 1 / 3

# The profile. With n workers every n-th step waits: fewer steps may contain only the waiting step, or no wait.
LEAST_STEPS = 3
# Factor over the median: a single step that takes longer, without loading, shows a stall of the machine.
STALL = 3
# µs to record an operator, its shapes, a Python frame, on one core with torch 2.15; older versions and CUDA take more.
OPERATOR_COST_US, SHAPES_COST_US, FRAME_COST_US = 0.2, 0.15, 0.16
# Share of the time for recording. On the smallest network a light profile takes 12% more CPU time, a full profile 69%.
PROFILER = 0.15

# The accelerator. Share of the steps that counts as every step: printing a value in every tenth step is no fault.
EVERY_STEP = 0.8
# Share of the multiprocessors with work. ResNet-50 with 32 photos fills a V100 to 0.98; the emptiest of ten public
# training traces, with many small kernels, fills an A100 to 0.90.
LEAST_FILL = 0.5
# By compute capability (from this one on, highest first): the data type of the Tensor Cores, and their largest speedup
# over float32 for dense matrices, by NVIDIA's data sheets: V100 and T4 8, A100 16, A10 and L4 4, H100 15, B200 30.
# GeForce cards sum products in float32 at half of this rate (RTX 2080 Ti 4; RTX 3090, 4090 and 5090 2).
TENSOR_CORES = {
    (12, 0): ("bfloat16", 4),
    (10, 0): ("bfloat16", 30),
    (9, 0): ("bfloat16", 15),
    (8, 6): ("bfloat16", 4),
    (8, 0): ("bfloat16", 16),
    (7, 0): ("float16", 8),
}

# Share of a GPU's memory that tensors can fill: the CUDA context and fragments take the rest. Chosen, not measured.
USABLE_MEMORY = 0.9
# Compute capabilities whose Tensor Cores are faster in TF32 than the CUDA cores in float32 (8 times, by the data sheets
# of A100, H100, B200; twice, by those of A10, L4, L40S and RTX PRO 6000); on GeForce cards both are equally fast.
TF32_PAYS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
GEFORCE, SLOWER_GEFORCE = "GeForce", 2
# Share of the time of normalization that compiling may save at most, besides all elementwise kernels: a fused kernel
# still reads its input twice and writes once. Chosen, not measured.
FUSED_NORMALIZATION = 0.5

# Several ranks. MB of an operation: 0.1 MB take 0.8 ms at 1 Gbit/s and 8 µs at 100 Gbit/s, mostly less than an
# operation's latency. DistributedDataParallel's buckets have 25 MiB; its first bucket has 1 MiB, to begin early.
SMALL_OPERATION_MB = 0.1
# Small operations in a step: averaging a loss or a counter over the ranks takes one or two.
MANY_OPERATIONS = 10
# Overlapped share of the communication: with a larger share there are too many bytes, with a smaller share the exchange
# begins too late. ResNet-50 at 1 Gbit/s overlaps nothing with one bucket, and half with buckets of 25 MB; after that,
# buckets of 5 MB gain 9% of the step, and half of the bytes 44%.
OVERLAPPED = 0.2
# MB of a bucket: the gradients should fill five or more buckets, so that few gradients wait for the last bucket.
BUCKETS_MB = (25, 10, 5, 2, 1)

# Part 2: how to measure.

# Steps to profile, rounded up to a multiple of the workers.
PROFILED_STEPS = 8
# Seconds: so long steps that fewer suffice, since most of a long step is the same each time. Seconds for each step to
# time, and fewest steps to time; seconds for the steps to profile; seconds of the warm-up, and of a second warm-up
# after the pause in which the profile was written. With steps of 10 s, the examination takes about three minutes.
TIMED_STEP_S, LEAST_TIMED_STEPS, PROFILED_S, WARM_UP_S, PAUSED_S = 1.5, 4, 15.0, 10.0, 5.0
# Seconds until the diagnosis: a longer time is announced.
ANNOUNCED_S = 30.0
# Longest pause in seconds, in which the workers prepare batches; number of batches to request after the pause.
LONGEST_PAUSE_S, READY_BATCHES = 2.0, 3
# Seconds: in a shorter wait other processes hardly use the core, and reading the time in the queue takes microseconds.
SHORT_WAIT_S = 1e-4
# Seconds between samples of a step's lines; seconds of sampling; fewest and most steps to sample.
STEP_SAMPLE_S, STEPS_SAMPLED_S, LEAST_SAMPLED_STEPS, MOST_SAMPLED_STEPS = 0.001, 0.5, 3, 50
# Number of steps to sample in each rank: all ranks must stop after the same step.
SAMPLED_STEPS_OF_A_RANK = 10
# ms of a step: a shorter step consists mostly of calls, and samples show little of them.
LEAST_SAMPLED_MS = 1.0
# Most operators in all sampled steps: reading them takes a second. If the fewest steps have more operators
# than the second number, no step is sampled.
MOST_OPERATORS, TOO_MANY_OPERATORS = 20_000, 300_000
# Factor over the median: a step that takes longer may do work that other steps do not do. Part of the longest step's
# additional time: a step with less additional time is not one of the long steps.
LONGER_STEP, PART_OF_THE_LONGEST = 1.5, 0.25
# Seconds that a long step takes in addition: two samples show the line.
LEAST_ADDITIONAL_S = 0.002
# Steps in which gradients are followed, and most seconds: a generator of images is often updated in every fifth step.
FOLLOWED_STEPS, FOLLOWED_S = 8, 5.0
# Long steps to sample; most steps and seconds until then: work in every hundredth step is seen four times.
LONG_STEPS, MOST_STEPS_UNTIL_LONG, SECONDS_UNTIL_LONG = 4, 400, 10.0
# Part of its share of long steps: a line that takes this share of usual steps, too, is work of all steps.
USUAL_WORK = 0.1
# Calls of one operator that count as many, in a step and in a call of an optimizer. A ResNet-50 has 161 weight tensors,
# and 53 convolutions with as many batch norms.
MANY_CALLS, MANY_WEIGHTS = 60, 16
# Median µs of a short operator. On a tensor of a few numbers an operator takes 2 to 10 µs on the CPU; an operator that
# calls other operators takes about 40 µs.
SHORT_OPERATOR_US = 60.0
# Shortest gap between operators that counts, in seconds: PyTorch's own code between two operators takes about 10 µs.
OPERATOR_GAP_S = 1e-4
# Share of a step for networks without gradients: a teacher network takes as long as a forward pass.
EVALUATED = 0.5
# Share of backward passes and optimizers in the additional work of long steps: with more, the long steps train.
TRAINS = 0.1
# Time of trained operators in a call of a network, as a part of the time of its other operators, from which on the call
# trains: a small head learns behind a large frozen network. A sample may also contain the end of another call.
TRAINED = 0.04
# Share of the host's waits for a GPU within GradScaler from which on another way to scale is the change.
MOSTLY_SCALING = 0.5
# µs. A GPU waits tens of µs for a missing launch. In public traces of ResNet-50 and DLRM, gaps up to this length hold
# nine tenths of the GPU's waits for launches; gaps of several ms are a separate group.
LAUNCH_GAP_US = 500.0
# µs. Between two kernels that were launched long before, public traces show 1 to 2 µs: the GPU's own time.
OWN_GAP_US = 5.0
# Seconds between samples of a pause, since pauses are long; most samples of a pause, since a script may run for hours
# after its last epoch.
PAUSE_SAMPLE_S, MOST_PAUSE_SAMPLES = 0.01, 3_000
# Seconds between reports of what was seen so far; a report takes milliseconds.
REPORT_EVERY_S = 5.0
# Seconds of loading items with the stopwatch; factor for more items, if some items take long; limit in seconds for
# loading items in another process.
ITEMS_S, LONGER_ITEMS, ITEMS_LIMIT_S = 1.0, 3, 60
# Seconds between samples of an item; fewest items; seconds of items that are collated together, since collating a
# single item costs more per item than collating a batch.
ITEM_SAMPLE_S, LEAST_ITEMS, GROUP_S = 0.002, 2, 0.1
# Items whose files are noted: an item mostly opens the same number of files.
ITEMS_OF_FILES = 4
# Seconds of choosing the batches of an epoch.
SAMPLING_S = 0.05
# Share of the items' time: with this much CPU time in programs that the dataset starts, items count as working.
STARTED_PROGRAMS = 0.01
# Share of an item's time: with a larger share of waiting, the waiting of each part is measured.
WAITING_ITEMS = 0.1
# A slow item takes this many times as long as the median item, and longer than a usual batch. Minimum share of the time
# and maximum share of the items, for slow items.
SLOW_ITEM, SLOW_ITEMS_TIME, MOST_SLOW_ITEMS = 10, 0.1, 0.1
# Seconds. With Python's 5 ms, the sampler would mostly see the thread where it releases the GIL: in operators.
SWITCH_INTERVAL_S = 1e-4
# Samples to name a line. Share of a function's time: if one line takes more, the function that it calls is examined.
LEAST_SAMPLES, MOSTLY_ONE_LINE = 2, 0.6
# Rounds of a trial; seconds to repeat a step in each round; most repetitions.
TRIAL_ROUNDS, TRIAL_S, TRIAL_REPEATS = 5, 0.05, 20
# Runs of a script with changed settings: seconds of timed steps, and their minimum number; epochs of at most so many
# times these steps are timed as wholes; losses that are kept of each run.
TRIAL_RUN_S, LEAST_TRIAL_STEPS, WHOLE_EPOCHS, KEPT_LOSSES = 3.0, 10, 2, 10
# Losses of a changed setting: times the distance between two runs of the script as it is, and share of the mean loss.
# From both on, the setting changes what is learned.
OTHER_LOSSES, OTHER_LOSS = 3, 0.05
# Samples of an epoch of an iterable dataset that are compared at most, before other workers are tried. Timed steps of a
# job of several ranks: the same number for all. First factor of a loss for float16: large enough for its speed.
CHECKED_SAMPLES, RANKS_TRIAL_STEPS, LOSS_SCALE = 20_000, 50, 2.0**12
# Share of waiting from which on more workers than cores are tried, too.
MOSTLY_WAITING = 0.5
# Rounds from which on an interval is narrow enough to decide something; factor between the ends of an interval: below
# it, more rounds tell little more.
LEAST_ROUNDS, NARROW = 3, 1.05
# Ratio to the script as it is, in the best of two rounds: below it, a setting is tried no further.
CLEARLY_SLOWER = 0.8
# Of two settings, the one with fewer changes or workers is preferred, if the other is less than this many times as
# fast; a setting that gains less is not compared once more. Batches that each worker prepares, as one of the settings.
# Seconds in which a script may end after its report.
NEAR_BEST, MORE_PREFETCHED, ENDING_S = 1.03, 4, 10.0
# Bytes of a folder that is copied before its script is tried; of a worker, to judge whether memory suffices.
COPIED_BYTES, WORKER_BYTES = 200e6, 0.5e9
# Items: smaller batches are also tried with this many times as many items.
SMALL_BATCH, LARGER_BATCH = 8, 8
# Positions of a sequence: shorter rows of integers may be a table. Share of the positions within sequences that have
# the value of their padding, such as a token at the end of each text: a value that is more frequent is no padding.
LEAST_POSITIONS, PADDING_WITHIN = 16, 0.05
# Different batches that come once from each worker, one after another: then the workers yield equal streams.
REPEATED_BATCHES = 3
# Steps to see a trend in; share of rising over falling pairs of steps, and of sizes of memory; standard deviations of
# a random order. A machine that grows busy for a while lengthens steps of one phase, hardly of all.
LEAST_STEPS_OF_A_TREND, ORDERED, STEADY, DEVIATIONS = 8, 0.4, 0.8, 5.0
# Bytes: two ranks with DistributedDataParallel grow by 0.45 MB a step at first, as threads get memory of their own.
GROWTH_OF_A_STEP_BYTES = 1e6
# Elements of a list or dict, each a Python object whose reference count changes when it is read; most bytes that are
# copied to read an object; bytes of a worker's growth, since the allocator causes less.
MANY_OBJECTS, PAGE_BYTES, GROWTH_BYTES = 10_000, 4_096, 2e6
