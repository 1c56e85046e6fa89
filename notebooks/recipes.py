"""Recipes: what to take home from each notebook, for a script of your own. They need no other file of the course.

``python recipes.py`` runs them all on noise. `train_photos.py` is made of most of them.
"""

import contextlib
import copy
import functools
import itertools
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # only for a clean exit with gloo, on CPUs: else its threads outlive the group
from PIL import Image, ImageOps
from torch import nn
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

# 00 · Start here: how many items a second a dataset gives, in one process and without a network


def items_per_second(dataset, count=200):
    chosen = random.sample(range(len(dataset)), min(count, len(dataset)))
    start = time.perf_counter()
    for index in chosen:
        dataset[index]
    return len(chosen) / (time.perf_counter() - start)


# 01 · The first profile: the training step, and the profiler's block around the loop


def train_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()  # still on the device: to read its value would make the host wait


# batches: such as endless(loader). active: a multiple of its workers, as their waits repeat
def record(batches, step, folder, active=6):
    plan = schedule(wait=5, warmup=2, active=active, repeat=1)
    handler = tensorboard_trace_handler(str(folder))
    if not torch.cuda.is_available():  # its log would only say so
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(schedule=plan, on_trace_ready=handler) as profiler:
        for batch in itertools.islice(batches, 5 + 2 + active):
            called(step, batch)
            profiler.step()


# A batch has parts, such as images and labels, or is one thing, such as a dict
def called(step, batch):
    return step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


def endless(loader):
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            # Fewer images than a batch, or a generator, which has one epoch only
            raise ValueError("no batch: expected a loader with a batch or more")


# 02 · Two clocks: a stopwatch; loading alone and compute alone, in ms a step


def milliseconds(call, repeats=20, warmup=3):
    for number in range(warmup + repeats):
        if number == warmup:
            synchronize()
            start = time.perf_counter()
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # calls return before the GPU has done the work


# Waits for batches repeat after as many steps as there are workers
def whole_periods(steps, workers):
    period = max(workers, 1)
    return math.ceil(steps / period) * period


def two_clocks(loader, step):
    batches, workers = endless(loader), loader.num_workers
    some = itertools.cycle([next(batches) for _ in range(4)])  # they can differ in length
    # A longer warm-up: at first each worker has 2 batches ready (prefetch_factor)
    count, warmup = whole_periods(50, workers), 3 + 2 * workers
    loading = milliseconds(lambda: next(batches), count, warmup)
    compute = milliseconds(lambda: called(step, next(some)))
    return loading, compute


# 03 · More workers: a loader with every setting, and how many workers are best, in interleaved runs


# drop_last leaves out up to batch − 1 images of each epoch
def loader_of(dataset, batch, workers, train=True, **others):
    if "batch_sampler" not in others:  # which knows what is in a batch, as ByLength (15)
        shuffle = train and "sampler" not in others
        others |= {"batch_size": batch, "shuffle": shuffle, "drop_last": train}
    pin, stay = torch.cuda.is_available(), workers > 0
    return DataLoader(
        dataset, num_workers=workers, persistent_workers=stay, pin_memory=pin, **others
    )


# The step trains: give it a model to throw away. Where it takes seconds, one worker is
# enough, and the trial takes long: a first round is made in any case. On a CPU, workers and
# PyTorch's threads share the cores: with OMP_NUM_THREADS=1 a small network may be faster.
# ahead: such as lambda batches: one_ahead(batches, device), see 08
def best_workers(
    new_loader, step, candidates=(0, 1, 2, 4), rounds=3, steps=20, seconds=120, ahead=iter
):
    times, end = {workers: [] for workers in candidates}, time.perf_counter() + seconds
    for number in range(rounds):
        if number and time.perf_counter() > end:
            break
        for workers in random.sample(candidates, len(candidates)):
            batches = ahead(endless(new_loader(workers)))
            ready = 2 * workers  # batches that wait already: prefetch_factor
            whole = whole_periods(steps, workers)  # see 02
            step_ms = milliseconds(lambda: called(step, next(batches)), whole, ready + 3)
            times[workers].append(step_ms)
    return min(times, key=lambda workers: statistics.geometric_mean(times[workers]))


# 04 · Normalize on the device: the network's first layer. The loader delivers bytes


