"""Every constant that was tuned, once: its unit, and where it comes from.

The first part decides whether measurements become a finding, and which finding comes first: change a value, and the
replayed examination (``stepscope/tests/rules/test_examination.py``) shows at once how the diagnoses of all recorded
loops change. The second part says how long and how finely to measure; facts that are recorded already do not change
with it.
"""

# Part 1: from facts to findings.

# Share of a step that is worth a change. TensorBoard's profiler tab uses the same; two traces of one loop differ by 2%.
WORTH = 0.05
# Part of the largest gain: findings with this gain count as equal, and the one that names a line comes first.
ABOUT_EQUAL = 0.75
# Share of the time that other processes had the cores: from here on the verdict may be wrong,
BUSY = 0.1
# unless the first finding takes this share of the step, since a busy machine makes findings seem smaller.
SURE_ON_A_BUSY_MACHINE = 0.6
# Lower bounds for the healthy part of a step: as a share of the fastest step's, and of the mean step's. A fault also
# slows the code around it. Four of five loops of the examination stay above them.
REST_OF_FASTEST, REST_OF_MEAN = 0.72, 0.56

# Loading. Times the number of workers that can work at once. Up to twice that number made no measurable difference on
# two cores; sixteen workers gave a third of the throughput, with a start of five seconds.
TOO_MANY_WORKERS = 2
# Share of an item's time: a part with this share counts as all of it, since profilers are inexact.
DOMINANT_PART = 0.75
# Times as long as alone that a batch may take in a loop on a busy machine.
SLOWED_BATCH = 5
# Recommended workers for each core, at most: more were not tried, and each takes memory.
MOST_WORKERS_PER_CORE = 4
# Minimum saving before advising zero workers, as a share of a step: two timings of one loop differ by as much.
NO_WORKERS_MARGIN = 0.1
# ms until a ready batch arrives from a worker: 1.7 to 3 ms on two cores, whether of 1 image or of 128.
ARRIVAL_MS = 1.0
# ms, and share of a step: without workers a wait shorter than both is no fault, since making a batch takes time.
SLIGHT_WAIT_MS, SLIGHT_WAIT = 2.0, 0.15
# ms: with fast enough workers a wait shorter than this, and than SLIGHT_WAIT of a step, is no fault; see ARRIVAL_MS.
ARRIVED_MS = 3.0
# Bytes. A fast disk, at 500 MB/s, delivers these in the 2 ms that an open takes on a shared file system.
SMALL_FILE_BYTES = 1_000_000
# Share of the time between epochs: less is usual, for an evaluation after each epoch.
BETWEEN_EPOCHS = 0.25
# CPU utilization at which workers contend with the step.
ALL_CORES_BUSY = 0.9
# Tensors in a batch: a worker shares each separately, which took 0.2 to 0.4 ms.
MANY_TENSORS = 16
# ms of an item: the calls that load an item, some tens of them in Python, cost as much.
TINY_ITEM_MS = 0.03
# Bytes of NumPy arrays in a batch that count: fewer take a worker under 1 ms.
PICKLED_BYTES = 100_000
# Part of the mean wait: if the median is less, a few steps wait for long and the rest hardly.
USUAL_WAIT = 0.5
# Share of an item's time: for a part with at least this share, the item's slowest line counts as its line.
MOST_OF_AN_ITEM = 0.5

# The host. Share of a step, for one function: with 200 samples it is 8 to 12%.
HOST_WORK = 0.1
# Share of a step, for large elementwise operators that the user's lines call: any network has some.
ELEMENTWISE = 0.3
# Share of a step, for the optimizer.
UPDATES = 0.5
# Times as long as without the profiler that a sampled step may take.
SLOWED_BY_SAMPLING = 1.5
# Share of a step without operators and without loading, on a machine without a GPU: too much to judge the rest.
UNEXPLAINED = 1 / 3

# The profile. With n workers every n-th step waits: fewer steps may show only the waiting step, or no wait.
LEAST_STEPS = 3
# Times the median: a single step that takes longer, without loading, shows that the machine stalled.
STALL = 3
# µs that recording takes, measured on one core with torch 2.15: a lower bound, older versions and CUDA take more.
OPERATOR_COST_US, SHAPES_COST_US, FRAME_COST_US = 0.2, 0.15, 0.16
# Share of the time. On the smallest network a light profile takes 12% more CPU time, a full one 69%.
PROFILER = 0.15

# The accelerator. Share of the steps that counts as every step: a value printed every tenth step is no fault.
EVERY_STEP = 0.8
# Blocks for each multiprocessor, at most 1. ResNet-50 with 32 photos fills a V100 to 0.98; the emptiest of ten public
# training traces, with many small kernels, fills an A100 to 0.90.
LEAST_FILL = 0.5
# The type that Tensor Cores multiply, by the lowest compute capability that has them, highest first; and their peak for
# dense matrices over that of float32, at most, by NVIDIA's data sheets: V100 and T4 8, A100 16, A10 and L4 4, H100 15,
# B200 30, RTX cards 2.
TENSOR_CORES = {
    (12, 0): ("bfloat16", 4),
    (10, 0): ("bfloat16", 30),
    (9, 0): ("bfloat16", 15),
    (8, 6): ("bfloat16", 4),
    (8, 0): ("bfloat16", 16),
    (7, 0): ("float16", 8),
}

