"""Trains a network on your own sound clips with what the course found. It takes `recipes.py` beside it, and soundfile.

    python train_clips.py CLIPS OUT [--seconds 4] [--epochs 10] [--batch 64] [--lr 0.1] [--workers 0 1 2 4 8]
    torchrun --nproc-per-node 4 train_clips.py CLIPS OUT …    # on four GPUs; on several machines: slurm/README.md

CLIPS holds train/CLASS/*.flac and val/CLASS/*.flac; or CLASS/*.flac, and about every tenth clip is kept to validate.
Also .wav and .ogg, of any lengths, all with the same sampling rate. An epoch decodes a random cut of --seconds from
each clip, and no more; to validate, it takes the middle. (For whole clips recipes.py has `Ragged`, `ByLength` and
`without_padding`; let `torch.stft` then not look beyond their ends: center=False.) OUT gets a checkpoint after each
epoch: the same command goes on from there. --batch is of all ranks together, and --lr is for 256 clips a step.
"""

import argparse
import copy
import itertools
import math
import os
import statistics
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import recipes
import soundfile
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, Subset

SEED, SUFFIXES = 2021, (".flac", ".wav", ".ogg")
DEVICE = recipes.join()  # of this rank
RANK, RANKS = recipes.rank_and_ranks()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # of this job
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = {
    f"{name}{', channels_last' * last}": (TYPES[name], torch.channels_last if last else torch.contiguous_format)
    for name, last in itertools.product(TYPES, (False, True))
    if name != "float16" or DEVICE.type == "cuda"  # many processors take minutes in float16
}


class Cuts(Dataset):
    """A cut of each clip, as whole numbers of 16 bits; an index (epoch, number) gives a random one."""

    def __init__(self, paths, labels, length):
        self.paths = np.array([str(path) for path in paths])  # one array: workers share its memory, not that of a list
        self.labels, self.length = torch.tensor(labels), length  # samples of a cut

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        epoch, number = index if isinstance(index, tuple) else (None, index)
        cut, path = np.zeros(self.length, np.int16), self.paths[number]  # a short clip ends in silence
        try:
            with soundfile.SoundFile(path) as clip:
                spare = max(0, clip.frames - self.length)
                begin = spare // 2
                if epoch is not None:  # the same in each worker, on any rank, and after a restart
                    begin = np.random.default_rng((SEED, epoch, number)).integers(spare + 1)
                clip.seek(begin)
                samples = mean_of_channels(clip, self.length)
                cut[: len(samples)] = samples
        except soundfile.LibsndfileError as error:
            if not os.access(path, os.R_OK):
                raise  # no damage: there is no such file, or it may not be read
            warnings.warn(f"silence in place of a damaged clip: {path}: {error}", stacklevel=2)
        return torch.from_numpy(cut), self.labels[number]


def mean_of_channels(clip, count):
    """Return the next `count` samples of an open clip, or fewer, as whole numbers of 16 bits."""
    if clip.subtype in ("FLOAT", "DOUBLE"):  # from −1 to 1, which soundfile would cut to 0
        samples = clip.read(count, dtype="float32", always_2d=True).clip(-1, 1) * 32767
    else:
        samples = clip.read(count, dtype="int16", always_2d=True)
    # Channel by channel: np.mean over pairs takes ten times as long
    return sum(channel.astype(np.int32) for channel in samples.T) // clip.channels


def mel(hertz):
    """Return the pitch on the mel scale, in which equal steps sound about equal (O'Shaughnessy, 1987)."""
    return 2595 * torch.log10(1 + hertz / 700)