# nn.Sequential renames the model's weights: load old ones before you wrap it
class Normalize(nn.Module):
    def __init__(self, mean, std):  # of each channel, for pixels from 0 to 1
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1))

    def forward(self, images):
        # (images - mean) / std in one new tensor: on a CPU, large new tensors are slow
        return images.to(self.mean.dtype, copy=True).sub_(self.mean).div_(self.std)


# 05 · Preprocess ahead: what is the same in every epoch is done once, on all cores. Some photos are held out


def resize(path, side):
    with Image.open(path) as photo:
        photo.draft("RGB", (side, side))  # let the decoder leave out what is thrown away
        upright = ImageOps.exif_transpose(photo).convert("RGB")
    # The shorter side gets this length, then the middle is cut out
    return ImageOps.fit(upright, (side, side), Image.Resampling.BILINEAR)


def resized_if_whole(path, side):  # bytes that are wrong in the middle are not noticed
    try:
        return resize(path, side)
    except Exception as error:  # Pillow reports damage by errors of many types
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise  # no damage: there is no such file, or the disk cannot be read
        print(f"Left out: {path}: {error}", flush=True)
        return None


# Photos are SET/CLASS/NAME, such as train/cat/1.jpg. Not for masks: it mixes their values.
# Random crops, such as RandomResizedCrop, stay in the loader. Returns the copies
def resize_all(paths, side, folder):
    def copy_of(path):
        its_set = path.parent.parent.name
        copy = folder / f"{side}" / its_set / path.parent.name / f"{path.name}.jpg"
        if copy.exists() and copy.stat().st_mtime > path.stat().st_mtime:
            return copy
        if image := resized_if_whole(path, side):
            copy.parent.mkdir(parents=True, exist_ok=True)
            image.save(copy.with_suffix(".new"), "JPEG", quality=90)
            return copy.with_suffix(".new").replace(copy)
        return None

    # Pillow lets other threads work while it decodes and resizes
    with ThreadPoolExecutor() as threads:
        return [copy for copy in threads.map(copy_of, paths) if copy]


class Copies(Dataset):
    def __init__(self, paths, classes):
        self.paths, self.classes = paths, classes

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        pixels = torch.from_numpy(np.array(Image.open(path)))
        return pixels.permute(2, 0, 1), self.classes.index(path.parent.name)


# To validate with. Ask with the original's path; of a pair, such as an image and its mask,
# with that of the image
def held_out(path, share=0.1):
    # By its name: it stays where it is if others are added. A small class may have none
    name = f"{path.parent.name}/{path.name}"
    return zlib.crc32(os.fsencode(name)) < share * 2**32


# The files of FOLDER/train/CLASS and of FOLDER/val/CLASS; or of FOLDER/CLASS, divided
def train_and_val(folder, suffixes, share=0.1):
    def within(folder):
        paths = sorted(folder.glob("*/*"))
        return [path for path in paths if path.suffix.lower() in suffixes]

    if (folder / "train").is_dir():
        return within(folder / "train"), within(folder / "val")
    parts = [], []
    for path in within(folder):
        parts[held_out(path, share)].append(path)
    return parts


# 06 · Packed formats: all images in one file that is an array; a whole batch is read at once


# Photos as pixels, 3 × side × side bytes each: if all fit into free memory, or the disk
# reads as many a second as a step trains on (try one on noise). Else as JPEG copies (05).
# What is packed there already is not packed again. Returns the rows, as pack does
def pack_photos(paths, side, path, threads=16):  # as many as the job has cores
    index, stats = path.with_suffix(".json"), [photo.stat() for photo in paths]
    photos = [
        [side, photo.parent.name, photo.name, stat.st_size, stat.st_mtime]
        for photo, stat in zip(paths, stats, strict=True)
    ]
    if index.exists() and path.exists():
        packed = json.loads(index.read_text())
        if packed.get("photos") == photos:
            return packed["rows"]
    calls = (functools.partial(resized_if_whole, photo, side) for photo in paths)
    # results_ahead (14) has a few photos in memory at a time
    rows = pack(results_ahead(calls, threads), len(paths), side, path)
    index.with_suffix(".new").write_text(json.dumps({"photos": photos, "rows": rows}))
    index.with_suffix(".new").replace(index)
    return rows