# Several ranks. MB of an operation: these take 0.8 ms at 1 Gbit/s and 8 µs at 100 Gbit/s, mostly less than an
# operation's latency. DistributedDataParallel's own buckets have 25 MiB, the first one 1 MiB, so that it begins early.
SMALL_OPERATION_MB = 0.1
# Small operations in a step; a loss that is averaged over the ranks, or a counter, is one or two.
MANY_OPERATIONS = 10
# Overlapped share of the communication: from here on the problem is too many bytes, below it they come too late.
# ResNet-50 at 1 Gbit/s overlaps nothing with one bucket, and half with buckets of 25 MB: from there, buckets of 5 MB
# gain 9% of the step, half of the bytes 44%.
OVERLAPPED = 0.2
# MB of a bucket; five or more should hold the gradients, so that few wait for the last bucket.
BUCKETS_MB = (25, 10, 5, 2, 1)

# Part 2: how to measure.

# Steps to profile, rounded up to a multiple of the workers.
PROFILED_STEPS = 8
# Seconds in which the workers prepare the next batches, at most; and batches that are requested after this pause.
LONGEST_PAUSE_S, READY_BATCHES = 2.0, 3
# Seconds: other processes hardly have the core within, and asking takes microseconds.
SHORT_WAIT_S = 1e-4
# Seconds between samples of a step's lines, and of sampling; steps to sample.
STEP_SAMPLE_S, STEPS_SAMPLED_S, LEAST_SAMPLED_STEPS, MOST_SAMPLED_STEPS = 0.001, 0.5, 3, 50
# Steps of each rank that are sampled: all must stop after the same step.
SAMPLED_STEPS_OF_A_RANK = 10
# ms of a step: a shorter step is mostly calls, and samples say little about it.
LEAST_SAMPLED_MS = 1.0
# Operators in all sampled steps: reading so many takes a second. In the fewest steps: then no step is sampled.
MOST_OPERATORS, TOO_MANY_OPERATORS = 20_000, 300_000
# Times the median: a step that takes longer may do work that other steps do not.
LONGER_STEP = 1.5
# Calls of one operator that count as many, in a step and in a call of an optimizer. A ResNet-50 has 161 tensors of
# weights, and 53 convolutions with as many batch norms.
MANY_CALLS, MANY_WEIGHTS = 60, 16
# Median µs of a short operator. On a tensor of a few numbers an operator takes 2 to 10 µs on the CPU, one that calls
# other operators some 40.
SHORT_OPERATOR_US = 60.0
# Shortest gap between operators that counts, in seconds: PyTorch's own code between two operators takes some 10 µs.
OPERATOR_GAP_S = 1e-4
# Share of a step, for networks without gradients: a teacher takes as long as a forward pass.
EVALUATED = 0.5
# µs. A GPU waits tens of µs for a missing launch. In public traces of ResNet-50 and DLRM, gaps up to this length hold
# nine tenths of the GPU's waits for launches; gaps of several ms are a separate group.
LAUNCH_GAP_US = 500.0
# µs. Between two kernels that were launched long before, public traces show 1 to 2 µs: the GPU's own time.
OWN_GAP_US = 5.0
# Seconds between samples of a pause, since pauses are long; and samples of a pause: after its last epoch a script may
# go on for hours.
PAUSE_SAMPLE_S, MOST_PAUSE_SAMPLES = 0.01, 3_000
# Seconds of loading items with the stopwatch; times as long, to see more items if some take long. Seconds that loading
# them in another process may take.
ITEMS_S, LONGER_ITEMS, ITEMS_LIMIT_S = 1.0, 3, 60
# Seconds between samples of an item; fewest items; seconds of items that are collated together: collating a single item
# costs more for each item than collating a batch.
ITEM_SAMPLE_S, LEAST_ITEMS, GROUP_S = 0.002, 2, 0.1
# Share of the items' time: with this much CPU time in programs that the dataset starts, they count as working.
STARTED_PROGRAMS = 0.01
# Share of an item's time: from this share of waiting on, the waiting parts are measured.
WAITING_ITEMS = 0.1
# An item is slow if it takes so many times as long as most, and longer than most batches. The smallest share of the
# time that slow items take, and the largest share of the items that they are.
SLOW_ITEM, SLOW_ITEMS_TIME, MOST_SLOW_ITEMS = 10, 0.1, 0.1
# Seconds. With Python's 5 ms, the sampler would mostly see the thread where it releases the GIL: in operators.
SWITCH_INTERVAL_S = 1e-4
# Samples to name a line. Share of a function's time: if one line takes it, the function that it calls is examined.
LEAST_SAMPLES, MOSTLY_ONE_LINE = 2, 0.6
# Rounds of a trial; seconds to repeat a step in each, and repetitions at most.
TRIAL_ROUNDS, TRIAL_S, TRIAL_REPEATS = 5, 0.05, 20
# Items: smaller batches are tried at so many times the size.
SMALL_BATCH, LARGER_BATCH = 8, 8
# Elements of a list or dict, each a Python object whose counter of references changes as it is read; bytes copied to
# read an object, at most; bytes that a worker grows by: less is the allocator's.
MANY_OBJECTS, PAGE_BYTES, GROWTH_BYTES = 10_000, 4_096, 2e6
