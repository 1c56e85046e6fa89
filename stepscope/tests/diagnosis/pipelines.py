"""The held-out examination: forty faulty training loops and ten healthy ones, what is true of them, and what is said.

    pipelines.py [--busy N] [--json FILE] [--truth FILE] [--only gain|diagnosis] [NAME or KIND ...]

A function entered by `faulty` is a part of a loop, such as the `__getitem__` of its dataset, or makes the loop if it is
a function of `fixed`. Lines that cost the time are marked with FAULT. A gain is the share of the faulty step that the
fixed one saves: measured with nothing else running, and diagnosed beside N processes that keep a core busy each.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import itertools
import json
import math
import os
import random
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, default_collate
from torchvision.transforms import v2

from stepscope.diagnosis import diagnose

WORTH = 0.05  # below this share of a step, a finding accuses nobody


class Data(Dataset):
    """Random items in memory, or from a storage that takes a while for each `every` of them."""

    def __init__(self, length=1024, shape=(784,), seconds=0.0, every=1):
        self.items, self.seconds, self.every = torch.randn(length, *shape), seconds, every

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if self.seconds and index % self.every == 0:
            time.sleep(self.seconds)  # the storage
        return self.items[index], torch.as_tensor(index) % 10


class Stream(IterableDataset):
    """What a function generates, again in each epoch."""

    def __init__(self, generate):
        self.generate = generate

    def __iter__(self):
        return self.generate()


class Layer(nn.Module):
    """A function as a layer."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, inputs):
        return self.function(inputs)


class Training:
    """A plain training step."""

    def __init__(self, model, loss=F.cross_entropy):
        self.model, self.loss, self.optimizer = model, loss, torch.optim.SGD(model.parameters(), lr=1e-3)

    def __call__(self, inputs, targets):
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        self.loss(outputs, targets).backward()
        self.optimizer.step()
        return outputs.detach()


def shuffled(data, batch=32, **settings):
    return DataLoader(data, batch, shuffle=True, drop_last=True, **settings)


def in_memory(batch=64, shape=(784,), length=4096):
    """Return a loader that takes each batch at once out of tensors in memory."""
    data = Data(length, shape)
    return DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), batch, drop_last=True))