class Spectrogram(nn.Module):
    """Samples of 16 bits (batch, samples) → logarithms of the power (batch, 1, bands, frames), on the device."""

    def __init__(self, rate, bands=64, window=0.025, hop=0.01):  # seconds
        super().__init__()
        self.hop, size = int(hop * rate), int(window * rate)
        self.points = 2 ** math.ceil(math.log2(size))  # of the Fourier transform
        pitches = mel(torch.linspace(0, rate / 2, self.points // 2 + 1)).unsqueeze(0)
        edges = torch.linspace(0, pitches.max(), bands + 2).unsqueeze(1)
        # A band is a triangle between the middles of its neighbours
        triangles = torch.minimum(pitches - edges[:-2], edges[2:] - pitches) / edges[1]
        self.register_buffer("bands", triangles.clamp(min=0))
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, samples):
        # In float32, also under autocast: a power has more range than float16, and more digits than bfloat16
        with torch.autocast(samples.device.type, enabled=False):
            waves = samples.float() / 2**15
            size = len(self.window)
            waves = torch.stft(waves, self.points, self.hop, size, self.window, return_complex=True)
            return (self.bands @ waves.abs().square() + 1e-6).log().unsqueeze(1)


class Masks(nn.Module):
    """Hides a random stripe of bands and one of frames in each spectrogram (SpecAugment, Park and others, 2019)."""

    def forward(self, spectrograms):  # hidden is 0, the mean after a normalization
        for axis in (2, 3) if self.training else ():
            size, shape = spectrograms.shape[axis], [len(spectrograms), 1, 1, 1]
            places = torch.arange(size, device=spectrograms.device).view([-1 if i == axis else 1 for i in range(4)])
            width = torch.rand(shape, device=spectrograms.device) * size / 4
            begin = torch.rand(shape, device=spectrograms.device) * (size - width)
            hidden = (places >= begin) & (places < begin + width)
            spectrograms = spectrograms.masked_fill(hidden, 0)
        return spectrograms


def network(rate, classes):
    widths = (1, 32, 64, 128, 256)
    convolutions = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
    ]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
    return nn.Sequential(Spectrogram(rate), nn.BatchNorm2d(1), Masks(), *convolutions, *head)


class Training:
    """A network, its optimizer and its learning rate. To call it trains on one batch; nothing in it waits."""

    def __init__(self, rate, classes, lr, steps, way):
        torch.manual_seed(SEED)
        self.dtype, layout = WAYS[way]
        # A spectrogram has one channel, and lies in memory alike in both layouts: the weights decide
        self.model = self.forward = network(rate, classes).to(DEVICE, memory_format=layout)
        self.optimizer = recipes.fused_sgd(self.model.parameters(), lr, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=self.dtype == torch.float16)

        def share_of_rate(step):  # up in the first twentieth of the steps, then down as a cosine
            return min(20 * (step + 1) / steps, (1 + math.cos(math.pi * step / steps)) / 2)

        self.plan = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share_of_rate)

    def autocast(self):
        return torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype != torch.float32)

    def __call__(self, cuts, labels):
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.forward(cuts.to(DEVICE, non_blocking=True))
        loss = nn.functional.cross_entropy(logits.float(), labels.to(DEVICE, non_blocking=True))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.plan.step()
        return loss.detach()

    def state(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "plan", "scaler")}


