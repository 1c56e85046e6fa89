"""Forty faulty training loops and ten healthy ones, which the authors of the rules did not know; see `examine`.

A function entered by `faulty` is a part of a loop, such as the `__getitem__` of its dataset, or makes the loop if it is
a function of `fixed`. Lines that cost the time are marked with FAULT.
"""

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
import time
import zipfile
from functools import cache, partial
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

WORKERS = {"num_workers": 4, "persistent_workers": True}
ROUNDS = 3  # of the faulty and the fixed loop, whose shortest steps count
STEPS = 20  # to time in a diagnosis
LOOPS = {}
EVENTS = sqlite3.connect(":memory:")
FRAME = pd.DataFrame(np.random.rand(1024, 784)).add_prefix("x").assign(name="a")


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
        self.forward, self.layers = function, nn.ModuleList(layers)


class Training:
    """A plain training step, which returns the outputs and logs each fiftieth loss."""

    def __init__(self, model, loss=F.cross_entropy):
        self.model, self.loss, self.steps = model, loss, itertools.count(1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def __call__(self, inputs, targets):
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.loss(outputs, targets)
        loss.backward()
        self.optimizer.step()
        if next(self.steps) % 50 == 0:
            print(f"loss: {loss.item():.3f}")
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


def loop_of(kind, part, data=in_memory, model=mlp, batch=32, shape=(784,)):
    """Return a loader and a step of which this is a part; None is the part that has no fault."""
    if kind == "loading":
        return shuffled(type("Items", (Data,), {"__getitem__": part} if part else {})(), batch), Training(mlp(1024))
    if kind == "collating":
        return shuffled(Data(1024, shape), batch, collate_fn=part), Training(mlp(32 if len(shape) > 1 else 1024))
    train = Training(model())
    if kind == "step":
        return data(), partial(part, train) if part else train
    return Stream(partial(part or iter, data())), train


def faulty(names, fixed=None, **settings):
    """Enter a loop whose first finding must match `names`."""

    def entered(fault):
        kind, name = fault.__qualname__.lower().split(".")
        whole = "fixed" in inspect.signature(fault).parameters
        make = fault if whole else lambda right: loop_of(kind, fixed if right else fault, **settings)
        LOOPS[name] = SimpleNamespace(make=make, kind=kind, names=names, source=fault)
        return fault

    return entered


def mean_step(loader, step, warm_s=0.5, least_s=1.2, most_s=3.0):
    """Return the mean duration of a warm step in s: of whole epochs, or of the steps of a long one."""
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
    Image.fromarray(items).resize((800, 600)).save("photograph.jpg")


class Loading:
    @faulty("sqlite|query|execute|select")
    def sqlite_without_index(self, user):
        """Each query searches the whole table: it has no index."""
        rows = EVENTS.execute("SELECT data FROM events WHERE user = ?", (user,)).fetchall()  # FAULT
        return np.frombuffer(rows[0][0], "uint8").astype("float32"), user % 10

    @faulty("zip")
    def zip_opened_for_each_item(self, index):
        """Each item opens the archive, and reads its whole table of contents."""
        with zipfile.ZipFile("images.zip") as archive:  # FAULT
            return np.frombuffer(archive.read(str(index)), "uint8").astype("float32"), index % 10

    @faulty(r"h5|\bFile\(", batch=64)
    def hdf5_opened_for_each_item(self, index):
        """Each item opens the file."""
        with h5py.File("features.h5") as file:  # FAULT
            return file["features"][index], index % 10  # FAULT

    @faulty("compress|npz|np.load|zlib")
    def shard_decompressed_for_one_item(self, index):
        """A whole compressed shard is read for one item."""
        images = np.load("shard.npz")["images"]  # FAULT
        return images[index].astype("float32"), index % 10

    @faulty("decod|jpe?g|convert|Image.open|PIL|crop")
    def photograph_decoded_for_a_crop(self, index):
        """A whole photograph is decoded for a small crop of it."""
        image = Image.open("photograph.jpg").convert("RGB")  # FAULT
        return np.asarray(image.crop((0, 0, 28, 28)).convert("L"), "float32"), index % 10

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
            time.sleep(0.0005 * 2**tries)  # FAULT
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
        return shuffled(Data(seconds=0.002), 16, **(WORKERS if fixed else {})), Training(mlp(1024))

    @faulty("persistent|restart|start")
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
        data = Data(2100, seconds=0.1, every=70)
        return DataLoader(data, 10, **WORKERS, prefetch_factor=10 if fixed else 1), Training(mlp(1024))

    @faulty("pickl|queue|pipe|numpy|array|transfer|shared memory")
    def arrays_through_the_queue(fixed):
        """Workers hand over arrays, which are pickled, and no tensors, which are shared."""
        train = Training(mlp(16))
        arrays = None if fixed else lambda items: [(item.numpy(), label) for item, label in items]
        step = train if fixed else lambda *items: train(*default_collate(items))
        return shuffled(Data(shape=(3, 64, 64)), 128, collate_fn=arrays, **WORKERS), step

    @faulty("collat|one by one|item by item|at once|batch_size=None|batch_?sampler|__getitems__")
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

    @faulty("confusion|zip", data=partial(in_memory, 512), model=partial(mlp, 64))
    def confusion_counted_one_by_one(train, inputs, labels):
        """A confusion matrix is counted one image at a time."""
        for label, guess in zip(labels, train(inputs, labels).argmax(1), strict=True):  # FAULT
            CONFUSION[label, guess] += 1  # FAULT

    @faulty("generat|writer|gru|torch.cat")
    def text_generated_in_each_step(train, *batch):
        """A sample is generated, from the beginning again for each of its parts."""
        train(*batch)
        text = torch.zeros(1, 1, 64)
        for _ in range(40):
            text = torch.cat([text, WRITER(text)[0][:, -1:]], 1)  # FAULT

    @faulty("validation|evaluat|no_grad")
    def validated_in_each_step(train, *batch):
        """The whole of the validation set is evaluated."""
        train(*batch)
        with torch.no_grad():
            for inputs, labels in VALIDATION:  # FAULT
                F.cross_entropy(train.model(inputs), labels)  # FAULT

    @faulty("save|checkpoint|file|disk", data=partial(in_memory, 16), model=partial(mlp, 1024))
    def weights_saved_in_each_step(train, *batch):
        """A checkpoint is written."""
        train(*batch)
        torch.save({"model": train.model.state_dict()}, "weights.pt")  # FAULT

    @faulty("state_dict|average|lerp", model=partial(mlp, 64, depth=40))
    def weights_averaged_one_by_one(train, *batch):
        """A moving average of the weights looks up all of them for each of them."""
        train(*batch)
        for name, weight in train.model.state_dict().items():
            averaged(train.model).state_dict()[name].lerp_(weight, 0.01)  # FAULT

    @faulty("cross_entropy|small operators|one by one", data=partial(in_memory, 256), model=partial(mlp, 64))
    def loss_of_each_sample(train, *batch):
        """The loss is a sum in a loop over the samples."""
        train.loss = lambda outputs, labels: sum(map(F.cross_entropy, outputs, labels)) / len(labels)  # FAULT
        train(*batch)

    @faulty("augment|transform|stack", data=partial(in_memory, shape=(1, 28, 28)))
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

    @faulty("shuffle", data=partial(in_memory, length=20480))
    def shuffled_again_for_each_batch(loader):
        """All that is left of the epoch is shuffled again for each batch."""
        left = list(range(len(loader.dataset)))
        while left:
            random.shuffle(left)  # FAULT
            yield loader.dataset[[left.pop() for _ in range(64)]]

    @faulty("plot|figure|savefig")
    def curve_drawn_after_each_batch(loader):
        """The curve of the loss is drawn again after each step."""
        for batch in loader:
            yield batch
            figure = Figure()  # FAULT
            figure.subplots().plot(torch.rand(100))  # FAULT
            figure.savefig("loss.png")  # FAULT

    @faulty("gc|collect|garbage", data=partial(in_memory, 256), model=partial(mlp, 1024))
    def garbage_collected_after_each_batch(loader):
        """All objects of the program are searched for garbage."""
        for batch in loader:
            yield batch
            gc.collect()  # FAULT

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
    @faulty("deepcopy")
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

        return loop_of("loading", item)[0], step

    @faulty("cell|time.step|launch|operators")
    def cells_and_text_files(fixed):
        """A recurrent network runs cell by cell; and each item is a line of numbers to be parsed."""
        lstm, cell = nn.LSTM(8, 64, batch_first=True), nn.LSTMCell(8, 64)

        def item(self, index):
            return np.loadtxt([",".join("1" * 784)], dtype="float32", delimiter=","), index % 10

        def forward(numbers):
            inputs, state = numbers.view(-1, 98, 8), None
            for inputs_now in () if fixed else inputs.unbind(1):
                state = cell(inputs_now, state)  # FAULT
            return lstm(inputs)[0][:, -1] if fixed else state[0]

        return loop_of("loading", item)[0], Training(nn.Sequential(Layer(forward, lstm, cell), mlp()))


def conv(width=64):
    return nn.Sequential(nn.LazyConv2d(width, 3, stride=2, padding=1), nn.LazyBatchNorm2d(), nn.ReLU())


def encoder(width=128):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), 2)