def pack(images, count, side, path):  # returns the rows that hold an image
    started, rows = path.with_suffix(".started"), []  # it has its name when it is whole
    started.unlink(missing_ok=True)
    needed, free = count * 3 * side**2, shutil.disk_usage(path.parent).free
    if needed > free:  # where the disk is full, a write into the map ends Python
        raise OSError(f"{path}: expected {needed:,} bytes of space, found {free:,}")
    packed = np.lib.format.open_memmap(started, "w+", np.uint8, (count, 3, side, side))
    for row, image in zip(range(count), images, strict=True):
        if image is not None:  # None: damaged
            # Channels first, as in PyTorch
            packed[row] = np.asarray(image).transpose(2, 0, 1)
            rows.append(row)
    packed.flush()
    del packed  # Windows does not rename a file that is mapped
    started.replace(path)
    return rows


class Packed(Dataset):
    def __init__(self, path, labels):
        self.path, self.labels = path, torch.as_tensor(labels)

    def __len__(self):
        return len(self.labels)

    # A batch at once: give the loader collate_fn=as_it_is. So does a Subset of some rows
    def __getitems__(self, indices):
        # Mapped for each batch: no open file goes to a worker
        images = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(images[indices]), self.labels[indices]


def as_it_is(batch):
    return batch


# Samples of unequal lengths, such as clips and texts: one after the other in a file. Arrays
# of one type, whose dimensions but the first are equal; None for a damaged one. The .json
# beside path is written last: where it is, all is packed. It does not know the sources: put
# a checksum of theirs (their names, sizes and times) into path, and a change is noticed.
# What Python code makes, such as tokens, comes from processes: ProcessPoolExecutor().map
def pack_ragged(samples, path):
    started, index = path.with_suffix(".started"), path.with_suffix(".json")
    index.unlink(missing_ok=True)  # what was packed there before is whole no longer
    lengths, rows, kinds = [], [], set()
    with started.open("wb") as file:
        for row, sample in enumerate(samples):
            if sample is None:
                continue
            kinds.add((sample.dtype.str, sample.shape[1:]))
            if len(kinds) > 1:
                raise ValueError(f"sample {row}: expected one type, found {kinds}")
            if not len(sample):
                raise ValueError(f"sample {row}: expected a length, found 0: give None")
            file.write(np.ascontiguousarray(sample).data)
            lengths.append(len(sample))
            rows.append(row)
    if not kinds:
        raise ValueError("expected a sample or more, found none")
    started.replace(path)
    ((dtype, shape),) = kinds
    kind = {"dtype": dtype, "shape": shape, "lengths": lengths, "rows": rows}
    index.with_suffix(".new").write_text(json.dumps(kind))
    index.with_suffix(".new").replace(index)


# What pack_ragged packed; labels: of all samples, the damaged ones, too. A batch, with
# collate_fn=as_it_is, is (samples, lengths, labels), the samples padded with zeros to the
# longest (a token may be 0, too: let the lengths say what is padding, as is_sample does).
# See ByLength (15) for batches with little padding
class Ragged(Dataset):
    def __init__(self, path, labels):
        kind = json.loads(path.with_suffix(".json").read_text())
        self.path, self.labels = path, torch.as_tensor(labels)[kind["rows"]]
        self.dtype, self.shape = kind["dtype"], kind["shape"]
        self.lengths = np.array(kind["lengths"])
        self.ends = self.lengths.cumsum()

    def __len__(self):
        return len(self.lengths)

    def samples(self, indices):
        # Mapped for each batch: no open file goes to a worker
        mapped = np.memmap(self.path, self.dtype, "r").reshape(-1, *self.shape)
        spans = [slice(self.ends[i] - self.lengths[i], self.ends[i]) for i in indices]
        return [torch.from_numpy(np.array(mapped[span])) for span in spans]

    def __getitem__(self, index):
        return self.samples([index])[0], self.labels[index]

    def __getitems__(self, indices):
        padded = nn.utils.rnn.pad_sequence(self.samples(indices), batch_first=True)
        return padded, torch.from_numpy(self.lengths[indices]), self.labels[indices]


# A mask (batch, steps), False in padding. nn.Transformer's key_padding_mask is ~mask
def is_sample(steps, lengths):
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(1)


# Features (batch, channels, steps) with zeros behind the end of each sample. Call it before
# each convolution: it reads what is there, and a bias or a normalization has changed that.
# (Batch normalization counts padding: normalize each step by itself, by LayerNorm.)
def without_padding(features, lengths):
    return features.where(is_sample(features.shape[2], lengths).unsqueeze(1), 0)


# Convolutions change the lengths: (length + 2 * padding - kernel) // stride + 1
def mean_without_padding(features, lengths):
    sums = without_padding(features, lengths).sum(dim=2)
    return sums / lengths.clamp(min=1).unsqueeze(1)