def readable(paths):
    """Return the sampling rate of most clips, and which ones have it; name the others."""

    def rate_of(path):
        try:
            return soundfile.info(path).samplerate
        except soundfile.LibsndfileError:
            if not os.access(path, os.R_OK):
                raise
            return 0

    with ThreadPoolExecutor(CORES) as threads:  # by the headers alone
        rates = list(threads.map(rate_of, paths))
    most = statistics.mode([rate for rate in rates if rate] or [0])
    for path, rate in zip(paths, rates, strict=True):
        if rate != most or not rate:
            print(f"Left out: {path}: {f'{rate} samples a second, not {most}' if rate else 'damaged'}")
    return most, [rate == most and rate > 0 for rate in rates]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("out", type=Path)
    for name, default in (("--seconds", 4.0), ("--epochs", 10), ("--batch", 64), ("--lr", 0.1)):
        parser.add_argument(name, type=type(default), default=default)
    its_cores = CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of each rank
    few = [number for number in (0, 1, 2, 4, 8) if number <= its_cores]
    parser.add_argument("--way", choices=WAYS, help="number type and memory format; default: the fastest")
    parser.add_argument("--workers", type=int, nargs="+", default=few, help="to try; one is taken as it is")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--trace", type=Path, help="default: OUT/trace")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32, where there is a GPU that has it
    # cuDNN times its algorithms once for each shape. It may choose others in the next run: leave it out for equal bits
    torch.backends.cudnn.benchmark = True
    options.out.mkdir(parents=True, exist_ok=True)
    parts = dict(zip(("train", "val"), recipes.train_and_val(options.clips, SUFFIXES), strict=True))
    classes = {name: number for number, name in enumerate(sorted({path.parent.name for path in parts["train"]}))}
    if options.batch % RANKS:
        parser.error(f"--batch: expected a multiple of the {RANKS} ranks, found {options.batch}")
    if others := {path.parent.name for path in parts["val"]} - classes.keys():
        parser.error(f"val: expected the classes of train, found others: {sorted(others)}. Rename them")
    both = parts["train"] + parts["val"]
    settings = {name: getattr(options, name) for name in ("seconds", "epochs", "batch", "lr")}
    names = [[path.parent.name, path.name] for path in both]
    settings["checksum of all names"] = zlib.crc32(str(names).encode(errors="surrogateescape"))

    data = {}

    def use(rate, usable):  # the clips that can be read
        usable = {path for path, can_be_read in zip(both, usable, strict=True) if can_be_read}
        for part, least in (("train", options.batch), ("val", 1)):
            paths = [path for path in parts[part] if path in usable]
            if len(paths) < least:
                parser.error(f"{part}: expected {least} or more clips, found {len(paths)}. Add some, or lower --batch")
            labels = [classes[path.parent.name] for path in paths]
            data[part] = Cuts(paths, labels, int(options.seconds * rate))

    def loader(workers, part="train"):
        batch = options.batch // RANKS
        if part == "train":  # of all ranks together the same cuts in each step, however many ranks there are
            return recipes.loader_that_resumes(data[part], batch, workers, SEED, order=recipes.WithEpoch)
        mine = Subset(data[part], range(RANK, len(data[part]), RANKS))  # each clip on one rank
        return recipes.loader_of(mine, batch, workers, train=False)

    def new_training(way, rate):
        steps = options.epochs * (len(data["train"]) // options.batch)
        return Training(rate, len(classes), options.lr * options.batch / 256, steps, way)

    def decide():
        rate, usable = readable(both)
        use(rate, usable)
        print("Trying number types and memory formats, then workers", flush=True)
        some_ways = [options.way] if options.way else WAYS
        trials, batch = {way: new_training(way, rate) for way in some_ways}, next(iter(loader(0)))
        way, some = recipes.fastest(trials, *batch), options.workers
        ahead = partial(recipes.one_ahead, device=DEVICE)
        workers = recipes.best_workers(loader, trials[way], some, ahead=ahead) if some[1:] else some[0]
        return {"rate": rate, "readable": usable, "way": way, "workers": workers}

    checkpoint = options.checkpoint or options.out / "checkpoint.pt"
    # By one rank, for all
    kept = recipes.decided_once(partial(recipes.where_to_begin, checkpoint, settings, decide))
    if options.way not in (None, kept["way"]):
        parser.error(f"--way: expected {kept['way']}, with which {checkpoint} began, found {options.way}")
    if len(options.workers) == 1:  # another number of them learns the same
        kept["workers"] = options.workers[0]
    use(kept["rate"], kept["readable"])
    training = new_training(kept["way"], kept["rate"])  # anew: the trials have trained theirs
    kept = copy.deepcopy(training.state()) | kept
    training.forward = recipes.data_parallel(training.model)
    if RANKS > 1:
        training(*next(iter(loader(0))))  # in which DDP lays out its buckets; what it learned goes
    for name in training.state():
        getattr(training, name).load_state_dict(kept[name])
    if RANK == 0:
        print(f"From epoch {kept['epoch']} on: {kept['way']}, {kept['workers']} workers, {RANKS} ranks", flush=True)
    train, val = loader(kept["workers"]), loader(kept["workers"], "val")
    for epoch in range(kept["epoch"], options.epochs):
        train.sampler.set_epoch(epoch)
        # For the masks: the same whether or not the run was stopped before, and others on each rank
        torch.manual_seed(SEED + epoch * RANKS + RANK)
        start = time.perf_counter()
        loss = recipes.train(train, training, DEVICE)
        speed = len(train) * options.batch / (time.perf_counter() - start)
        recipes.same_buffers(training.model)
        with training.autocast():
            right = recipes.accuracy(training.model, val, DEVICE)
        if RANK == 0:
            recipes.save_whole(checkpoint, kept | training.state() | {"epoch": epoch + 1})
            print(f"epoch {epoch}: loss {loss:.3f} nats, {speed:.0f} clips/s, {right:.1%} right", flush=True)
    batches = recipes.one_ahead(recipes.endless(train), DEVICE)
    if kept["epoch"] < options.epochs:  # else all is done already, and so is the trace
        # Last: a profiler may leave something attached
        active = recipes.whole_periods(6, kept["workers"])
        recipes.record(batches, training, options.trace or options.out / "trace", active)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