def mlp(width=256, depth=2, outputs=10):
    layers = [layer for _ in range(depth) for layer in (nn.LazyLinear(width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.LazyLinear(outputs))


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) / 255


# How a loop is made of its faulty or fixed part


def with_item(item, batch=32):
    return shuffled(type("Items", (Data,), {"__getitem__": item})(), batch), Training(mlp())


def with_collate(collate, batch=32, shape=(784,)):
    return shuffled(Data(1024, shape), batch, collate_fn=collate), Training(mlp())


def with_step(step, data=in_memory, model=mlp):
    return data(), partial(step, Training(model()))


def with_batches(generate, data=in_memory):
    return Stream(partial(generate, data())), Training(mlp(512))


PARTS = {  # for each kind, how a loop is made of the part, and the part that is right
    "loading": (with_item, Data.__getitem__),
    "collating": (with_collate, default_collate),
    "step": (with_step, lambda train, *batch: train(*batch)),
    "around": (with_batches, iter),
}
LOOPS = {}


def faulty(names, second="", fixed=None, **settings):
    """Enter a loop whose first finding must match `names`, and any finding `second`, if there are two faults."""

    def entered(fault):
        def make(right):
            build, usual = PARTS[kind]
            return build((fixed or usual) if right else fault, **settings)

        kind, name = fault.__qualname__.lower().split(".")
        make = fault if "fixed" in inspect.signature(fault).parameters else make
        LOOPS[name] = SimpleNamespace(make=make, kind=kind, names=names, second=second, source=fault)
        return fault

    return entered


EVENTS = sqlite3.connect(":memory:")
FRAME = pd.DataFrame(np.random.rand(1024, 784)).add_prefix("x").assign(name="a")


def write_files():
    """Write what the datasets read: 1024 items."""
    items = np.random.randint(64, size=(1024, 784), dtype="uint8")
    EVENTS.execute("CREATE TABLE events (user INTEGER, data BLOB)")
    EVENTS.executemany("INSERT INTO events VALUES (?, ?)", ((i, items[i % 1024].tobytes()) for i in range(8192)))
    with zipfile.ZipFile("images.zip", "w") as archive:
        for i in range(1024):
            archive.writestr(str(i), items[i].tobytes())
    with h5py.File("features.h5", "w") as file:
        file["features"] = items.astype("float32")
    np.savez_compressed("shard.npz", images=items)
    np.savetxt("table.csv", items, fmt="%d", delimiter=",")
    Image.fromarray(items).resize((1280, 960)).save("photograph.jpg")


class Loading:
    @faulty("sqlite|query|execute|select")
    def sqlite_without_index(self, user):
        """Each query searches the whole table: it has no index."""
        rows = EVENTS.execute("SELECT data FROM events WHERE user = ?", (user,)).fetchall()  # FAULT
        return as_tensor(rows[0][0]), user % 10

    @faulty("zip")
    def zip_opened_for_each_item(self, index):
        """Each item opens the archive, and reads its whole table of contents."""
        with zipfile.ZipFile("images.zip") as archive:  # FAULT
            return as_tensor(archive.read(str(index))), index % 10

    @faulty(r"h5|\bFile\(", batch=64)
    def hdf5_opened_for_each_item(self, index):
        """Each item opens the file."""
        with h5py.File("features.h5") as file:  # FAULT
            return file["features"][index], index % 10  # FAULT

    @faulty("compress|npz|np.load|zlib")
    def shard_decompressed_for_one_item(self, index):
        """A whole compressed shard is read for one item."""
        images = np.load("shard.npz")["images"]  # FAULT
        return as_tensor(images[index]), index % 10

    @faulty("decod|jpe?g|convert|Image.open|PIL|crop")
    def photograph_decoded_for_a_crop(self, index):
        """A whole photograph is decoded for a small crop of it."""
        image = Image.open("photograph.jpg").convert("RGB")  # FAULT
        return as_tensor(image.crop((0, 0, 28, 28)).convert("L").tobytes()), index % 10

    @faulty("pandas|iloc|row|frame|Series")
    def row_of_a_data_frame(self, index):
        """Each item is a row of a table of columns, put together anew, and then read name by name."""
        row = FRAME.iloc[index]  # FAULT
        return torch.tensor([row[f"x{i}"] for i in range(784)], dtype=torch.float32), index % 10  # FAULT

    @faulty("regex|findall|token|re.py|lower")
    def text_tokenised_for_each_item(self, index):
        """A text is tokenised again in each epoch."""
        words = re.findall(r"\w+|[^\w\s]", ("Never the same, never another: " * 140).lower())  # FAULT
        return torch.tensor([hash(word) % 1000 / 1000 for word in words][:784]), index % 10  # FAULT

    @faulty(r"line|csv|islice|scan|open\(")
    def file_read_up_to_a_line(self, index):
        """For each item, a file of lines is read from its beginning to the item's line."""
        with open("table.csv") as file:
            line = next(itertools.islice(file, index, None))  # FAULT
        return torch.tensor([float(value) for value in line.split(",")]), index % 10

    @faulty("sleep|remote|storage|latency|network|tries|backoff", batch=16)
    def remote_store_tried_again(self, index):
        """A remote store refuses two tries of three, after each of which the dataset waits."""
        for tries in range(3):
            time.sleep(0.001 * 2**tries)  # FAULT
        return self.items[index], index % 10


class Collating:
    @faulty("collat|pad")
    def padded_number_by_number(items):
        """Items are written into a padded batch one number at a time."""
        batch = torch.zeros(len(items), max(len(item) for item, _ in items))
        for row, (item, _) in enumerate(items):
            for column, value in enumerate(item):  # FAULT
                batch[row, column] = value  # FAULT
        return batch, torch.tensor([label for _, label in items])

    @faulty("collat|concatenate", batch=64, shape=(3, 64, 64))
    def concatenated_one_by_one(items):
        """The batch grows by an image at a time, and is copied each time."""
        batch = np.zeros((0, 3, 64, 64), "float32")
        for image, _ in items:
            batch = np.concatenate([batch, image[None]])  # FAULT
        return torch.from_numpy(batch), torch.tensor([label for _, label in items])

    @faulty(r"collat|tensor\(|tolist|list", batch=64)
    def tensor_of_lists(items):
        """Items become lists, and the lists a tensor, number by number."""
        return torch.tensor([item.tolist() for item, _ in items]), torch.tensor([y for _, y in items])  # FAULT

    @faulty("collat|noise|gauss|random")
    def noise_drawn_number_by_number(items):
        """Noise is added by Python's random numbers."""
        noisy = [[value + random.gauss(0, 0.1) for value in item.tolist()] for item, _ in items]  # FAULT
        return torch.tensor(noisy), torch.tensor([label for _, label in items])

    @faulty("collat|isfinite|check|assert", batch=128)
    def checked_number_by_number(items):
        """Each number is looked at, whether it is finite."""
        for item, _ in items:
            assert all(math.isfinite(value) for value in item.tolist())  # FAULT
        return default_collate(items)


class Loader:
    @faulty("worker")
    def storage_without_workers(fixed):
        """A storage that answers after a while is asked for one item after the other."""
        workers = dict(num_workers=4, persistent_workers=True) if fixed else {}
        return shuffled(Data(seconds=0.002), 16, **workers), Training(mlp(1024))

    @faulty("persistent|restart|start|epoch")
    def workers_started_in_each_epoch(fixed):
        """Short epochs start their workers anew."""
        data = Data(256, seconds=0.001)
        return shuffled(data, 32, num_workers=4, persistent_workers=fixed), Training(mlp(1024))

    @faulty("num_workers=0|without workers|no worker|persistent|in memory")
    def workers_for_what_is_in_memory(fixed):
        """Short epochs over tensors in memory start workers, which save nothing."""
        return shuffled(Data(), 64, num_workers=0 if fixed else 4), Training(mlp(512))

    @faulty("prefetch|in_order|irregular|uneven|slow item|vary|some items")
    def short_prefetching(fixed):
        """Every seventh batch takes long, and too few batches are ready then."""
        settings = dict(num_workers=2, persistent_workers=True, prefetch_factor=10 if fixed else 1)
        return DataLoader(Data(2100, seconds=0.1, every=70), 10, **settings), Training(mlp(1024))

    @faulty("pickl|queue|pipe|numpy|array|transfer|shared memory")
    def arrays_through_the_queue(fixed):
        """Workers hand over arrays, which are pickled, and no tensors, which are shared."""
        train = Training(mlp(16))
        workers = dict(num_workers=2, persistent_workers=True)
        if fixed:
            return shuffled(Data(shape=(3, 64, 64)), 128, **workers), train

        def arrays(items):
            return [(item.numpy(), label) for item, label in items]

        return shuffled(Data(shape=(3, 64, 64)), 128, collate_fn=arrays, **workers), (
            lambda *items: train(*default_collate(items))
        )

    @faulty("item by item|one by one|batch_sampler|batch_size=None|__getitems__|collat|items")
    def table_read_row_by_row(fixed):
        """A table in memory gives large batches of small rows, one row at a time."""
        return in_memory(2048, (32,), 20480) if fixed else shuffled(Data(20480, (32,)), 2048), Training(mlp(64))


VALIDATION, CONFUSION, WRITER = in_memory(256), torch.zeros(10, 10), nn.GRU(64, 64, batch_first=True)
averaged = cache(copy.deepcopy)
augment = v2.Compose([v2.RandomResizedCrop(28), v2.RandomHorizontalFlip(), v2.GaussianBlur(3)])


class Step:
    @faulty("json|dumps|tolist")
    def batches_logged_as_json(train, inputs, labels):
        """Each batch is written into a log."""
        train(inputs, labels)
        with open("log.json", "w") as log:
            log.write(json.dumps(inputs.tolist()))  # FAULT

    @faulty("confusion|zip|python", data=partial(in_memory, 512))
    def confusion_counted_one_by_one(train, inputs, labels):
        """A confusion matrix is counted one image at a time."""
        for label, guess in zip(labels, train(inputs, labels).argmax(1), strict=True):  # FAULT
            CONFUSION[label, guess] += 1  # FAULT

    @faulty("generat|text|writer|cat|gru|python")
    @torch.no_grad()
    def text_generated_in_each_step(train, *batch):
        """A sample is generated, from the beginning again for each of its parts."""
        with torch.enable_grad():
            train(*batch)
        text = torch.zeros(1, 1, 64)
        for _ in range(40):
            text = torch.cat([text, WRITER(text)[0][:, -1:]], 1)  # FAULT

    @faulty("validation|evaluat|no_grad|python")
    def validated_in_each_step(train, *batch):
        """The whole of the validation set is evaluated."""
        train(*batch)
        with torch.no_grad():
            for inputs, labels in VALIDATION:  # FAULT
                F.cross_entropy(train.model(inputs), labels)  # FAULT

    @faulty("save|checkpoint|file|disk", model=partial(mlp, 1024))
    def weights_saved_in_each_step(train, *batch):
        """A checkpoint is written."""
        train(*batch)
        torch.save({"model": train.model.state_dict()}, "weights.pt")  # FAULT

    @faulty("state_dict|average|ema|parameter|python", model=partial(mlp, 64, depth=40))
    def weights_averaged_one_by_one(train, *batch):
        """A moving average of the weights looks up all of them for each of them."""
        train(*batch)
        for name, weight in train.model.state_dict().items():
            averaged(train.model).state_dict()[name].lerp_(weight, 0.01)  # FAULT

    @faulty("sample|loss|cross_entropy|python|operators|one by one")
    def loss_of_each_sample(fixed):
        """The loss is a sum over a loop over the samples."""

        def loss(outputs, labels):
            return sum(F.cross_entropy(outputs[i], label) for i, label in enumerate(labels)) / len(labels)  # FAULT

        return in_memory(), Training(mlp(), F.cross_entropy if fixed else loss)

    @faulty("augment|transform|stack|python", data=partial(in_memory, shape=(1, 28, 28)))
    def images_augmented_one_by_one(train, inputs, labels):
        """The images of a batch are augmented one at a time."""
        train(torch.stack([augment(image) for image in inputs]), labels)  # FAULT

    @faulty("one.hot")
    def words_as_one_hot_vectors(fixed):
        """Words are looked up by a product of a matrix that is almost all zeros."""
        table = nn.Embedding(10000, 64)

        def embed(numbers):
            words = numbers.abs().mul(1000).long()
            return table(words) if fixed else F.one_hot(words, 10000).float() @ table.weight  # FAULT

        return in_memory(32, (32,)), Training(nn.Sequential(Layer(embed, table), mlp()))

    @faulty("aten::|sub|pow|broadcast|distance|elementwise|memory")
    def distances_by_broadcasting(fixed):
        """The distances of all pairs are taken from a tensor of all differences."""

        def loss(outputs, _):
            if fixed:
                return (2 * outputs.square().sum(1) - 2 * outputs @ outputs.T).mean()
            return (outputs[:, None] - outputs).pow(2).sum(-1).mean()  # FAULT

        return in_memory(256), Training(mlp(outputs=128), loss)


class Around:
    @faulty(r"next\(|iter\(|worker|start", data=lambda: shuffled(Data(2048), 64, num_workers=2))
    def first_batch_of_a_new_iterator(loader):
        """Each batch is the first one of a new iterator, whose workers start for it."""
        for _ in range(len(loader)):
            yield next(iter(loader))  # FAULT

    @faulty("shuffle|sampler")
    def shuffled_again_for_each_batch(fixed):
        """The sampler shuffles all that is left before it takes the next batch."""

        def sampler():
            left = random.sample(range(20480), 20480)
            while left:
                if not fixed:
                    random.shuffle(left)  # FAULT
                yield [left.pop() for _ in range(64)]

        return DataLoader(Data(20480), batch_size=None, sampler=Stream(sampler)), Training(mlp())

    @faulty("plot|figure|savefig")
    def curve_drawn_after_each_batch(loader):
        """The curve of the loss is drawn again after each step."""
        for batch in loader:
            yield batch
            figure = Figure()  # FAULT
            figure.subplots().plot(torch.rand(100))  # FAULT
            figure.savefig("loss.png")  # FAULT

    @faulty("gc|collect|garbage")
    def garbage_collected_after_each_batch(loader):
        """All objects of the program are searched for garbage, among them a large catalogue."""
        catalogue = [{"number": i, "tags": [i]} for i in range(100_000)]
        for batch in loader:
            yield batch
            gc.collect()  # FAULT
        del catalogue

    @faulty("choice|priorit|random")
    def replay_drawn_by_priority(loader):
        """A batch is drawn by priorities, of which there are very many, and normalised each time."""
        priorities = np.random.rand(1_000_000)
        for inputs, labels in loader:
            chosen = np.random.choice(len(priorities), 64, p=priorities / priorities.sum())  # FAULT
            yield inputs[chosen % 64], labels[chosen % 64]


class Settings:
    @faulty("float64|double")
    def network_in_float64(fixed):
        """The network computes in double precision."""
        train = Training(mlp(1024) if fixed else mlp(1024).double())
        return in_memory(256), lambda inputs, labels: train(inputs if fixed else inputs.double(), labels)

    @faulty("thread|core")
    def one_thread(fixed):
        """PyTorch may use one core of several."""
        torch.set_num_threads(len(os.sched_getaffinity(0)) if fixed else 1)
        return in_memory(512), Training(mlp(1024))

    @faulty("anomaly")
    def anomaly_detection(fixed):
        """Left on from the search for a NaN."""
        torch.autograd.set_detect_anomaly(not fixed)
        return in_memory(), Training(mlp(64, depth=40))


class Two:
    @faulty("deepcopy|copy", second="histogram")
    def copies_and_histograms(fixed):
        """Each item copies all annotations; and in each step, histograms of the weights are counted."""
        annotations, train = [{"label": i % 10, "box": [0, 0, i, i]} for i in range(1024)], Training(mlp())

        def item(self, index):
            notes = annotations if fixed else copy.deepcopy(annotations)  # FAULT
            return self.items[index], notes[index]["label"]

        def step(*batch):
            train(*batch)
            for weight in train.model.parameters():
                np.histogram(weight.detach().numpy(), 64)

        return with_item(item)[0], step

    @faulty("cell|time.step|launch|operators", second="loadtxt|item|load")
    def cells_and_text_files(fixed):
        """A recurrent network runs cell by cell; and each item is a line of numbers to be parsed."""
        lstm, cell = nn.LSTM(8, 64, batch_first=True), nn.LSTMCell(8, 64)
        line = ",".join(map(str, range(784)))

        def item(self, index):
            return np.loadtxt([line], dtype="float32", delimiter=","), index % 10

        def forward(numbers):
            inputs, state = numbers.view(-1, 98, 8), None
            for inputs_now in () if fixed else inputs.unbind(1):
                state = cell(inputs_now, state)  # FAULT
            return lstm(inputs)[0][:, -1] if fixed else state[0]

        return with_item(item)[0], Training(nn.Sequential(Layer(forward, lstm, cell), mlp()))


def cnn(width=32):
    layers = [
        layer for _ in range(3) for layer in (nn.LazyConv2d(width, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AvgPool2d(4), mlp())


def checkpointed(*blocks):
    return nn.Sequential(Layer(partial(checkpoint_sequential, blocks, 2, use_reentrant=False), *blocks), mlp())


def accumulated(train, inputs, labels):
    """Take a step with the gradients of two halves of a batch."""
    for part in zip(inputs.chunk(2), labels.chunk(2), strict=True):
        (train.loss(train.model(part[0]), part[1]) / 2).backward()
    nn.utils.clip_grad_norm_(train.model.parameters(), 1.0)
    train.optimizer.step()
    train.optimizer.zero_grad()


def logged(train, *batch, count=itertools.count()):  # noqa: B008 – it counts on from step to step
    outputs = train(*batch)
    if next(count) % 50 == 0:
        print(f"mean of the outputs: {outputs.mean().item():.3f}")


def encoder(width=128):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), 2)


HEALTHY = {
    "plain_mlp": lambda: (in_memory(256), Training(mlp())),
    "large_mlp": lambda: (in_memory(1024), Training(mlp(4096, 3))),
    "small_cnn": lambda: (in_memory(64, (3, 32, 32)), Training(cnn())),
    "transformer": lambda: (in_memory(16, (64, 128)), Training(nn.Sequential(encoder(), mlp()))),
    "lstm": lambda: (
        in_memory(64, (64, 64)),
        Training(nn.Sequential(nn.LSTM(64, 256, batch_first=True), Layer(lambda x: x[0][:, -1]), mlp())),
    ),
    "accumulation": lambda: (in_memory(512), partial(accumulated, Training(mlp(512)))),
    "checkpointing": lambda: (in_memory(32, (32, 128)), Training(checkpointed(*(encoder() for _ in range(2))))),
    "dropout_and_a_log": lambda: (
        in_memory(256),
        partial(logged, Training(nn.Sequential(mlp(1024, 2, 512), nn.Dropout(), mlp()))),
    ),
    "workers_that_keep_up": lambda: (
        shuffled(Data(4096, seconds=0.001), 64, num_workers=4, persistent_workers=True),
        Training(mlp(2048)),
    ),
    "stream_of_workers": lambda: (
        DataLoader(Stream(lambda: ((torch.randn(784), i % 10) for i in range(4096))), 256, num_workers=1),
        Training(mlp(1024)),
    ),
}
LOOPS |= {
    name: SimpleNamespace(make=lambda _, loop=loop: loop(), kind="healthy", names="$^", second="", source=loop)
    for name, loop in HEALTHY.items()
}


def mean_step(loader, step, warm_s=0.5, least_s=1.2, most_s=3.0):
    """Return the mean duration of a warm step: of whole epochs, or of steps of a long one."""
    first, began, steps, whole = time.perf_counter(), math.inf, 0, False
    while True:
        for batch in loader:
            step(*batch)
            steps, now = steps + 1, time.perf_counter()
            if began == math.inf and now > first + warm_s:
                began, steps = now, 0
            elif now > began + most_s:
                return (now - began) / steps
        if whole and now > began + least_s:
            return (now - began) / steps
        if not whole:
            began, steps, whole = now, 0, True


def true_gain(loop):
    seconds = {False: [], True: []}
    for right in (False, True) * 3:
        seconds[right].append(mean_step(*loop.make(right)))
    wrong, right = statistics.median(seconds[False]), statistics.median(seconds[True])
    return {"true_ms": wrong * 1000, "true": None if loop.kind == "healthy" else 1 - right / wrong}


def diagnosed(loop):
    said = diagnose(*loop.make(False))
    findings = [vars(finding) for finding in said.findings if finding.gain >= WORTH]
    return {"verdict": said.verdict, "step_ms": said.step_ms, "findings": findings}


def in_own_process(part, name, busy=0):
    """Return what the part of the examination says of a loop, in a process of its own beside busy ones."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    command = [sys.executable, str(Path(__file__).absolute()), "--child", part, name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(command, cwd=folder, timeout=180, check=True, capture_output=True, text=True)
            return json.loads(Path(folder, "result.json").read_text())
        except subprocess.TimeoutExpired:
            return {"error": f"{part}: more than 180 s"}
        except subprocess.CalledProcessError as failed:
            return {"error": f"{part}: {failed.stderr.strip().splitlines()[-1]}"}
        finally:
            for process in others:
                process.kill()


def judged(record):
    """Return the record with what is right in the diagnosis."""
    loop, findings = LOOPS[record["name"]], record.get("findings")
    if findings is None:
        return record
    texts = [" ".join((f["name"], f["evidence"], f["change"])).replace(record["name"], "") for f in findings]
    source, number = inspect.getsourcelines(loop.source)
    marked = {f"pipelines.py:{number + i}" for i, line in enumerate(source) if "# FAULT" in line}
    named = bool(texts and re.search(loop.names, texts[0], re.I) and re.search(loop.second, " ".join(texts[1:]), re.I))
    line = bool(texts and marked & set(re.findall(r"pipelines\.py:\d+", findings[0]["evidence"])))
    right = not texts or record["verdict"] == "nothing wrong" if loop.kind == "healthy" else named
    ratio = findings[0]["gain"] / record["true"] if texts and record.get("true") else None
    wrong = not right and record["verdict"] != "unknown"
    return record | dict(named=named, line=line if marked else None, ratio=ratio, wrong=wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", metavar="NAME or KIND")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--truth", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=["gain", "diagnosis"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = {"gain": true_gain, "diagnosis": diagnosed}
    if options.child:
        torch.manual_seed(0)
        write_files()
        Path("result.json").write_text(json.dumps(parts[options.child](LOOPS[options.loops[0]])))
        return
    known = {}
    if options.truth:
        known = {record["name"]: record for record in map(json.loads, options.truth.read_text().splitlines())}
    records = []
    for name, loop in LOOPS.items():
        if options.loops and not {name, loop.kind} & set(options.loops):
            continue
        record = {"name": name, "kind": loop.kind}
        if name in known:
            record |= {key: known[name].get(key) for key in ("true", "true_ms")}
        elif options.only != "diagnosis":
            record |= in_own_process("gain", name)
        if options.only != "gain":
            record |= in_own_process("diagnosis", name, options.busy)
        records.append(judged(record))
        print(json.dumps(records[-1]), flush=True)
        if options.json:
            options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(table(records))


def table(records):
    """Return the records as a table in Markdown, with totals."""
    shown = {True: "yes", False: "no", None: "–"}
    lines = ["| loop | kind | true gain | first finding | stated gain | cause | line | stated / true | verdict |"]
    lines.append("|---" * 9 + "|")
    for r in records:
        first = (r.get("findings") or [{}])[0]
        share = [
            f"{value:.2f}" if value is not None else "–" for value in (r.get("true"), first.get("gain"), r.get("ratio"))
        ]
        cells = [r["name"], r["kind"], share[0], first.get("name", "–"), share[1], shown[r.get("named")]]
        cells += [shown[r.get("line")], share[2], r.get("error") or r.get("verdict", "–")]
        lines.append("| " + " | ".join(cells) + " |")
    of = [r for r in records if r["kind"] != "healthy" and "verdict" in r]
    well = [r for r in records if r["kind"] == "healthy" and "verdict" in r]
    marked = [r for r in of if r["line"] is not None]
    lines += [
        "",
        f"Named: {sum(r['named'] for r in of)} of {len(of)}; lines: {sum(r['line'] for r in marked)} of {len(marked)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