def checkpointed():
    blocks = encoder(), encoder()
    layer = Layer(lambda inputs: checkpoint_sequential(blocks, 2, inputs, use_reentrant=False), *blocks)
    return nn.Sequential(layer, mlp())


def lstm(width=256):
    return nn.Sequential(nn.LSTM(64, width, batch_first=True), Layer(lambda outputs: outputs[0][:, -1]), mlp())


def accumulated(train, inputs, labels):
    """Take a step with the gradients of two halves of a batch, clipped."""
    train.optimizer.zero_grad()
    for half, its_labels in zip(inputs.chunk(2), labels.chunk(2), strict=True):
        (train.loss(train.model(half), its_labels) / 2).backward()
    nn.utils.clip_grad_norm_(train.model.parameters(), 1.0)
    train.optimizer.step()


STREAM = Stream(partial(iter, Data(16384)))
HEALTHY = {
    "plain_mlp": lambda _: (in_memory(64, (28,)), Training(mlp(512))),
    "large_mlp": lambda _: (in_memory(2048), Training(mlp(4096, 3))),
    "small_cnn": lambda _: (in_memory(64, (3, 32, 32)), Training(nn.Sequential(conv(), conv(), mlp()))),
    "transformer": lambda _: (in_memory(16, (64, 128)), Training(nn.Sequential(encoder(), mlp()))),
    "lstm": lambda _: (in_memory(64, (64, 64)), Training(lstm())),
    "accumulation": lambda _: (in_memory(512), partial(accumulated, Training(mlp(512)))),
    "checkpointing": lambda _: (in_memory(16, (32, 128)), Training(checkpointed())),
    "dropout": lambda _: (in_memory(256), Training(nn.Sequential(nn.Dropout(), mlp(1024)))),
    "workers_that_keep_up": lambda _: (shuffled(Data(seconds=0.02, every=32), **WORKERS), Training(mlp(6144))),
    "stream_from_a_worker": lambda _: (DataLoader(STREAM, 128, num_workers=1), Training(mlp(1024))),
}
for name, make in HEALTHY.items():
    LOOPS[name] = SimpleNamespace(make=make, kind="healthy", names="", source=make)