# 07 · Augment on the device: a whole batch at once; the data set itself lies there


# Each image by a draw of its own; with masks: torch.cat([images, masks], dim=1)
def crop_and_flip(images, side=None):
    (count, channels, *size), device = images.shape, images.device
    padding = 0 if side else 4  # black; for small images, which keep their size
    height, width = (side, side) if side else size
    padded = nn.functional.pad(images, 4 * [padding])
    top = torch.randint(padded.shape[2] - height + 1, (count, 1), device=device)
    left = torch.randint(padded.shape[3] - width + 1, (count, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    pixels = (rows.unsqueeze(2) * padded.shape[3] + columns.unsqueeze(1)).flatten(1)
    crops = padded.flatten(2).gather(2, pixels.unsqueeze(1).expand(-1, channels, -1))
    return crops.view(count, channels, height, width)


def batches_on_device(images, labels, batch):  # an epoch
    order = torch.randperm(len(images), device=images.device)
    for chosen in order[: len(images) // batch * batch].split(batch):
        # index_select gives images[chosen], and is faster on a CPU
        yield images.index_select(0, chosen), labels[chosen]


# 08 · Host and GPU: the next batch is copied while this one trains; nobody asks for a value while the loop runs


# Batches are in pinned memory
def one_ahead(loader, device):
    copying, ready = torch.cuda.Stream(device) if device.type == "cuda" else None, None
    for batch in loader:
        with torch.cuda.stream(copying):  # without a GPU it does nothing
            copies = each_tensor(batch, lambda each: each.to(device, non_blocking=True))
            following = copies, copying and copying.record_event()
        if ready:
            yield arrived(*ready)
        ready = following
    if ready:
        yield arrived(*ready)


def arrived(copies, copied):
    if copied:
        training = torch.cuda.current_stream()
        training.wait_event(copied)  # the GPU waits, not the host
        # Keeps the copies' memory until that stream is done
        each_tensor(copies, lambda each: each.record_stream(training))
    return copies


def each_tensor(batch, change):  # of a batch, with its tensors changed; of a dict, too
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = copy.copy(batch)  # a class of its own, such as a tokenizer's, stays one
        changed.update({name: each_tensor(each, change) for name, each in batch.items()})
        return changed
    if isinstance(batch, (tuple, list)):
        return [each_tensor(each, change) for each in batch]
    return batch  # such as a name


def train(loader, step, device):
    losses = [called(step, batch) for batch in one_ahead(loader, device)]
    return over_ranks(torch.stack(losses).mean()).item()  # here the host waits, once


# Call it under autocast, if the model trained so. right gets a batch's parts, as a step
# does, such as samples, lengths and labels; it returns which samples (or tokens) are right,
# as a tensor of bool. Ranks may have unequal numbers: all counts are added
@torch.inference_mode()
def accuracy(model, loader, device, right=None):
    right = right or (lambda images, labels: model(images).argmax(1) == labels)
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # right, and all
    for batch in one_ahead(loader, device):
        found = called(right, batch)
        counts[0] += found.sum()
        counts[1] += found.numel()
    model.train()
    correct, count = over_ranks(counts).tolist()
    return correct / count


def over_ranks(values):  # their mean over all ranks (16); of one process: as they are
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


# 09 · ResNet-50: the operations a second that a step achieves


def tflops(step, images, labels, step_ms):
    # Over the data sheet's peak for dense matrices (headlines are twice that): the MFU.
    # torch.set_float32_matmul_precision("high") lets products in float32 take TF32
    with FlopCounterMode(display=False) as counter:
        step(images, labels)
    return counter.get_total_flops() / step_ms / 1e9


# 10 · channels_last: the weights once, the images of each batch


def channels_last(model, step):  # the images are on the device already
    model.to(memory_format=torch.channels_last)
    return lambda images, labels: step(
        images.contiguous(memory_format=torch.channels_last), labels
    )


# 11 · Mixed precision: bfloat16 needs no scaler; float16 does, and with it unscale gradients before you clip them


# scaler: torch.amp.GradScaler(enabled=False); with torch.float16 it must be enabled
def mixed_step(
    model, optimizer, scaler, images, labels, dtype=torch.bfloat16, clip=None,
    loss_of=nn.functional.cross_entropy,
):  # fmt: skip
    optimizer.zero_grad()
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        loss = loss_of(model(images), labels)
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)  # before you clip
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def fastest(steps, *batch, rounds=3, seconds=60):  # and a first round, in any case
    # steps: by name, such as in float32 and bfloat16, each also in channels_last, since not
    # every device gains. They train: give each a model of its own, not compiled. batch: one
    # of usual size; of unequal lengths the one of median length among some
    steps, first, times = dict(steps), {}, {}
    few = each_tensor(batch, lambda each: each[:2])

    def time_of(name, batch, repeats):
        step = steps[name]
        try:
            return milliseconds(lambda: step(*batch), repeats, warmup=1)
        except RuntimeError as error:  # too little memory, or no kernel for this type
            if len(steps) == 1:
                raise
            print(f"Without {name}: {error}")
            del steps[name]
            return math.inf

    # Some processors take a hundred times as long in bfloat16: ask with two images first
    for name in 2 * list(steps):
        if name in steps:
            few_ms = time_of(name, few, repeats=1)
            first[name] = min(first.get(name, math.inf), few_ms)
    least = min(first[name] for name in steps)
    steps = {name: step for name, step in steps.items() if first[name] < 3 * least}
    # Where a step takes 100 ms or more, one says enough
    repeats, end = 5 if least < 100 else 1, time.perf_counter() + seconds
    for number in range(rounds):
        if number and time.perf_counter() > end:
            break
        # Interleaved, not one after the other
        for name in random.sample(list(steps), len(steps)):
            times.setdefault(name, []).append(time_of(name, batch, repeats))
    return min(steps, key=lambda name: statistics.geometric_mean(times[name]))


# 12 · Fewer launches: one kernel for all weights, and kernels that do the work of several


# Most optimizers of PyTorch take fused=True. others: such as weight_decay
def fused_sgd(weights, lr, momentum=0.9, **others):
    optimizer = torch.optim.SGD(weights, lr, momentum, fused=True, **others)

    def begin_with_zeros(*_):
        # If a scaler skips the first step (float16), PyTorch 2.15 goes on with whatever was
        # in memory as momentum, such as nan
        if not optimizer.state:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if weight.requires_grad:
                        zeros = torch.zeros_like(weight)
                        optimizer.state[weight]["momentum_buffer"] = zeros

    optimizer.register_step_pre_hook(begin_with_zeros)
    return optimizer


def with_fewer_launches(model, lr, compiled=True, **others):
    optimizer = fused_sgd(model.parameters(), lr, **others)
    # The first step compiles: it can take a minute. Save model.state_dict(): in that of
    # the compiled model each name begins with _orig_mod
    return torch.compile(model) if compiled else model, optimizer


# One launch for a whole step, on a GPU. The step asks for no value and has no enabled
# scaler. A learning rate that changes is a tensor: fused_sgd(weights, torch.tensor(lr))
def in_one_graph(step, *batch):
    places = [each.clone() for each in batch]
    warming = torch.cuda.Stream()
    warming.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warming):
        for _ in range(3):  # it trains: what libraries set up at first is not recorded
            step(*places)
    torch.cuda.current_stream().wait_stream(warming)
    graph = torch.cuda.CUDAGraph()
    # Another thread, such as one that pins batches, may call CUDA meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step(*places)  # recorded: it does not run

    def replay(*batch):  # of the same shapes
        for place, each in zip(places, batch, strict=True):
            place.copy_(each, non_blocking=True)
        graph.replay()
        return result.clone()  # the next replay writes where this one's lies

    replay.step = step  # a graph keeps no tensor alive
    return replay


# 13 · Memory: activations that are recomputed instead of kept, and how many bytes forward keeps


class Recomputed(nn.Module):
    # Keeps the input of a module only; backward runs the module's forward again
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return checkpoint(
            self.module, *inputs, use_reentrant=False, context_fn=self.contexts
        )

    def contexts(self):  # one for each of the two passes
        return contextlib.nullcontext(), self.again()

    @contextlib.contextmanager
    def again(self):  # the second time, batch normalization must not update its statistics
        kind = nn.modules.batchnorm._BatchNorm
        norms = [each for each in self.module.modules() if isinstance(each, kind)]
        # With momentum None, an average over all batches, it still counts each batch twice
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, momentum in zip(norms, before, strict=True):
                norm.momentum = momentum


def kept_bytes(model, *inputs):
    # What forward keeps for backward, without weights and buffers
    tensors = (*model.parameters(), *model.buffers())
    own = {each.untyped_storage()._cdata for each in tensors}
    kept = {}  # by storage: two tensors that look at the same memory count once

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # an output itself would leak: a reference cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)  # noqa: F841, it holds what is kept, until all is counted
    return sum(kept.values())


# 14 · Requests and shards: requests that run ahead


def results_ahead(requests, threads=16):
    # Calls functions in threads, and gives their results in order
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque()
        for request in requests:
            waiting.append(pool.submit(request))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# 15 · Order and resume: the order of an epoch, known before; its division among ranks


def epoch_order(sizes, seed, epoch, buffer=1_000):
    # sizes: how many samples each piece of the data has
    draw, first = np.random.default_rng((seed, epoch)), np.cumsum(sizes) - sizes
    pieces = draw.permutation(len(sizes))
    order = np.concatenate([first[piece] + np.arange(sizes[piece]) for piece in pieces])
    return order[np.argsort(np.arange(len(order)) + draw.exponential(buffer, len(order)))]


def batches_of_rank(order, batch, rank=0, world=1, done=0):
    # done: samples that all ranks together have had.
    # Each rank reads nearly all pieces: let those of a machine read one copy,
    # or deal the pieces out to lanes first
    for start in range(done, len(order) - batch * world + 1, batch * world):
        yield order[start + rank * batch :][:batch]


# What is random in workers, such as a cut of a clip, needs the epoch: drawn by
# np.random.default_rng((seed, epoch, index)) it is the same in any worker, on any rank, and
# after a restart. With this order= the dataset gets dataset[epoch, index]
class WithEpoch(DistributedSampler):
    def __iter__(self):
        epoch = self.epoch
        return ((epoch, index) for index in super().__iter__())


def loader_that_resumes(
    dataset, batch, workers, seed=0, order=DistributedSampler, **others
):
    # Files on a disk. Call loader.sampler.set_epoch(epoch) before each epoch: its order is
    # then the same after a restart. With shuffle=True and workers that stay it is not; nor
    # are random transforms in workers, unless they know the epoch (above). Each rank (16)
    # has its share; batch is that of a rank
    rank, ranks = rank_and_ranks()
    sampler = order(dataset, ranks, rank, seed=seed, drop_last=True)
    own = torch.Generator()  # or the loader draws from the generator of your crops
    return loader_of(
        dataset, batch, workers, **{"sampler": sampler, "generator": own} | others
    )


# Batches of samples of about equal length, so that little is padding. batch: of a rank;
# lengths: of the samples that the loader has, such as those of a Subset:
#     order, own = ByLength(lengths, batch), torch.Generator()
#     more = {"batch_sampler": order, "collate_fn": as_it_is, "generator": own}
#     loader = loader_of(ragged, batch, workers, **more)
#     order.set_epoch(epoch)  # before each epoch; with done: batches that it has had
# All ranks get as many batches, and in each step samples of about the same length. Samples
# are sorted among pool × batch × ranks of them, drawn anew in each epoch: a larger pool has
# less padding, but an epoch needs several pools, or its batches are always the same.
# Lengths decide how long a step takes: best_workers (03) needs many steps to compare. Leave
# cudnn.benchmark off: it searches anew for each length. An epoch leaves its rest out. To
# validate each sample once, give loader_of(…, train=False) a
# Subset(ragged, ragged.lengths.argsort(kind="stable")[rank::ranks])
class ByLength:
    def __init__(self, lengths, batch, seed=0, pool=50):
        self.lengths, self.batch = np.asarray(lengths), batch
        self.seed, self.pool, self.epoch, self.done = seed, pool, 0, 0
        self.rank, self.ranks = rank_and_ranks()

    def set_epoch(self, epoch, done=0):
        self.epoch, self.done = epoch, done

    def __len__(self):
        return len(self.lengths) // (self.batch * self.ranks)

    def __iter__(self):
        draw = np.random.default_rng((self.seed, self.epoch))
        step = self.batch * self.ranks
        order = draw.permutation(len(self.lengths))[: len(self) * step]
        # Sorted among so many batches only: the order stays random enough to learn from
        pools = np.split(order, range(self.pool * step, len(order), self.pool * step))
        # Stable: else the order of equal lengths depends on the processor
        sorts = [self.lengths[pool].argsort(kind="stable") for pool in pools]
        pairs = zip(pools, sorts, strict=True)
        by_length = [pool[places].reshape(-1, step) for pool, places in pairs]
        for samples in draw.permutation(np.concatenate(by_length))[self.done :]:
            yield samples[self.rank :: self.ranks].tolist()


def share_of_padding(lengths, batches):
    of_batches = [np.asarray(lengths)[batch] for batch in batches]
    return 1 - sum(map(sum, of_batches)) / sum(len(each) * max(each) for each in of_batches)


# 16 · Data parallel: what a script needs that torchrun starts, and how much of the communication is exposed


# First of all in a script: torchrun starts it once for each rank; without torchrun there is
# one. Returns the rank's device: a GPU of its own, or the CPU
def join():
    # A worker of a DataLoader may import the script anew, by this name, as in Python 3.14
    if getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    here, gpu = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if 0 < gpu < here:
        raise RuntimeError(
            f"expected a GPU for each of {here} ranks, found {gpu}: start fewer ranks, or "
            "set CUDA_VISIBLE_DEVICES= for the CPU"
        )
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if "LOCAL_RANK" in os.environ:
        # NCCL connects at once if it knows the device from the start
        own = device if gpu else None
        dist.init_process_group("nccl" if gpu else "gloo", device_id=own)
    return device


def rank_and_ranks():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# What is tried, packed or read once: rank 0 does it, and all ranks get what it returns. If
# each chose for itself, two might choose differently, and wait for each other for ever
def decided_once(decide):
    if not dist.is_initialized():
        return decide()
    # In a group of its own the others wait as long as it takes, not NCCL's ten minutes
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    decision = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(decision, group=patient)
    return decision[0]


# After channels_last: gradients then lie in their buckets as the weights do in memory.
# Before torch.compile: that cuts backward at the buckets, and an all-reduce runs beside it.
# After its first step DDP lays out the buckets anew; three ranks or more then sum in
# another order. For equal bits after a restart, make a step first, then load the state
def data_parallel(model):
    if not dist.is_initialized():
        return model
    # Try bucket_cap_mb=5, 100
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # The running means of batch normalization go apart: same_buffers joins them once an
    # epoch, not in each step. (An argument of this name is deprecated in PyTorch 2.15)
    model.broadcast_buffers = False
    return model


def same_buffers(model):  # before you validate or save: those of rank 0
    for buffer in model.buffers() if dist.is_initialized() else ():
        dist.broadcast(buffer, 0)


def exposed_ms(model, step, rounds=3):
    # Of communication, in a step. Then throw the model away: its ranks go apart
    times = []
    for _ in range(rounds):
        with_all_reduce = milliseconds(step)
        with model.no_sync():  # forward and backward in here leave the all-reduce out
            times.append(with_all_reduce - milliseconds(step))
    return statistics.median(times)


# 17 · Stragglers and failures: a checkpoint that is whole, or refused


# The state for an exact resume: the next epoch, what a trial chose, and state_dict() of
# model, optimizer, schedule and scaler. Seed each epoch, on each rank otherwise:
# torch.manual_seed(seed + epoch * ranks + rank). If you save within an epoch, too, seed
# anew wherever you save. See data_parallel (16) for a first step.
# Save before the first epoch, too, or a restart tries anew. Keep the settings and a
# checksum of the photos' names with it, and refuse others. All else as text or Python's own
# numbers: load_whole reads no other types. On a GPU, ask for the same bits by
# torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8
def save_whole(path, state):  # whole, or still the one before
    with path.with_suffix(".new").open("wb") as file:
        torch.save(state, file)  # a zip file, with a checksum of each part
        file.flush()
        os.fsync(file.fileno())  # on the disk, before it takes the old one's place
    path.with_suffix(".new").replace(path)


def load_whole(path):
    if zipfile.ZipFile(path).testzip():
        raise ValueError(f"{path} is damaged: take a copy of your own, or begin anew")
    return torch.load(path, map_location="cpu", weights_only=True)


# decide: what a run decides only once, such as its workers, as a dict. With several ranks
# call it by decided_once (16)
def where_to_begin(path, settings, decide):
    if not path.exists():
        save_whole(path, {"settings": settings, "epoch": 0} | decide())
    kept = load_whole(path)
    if kept["settings"] != settings:
        found = f"expected {kept['settings']}, found {settings}"
        raise ValueError(f"{path}: {found}. Delete it to begin anew")
    return kept


# All of them, on noise


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        originals = [folder / f"{number % 2}" / f"{number}.png" for number in range(64)]
        for path in originals:
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.random.randint(0, 256, (48, 64, 3), np.uint8)).save(path)
        train_paths, val_paths = train_and_val(folder, (".png",))
        print(f"{len(val_paths)} of {len(train_paths + val_paths)} photos to validate with")
        copies = Copies(resize_all(originals, 32, folder / "copies"), ["0", "1"])
        print(f"copies: {len(copies)}, the first of {tuple(copies[0][0].shape)}; or, as pixels:")
        print(f"packed: {len(pack_photos(originals, 32, folder / 'images.npy'))}")
        dataset = Packed(folder / "images.npy", [int(path.parent.name) for path in originals])
        print(f"{items_per_second([dataset.labels, dataset.path]):,.0f} items/s of a list")

        clips = [np.ones((length, 2), np.int16) for length in np.random.randint(4, 40, 64)]
        pack_ragged(clips, folder / "clips.bin")
        ragged = Ragged(folder / "clips.bin", dataset.labels)
        by_length = ByLength(ragged.lengths, batch=8)
        padded, _, _ = next(iter(loader_of(ragged, 8, 0, batch_sampler=by_length, collate_fn=as_it_is)))
        print(f"ragged: {tuple(padded.shape)}, padding {share_of_padding(ragged.lengths, by_length):.0%} of an epoch")

        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
        model = nn.Sequential(Normalize([0.5] * 3, [0.25] * 3), *layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(images, labels):
            return train_step(model, optimizer, images.to(device), labels.to(device))

        def new_loader(workers):
            return loader_that_resumes(dataset, 8, workers, collate_fn=as_it_is)

        on_device = [each.to(device) for each in dataset.__getitems__(list(range(64)))]
        losses = [step(crop_and_flip(images), labels) for images, labels in batches_on_device(*on_device, 8)]
        print(f"augmented on the device: {len(losses)} steps")

        loader = new_loader(0)
        print("loading and compute: {:.2f} and {:.2f} ms a step".format(*two_clocks(loader, step)))
        print(f"best: {best_workers(new_loader, step, candidates=(0, 1))} workers")
        record(endless(loader), step, folder / "traces")
        print(f"loss {train(loader, channels_last(model, step), device):.3f} nats")
        print(f"{accuracy(model, loader, device):.0%} right")
        compiled, optimizer = with_fewer_launches(model, lr=0.01)
        images, labels = (each.to(device) for each in next(iter(loader)))
        ways = {"kept": model, "recomputed": Recomputed(model)}
        ways = {name: kept_bytes(each, images) / 1e6 for name, each in ways.items()}
        print("MB that forward keeps: {kept:.2f}, recomputed {recomputed:.2f}".format(**ways))
        scaler = torch.amp.GradScaler(enabled=False)
        order = epoch_order([8] * 8, seed=0, epoch=0)
        mine = list(batches_of_rank(order, 8, rank=1, world=2))
        loaded = list(results_ahead(lambda rows=rows: dataset.__getitems__(rows.tolist()) for rows in mine))
        print(f"rank 1 of 2: {len(loaded)} batches")
        print(f"loss in bfloat16, compiled: {mixed_step(compiled, optimizer, scaler, images, labels):.3f} nats")

        def way(dtype, layout):
            own = copy.deepcopy(model)
            own, sgd = with_fewer_launches(own, lr=0.01, compiled=False)
            step = functools.partial(mixed_step, own, sgd, scaler, dtype=dtype)
            return channels_last(own, step) if layout == "channels_last" else step

        names = itertools.product((torch.float32, torch.bfloat16), ("contiguous", "channels_last"))
        ways = {name: way(*name) for name in names}
        print(f"faster: {fastest(ways, images, labels)}")
        print(f"{tflops(step, images, labels, milliseconds(lambda: step(images, labels))):.2g} TFLOP/s in products")
        kept = where_to_begin(folder / "checkpoint.pt", {"batch": 8}, lambda: {"model": model.state_dict()})
        print(f"{len(kept['model'])} tensors in a checkpoint of epoch {kept['epoch']}")
        print(f"(epoch, index): {list(WithEpoch(range(3), 1, 0))}")

        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in alone.items()}  # as torchrun
        parallel = data_parallel(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)).to(join()))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        same_buffers(parallel)
        print(f"rank 0 decides {decided_once(lambda: 'once')}")
        exposed = exposed_ms(parallel, lambda: train_step(parallel, optimizer, images / 255, labels))
        print(f"{exposed:.2f} ms of communication are exposed, with one rank")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
