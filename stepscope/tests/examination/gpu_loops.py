"""Training loops for a GPU: 31 with one fault that a GPU feels, each with its fixed version, and six healthy ones.

A function that `fault` enters returns a loader and a step: of the loop with the fault, or of the fixed one. Lines that
cost the time are marked with FAULT. The sizes are for a card with 40 GB or more; EXAMINE_SMALL=1 makes them small, to
see that every loop ends. See `examine`.
"""

import io
import itertools
import os
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as transforms

SMALL = bool(int(os.environ.get("EXAMINE_SMALL", "0")))
ROUNDS = 1 if SMALL else 3  # of the faulty and the fixed loop, whose shortest steps count
STEPS = 4 if SMALL else 20  # to time in a diagnosis
SIDE = 32 if SMALL else 224
EPOCH = 4 if SMALL else 50  # steps
WORKERS = 2 if SMALL else 8
LOOPS = {}


def fault(names):
    """Enter a loop whose first finding must match `names`."""

    def entered(make):
        LOOPS[make.__name__] = SimpleNamespace(make=partial(_made, make), kind="gpu", names=names, source=make)
        return make

    return entered


def _made(make, fixed):
    """Return a loader and a step, made with PyTorch's settings as a good script has them."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    return make(fixed)


def few(count):
    """Return a number of images or tokens, small if all is small."""
    return max(2, count // 32) if SMALL else count


class Ready:
    """An epoch of one batch that lies on the GPU already, so that nothing is loaded or copied."""

    def __init__(self, images=128, shape=(3, SIDE, SIDE), layout=torch.channels_last, steps=EPOCH):
        inputs = torch.randn(few(images), *shape, device="cuda")
        self.inputs = inputs.contiguous(memory_format=layout) if len(shape) == 3 else inputs
        self.labels, self.steps = torch.arange(len(inputs), device="cuda") % 10, steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        return itertools.repeat((self.inputs, self.labels), self.steps)


class Photos(Dataset):
    """Photos in memory as bytes, or what a function makes of them."""

    def __init__(self, change=None, length=1024, side=SIDE):
        self.bytes = torch.randint(256, (64, 3, side, side), dtype=torch.uint8)
        self.length, self.change = few(length), change

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        photo = self.bytes[index % len(self.bytes)]
        return self.change(photo) if self.change else photo, index % 10


class Training:
    """A plain training step on the GPU; returns the loss and the outputs, which stay there."""

    def __init__(self, model, dtype=torch.bfloat16, layout=torch.channels_last, optimizer=None, blocking=False):
        self.model, self.forward = model.to("cuda", memory_format=layout), model
        self.optimizer = (optimizer or partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True))(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=dtype == torch.float16)
        self.dtype, self.layout, self.loss, self.waits = dtype, layout, F.cross_entropy, blocking

    def __call__(self, inputs, labels):
        inputs, labels = (each.to("cuda", non_blocking=not self.waits) for each in (inputs, labels))
        if inputs.dtype == torch.uint8:
            inputs = (inputs.float() / 127.5 - 1).contiguous(memory_format=self.layout)
        with torch.autocast("cuda", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            outputs = self.forward(inputs)
        loss = self.loss(outputs.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach(), outputs.detach()


def resnet18():
    return torchvision.models.resnet18(num_classes=10)


def resnet50():
    return resnet18() if SMALL else torchvision.models.resnet50(num_classes=10)


def mlp(width=1024, depth=3):
    """Return a network of images of 32 × 32 pixels that takes well under a millisecond of a GPU."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), *layers, nn.Linear(width, 10))


def small_images(images=256):
    return Ready(images, (3, 32, 32))


# Number formats and layouts


@fault("TF32|precision|autocast|bfloat16")
def float32_without_tf32(fixed):
    """All products are computed in float32 to the last bit."""
    if not fixed:
        torch.set_float32_matmul_precision("highest")  # FAULT
        torch.backends.cudnn.allow_tf32 = False  # FAULT
    return Ready(64), Training(resnet50(), None)


@fault("autocast|bfloat16|float16|precision")
def tf32_where_bfloat16_would_do(fixed):
    """A convolutional network trains in TF32, without autocast."""
    return Ready(128), Training(resnet50(), torch.bfloat16 if fixed else None)


@fault("channels_last|layout|memory format")
def contiguous_in_bfloat16(fixed):
    """Images and weights are contiguous, so cuDNN converts them for its kernels."""
    layout = torch.channels_last if fixed else torch.contiguous_format
    return Ready(128, layout=layout), Training(resnet50(), layout=layout)


@fault("norm|float16|compile|memory")
def batch_norm_in_bfloat16(fixed):
    """Batch normalization runs PyTorch's own kernels in bfloat16, and cuDNN's in float16."""
    return Ready(128), Training(resnet50(), torch.float16 if fixed else torch.bfloat16)


@fault("float64|double")
def images_in_float64(fixed):
    """A normalization with numbers of NumPy makes all of the network's work float64."""
    model = resnet18() if fixed else resnet18().double()
    train = Training(model, None)
    return Ready(16), lambda inputs, labels: train(inputs if fixed else inputs.double(), labels)


@fault("elementwise|fus|compile|memory")
def activation_written_out(fixed):
    """GELU is written out in eight operators, each of which reads and writes all activations."""

    class Gelu(nn.Module):
        def forward(self, inputs):
            cubed = inputs * inputs * inputs  # FAULT
            return 0.5 * inputs * (1 + torch.tanh(0.79788456 * (inputs + 0.044715 * cubed)))  # FAULT

    width = 512 if SMALL else 4096
    layers = [(nn.Linear(width, width), nn.GELU(approximate="tanh") if fixed else Gelu()) for _ in range(6)]
    model = nn.Sequential(*itertools.chain(*layers), nn.Linear(width, 10))
    return Ready(8192, (width,)), Training(model, layout=torch.contiguous_format)


@fault("attention|softmax|scaled_dot|memory")
def attention_written_out(fixed):
    """The matrix of all pairs of tokens is written to memory, and read for its softmax."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.head = nn.Linear(512, 3 * 512), nn.Linear(512, 10)

        def forward(self, tokens):
            heads = self.project(tokens).view(*tokens.shape[:2], 3, 8, 64).permute(2, 0, 3, 1, 4)
            query, key, value = heads.unbind(0)
            if fixed:
                found = F.scaled_dot_product_attention(query, key, value)
            else:
                found = (query @ key.mT / 8).softmax(-1) @ value  # FAULT
            return self.head(found.transpose(1, 2).flatten(2).mean(1))

    return Ready(64, (few(1024), 512)), Training(Attention(), layout=torch.contiguous_format)


@fault("determin|benchmark")
def deterministic_algorithms(fixed):
    """Left on from a search for a difference: gradients of gathered rows are then sorted before they are added."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS refuses
    torch.use_deterministic_algorithms(not fixed)
    table = nn.Embedding(1000, 256)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = table, nn.Linear(256, 10)

        def forward(self, numbers):
            words = (numbers.abs() * 100).long()
            return self.head(self.table.weight[words].mean(1))

    return Ready(2048, (128,)), Training(Words(), layout=torch.contiguous_format)


# Launches


@fault("launch|graph|small|kernel")
def many_small_kernels(fixed):
    """Sixteen images keep the GPU busy for less time than their kernels take to launch."""
    loader, train = Ready(16, (3, 32, 32)), Training(resnet50())
    if not fixed:
        return loader, train
    return loader, in_a_graph(train, loader)


def in_a_graph(train, loader):
    """Return a step that replays one CUDA graph of `train`, whose loader yields the same tensors again and again."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(loader.inputs, loader.labels)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        train(loader.inputs, loader.labels)
    return lambda inputs, labels: graph.replay()


@fault("optimizer|fused|foreach")
def weights_updated_one_by_one(fixed):
    """AdamW launches a dozen kernels for each of the weights."""
    optimizer = partial(torch.optim.AdamW, lr=1e-4, **{"fused": True} if fixed else {"foreach": False})
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), *[nn.Linear(256, 256) for _ in range(100)])
    return small_images(), Training(model, optimizer=optimizer)


@fault("average|lerp|small operators|launch|one by one")
def weights_averaged_one_by_one(fixed):
    """A moving average launches a kernel or two for each of the weights."""
    train = Training(resnet50())
    averages = [weight.detach().clone() for weight in train.model.parameters()]

    def step(inputs, labels):
        train(inputs, labels)
        with torch.no_grad():
            weights = list(train.model.parameters())
            if fixed:
                torch._foreach_lerp_(averages, weights, 0.01)
            else:
                for average, weight in zip(averages, weights, strict=True):
                    average.mul_(0.99).add_(weight, alpha=0.01)  # FAULT

    return small_images(64), step


@fault("augment|flip|crop|one by one|small operators|launch|stack")
def images_augmented_one_by_one(fixed):
    """Each image of a batch is flipped and shifted by itself, on the GPU."""
    train = Training(mlp())

    def augmented(image):
        image = transforms.horizontal_flip(image) if np.random.rand() < 0.5 else image  # FAULT
        return torch.roll(image, tuple(np.random.randint(-4, 5, 2)), (1, 2))  # FAULT

    def step(images, labels):
        if fixed:
            flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.roll(torch.where(flipped, images.flip(3), images), (2, 2), (2, 3))
        else:
            images = torch.stack([augmented(image) for image in images])  # FAULT
        train(images, labels)

    return small_images(), step


@fault("cross_entropy|one by one|small operators|launch")
def loss_of_each_sample(fixed):
    """The loss is a sum in a loop over the samples."""
    train = Training(mlp())
    if not fixed:
        train.loss = lambda outputs, labels: sum(map(F.cross_entropy, outputs, labels)) / len(labels)  # FAULT
    return small_images(64), train


# Waiting for the GPU


def logged(values):
    """Write a line, as a logger does; returns after about 2 ms of the host's work."""
    end = time.perf_counter() + 2e-3
    with open("log.txt", "a", encoding="utf-8") as file:
        while time.perf_counter() < end:
            text = f"{values}"
        file.write(text + "\n")


@fault(r"item|synchron|\.cpu|wait")
def loss_asked_for_in_each_step(fixed):
    """The host reads the loss, and only then prepares its log and the next step's launches."""
    train, last = Training(resnet18()), [0.0]

    def step(inputs, labels):
        loss, _ = train(inputs, labels)
        if not fixed:
            last[0] = loss.item()  # FAULT
        logged(last)

    return Ready(64), step


@fault(r"item|synchron|norm|wait|one by one")
def gradient_norms_read_one_by_one(fixed):
    """The norm of each weight is read by itself, so the host waits sixty times in a step."""
    train = Training(resnet18())

    def step(inputs, labels):
        train(inputs, labels)
        if not fixed:
            logged([weight.norm().item() for weight in train.model.parameters()])  # FAULT
        else:
            logged([0.0])

    return Ready(32), step


@fault(r"mask|nonzero|index|synchron|item|wait")
def loss_of_masked_pixels(fixed):
    """Indexing with a boolean mask asks the GPU how many pixels are in it."""
    model = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1) for i in range(8)), nn.Conv2d(64, 2, 1))
    train = Training(model)

    def loss(outputs, labels):
        target = labels[:, None, None] % 2 + torch.zeros_like(outputs[:, 0], dtype=torch.long)
        mask = outputs[:, 0] > outputs[:, 0].mean()
        if fixed:
            return (F.cross_entropy(outputs, target, reduction="none") * mask).sum() / mask.sum()
        outputs = outputs.permute(0, 2, 3, 1)
        return F.cross_entropy(outputs[mask], target[mask])  # FAULT

    train.loss = loss

    def step(inputs, labels):
        train(inputs, labels)
        logged([0.0])

    return Ready(32, (3, SIDE // 2, SIDE // 2)), step


@fault(r"cpu|copy|copies|transfer|synchron|item|wait")
def outputs_copied_to_the_host(fixed):
    """All outputs of each step go to the host, to be counted there at the end of the epoch."""
    convolutions = [nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1) for i in range(4)]
    train, kept = Training(nn.Sequential(*convolutions, nn.Conv2d(64, 10, 1))), []
    train.loss = lambda outputs, labels: outputs.square().mean()

    def step(inputs, labels):
        _, outputs = train(inputs, labels)
        kept.append(outputs.mean((2, 3)) if fixed else outputs.cpu())  # FAULT
        del kept[:-2]

    return Ready(32), step


@fault("synchron|wait")
def synchronized_in_each_phase(fixed):
    """Left from a measurement: the host waits for the GPU before it goes on with its own work."""
    train = Training(resnet18())

    def step(inputs, labels):
        train(inputs, labels)
        if not fixed:
            torch.cuda.synchronize()  # FAULT
        logged([0.0])

    return Ready(64), step


@fault(r"metric|confusion|item|synchron|wait")
def classes_counted_one_by_one(fixed):
    """The hits of each class are counted by themselves, and read as numbers."""
    train, hits = Training(resnet18()), np.zeros(10)

    def step(inputs, labels):
        _, outputs = train(inputs, labels)
        found = outputs.argmax(1)
        for number in () if fixed else range(10):
            hits[number] += ((found == number) & (labels == number)).sum().item()  # FAULT
        logged([0.0])

    return Ready(32), step


@fault("save|checkpoint|state_dict")
def weights_saved_in_each_step(fixed):
    """A checkpoint is written after each step."""
    train = Training(resnet18())

    def step(inputs, labels):
        train(inputs, labels)
        if not fixed:
            torch.save(train.model.state_dict(), "weights.pt")  # FAULT

    return Ready(64), step


@fault("validation|evaluat|no_grad")
def validated_in_each_step(fixed):
    """A part of the validation set is evaluated after each step."""
    train, validation = Training(resnet18()), list(Ready(128, steps=4))

    def step(inputs, labels):
        train(inputs, labels)
        for images, _ in () if fixed else validation:
            with torch.no_grad():
                train.model(images)  # FAULT

    return Ready(128), step


@fault("anomaly")
def anomaly_detection(fixed):
    """Left on from the search for a NaN."""
    torch.autograd.set_detect_anomaly(not fixed)
    return small_images(64), Training(resnet18())


@fault(r"host|python|sleep|other work|gpu_loops\.py")
def schedule_computed_in_python(fixed):
    """Between two steps the host computes for longer than the GPU does."""
    train = Training(resnet18())

    def step(inputs, labels):
        train(inputs, labels)
        for _ in () if fixed else range(5):
            sorted(range(100_000), key=lambda number: -number)  # FAULT

    return Ready(32), step


@fault("constant|tensor|copy|copies|pin|synchron|wait")
def weights_of_classes_made_in_each_step(fixed):
    """The weights of all classes are made of a list, and copied from pageable memory, in each step."""
    train, numbers = Training(resnet18()), [1.0 + i % 7 for i in range(200_000)]
    made = torch.tensor(numbers, device="cuda")

    def step(inputs, labels):
        weights = made if fixed else torch.tensor(numbers, device="cuda")  # FAULT
        train.loss = lambda outputs, labels: F.cross_entropy(outputs, labels, weight=weights[:10])
        train(inputs, labels)

    return Ready(32), step


@fault("memory|retr|allocator|alloc")
def memory_nearly_full(fixed):
    """Batches of other sizes do not fit into what the allocator keeps: it gives all back to CUDA, again and again."""
    train = Training(resnet50())
    sizes = itertools.cycle([few(256), few(192), few(224), few(160)])
    batch = torch.randn(few(256), 3, SIDE, SIDE, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(len(batch), dtype=torch.long, device="cuda")
    train(batch, labels)
    needed = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    if not (fixed or SMALL):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1.15 * needed / total))  # a card of that size

    def step(_):
        size = next(sizes)
        train(batch[:size], labels[:size])

    return [torch.zeros(1)] * EPOCH, step


# Loading, and copies to the GPU


def as_floats(photo):
    return photo.float() / 127.5 - 1


@fault("uint8|bytes|normaliz|float32|copies|copy|transfer")
def photos_copied_as_float32(fixed):
    """Photos are normalized in the workers, and copied to the GPU in four times as many bytes."""
    photos = Photos(None if fixed else as_floats)
    loader = DataLoader(photos, few(256), num_workers=WORKERS, pin_memory=True, persistent_workers=True)
    return loader, Training(mlp_of_photos())


def mlp_of_photos():
    """Return a network that reads photos in a large step, so that it takes little of a GPU."""
    return nn.Sequential(nn.Conv2d(3, 16, 16, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Pageable:
    """Batches of photos that are in the host's memory already, pinned or not."""

    def __init__(self, pinned, images=256, steps=EPOCH):
        photos = torch.randn(few(images), 3, SIDE, SIDE)
        self.photos, self.steps = photos.pin_memory() if pinned else photos, steps
        self.labels = (torch.arange(len(photos)) % 10).pin_memory()

    def __len__(self):
        return self.steps

    def __iter__(self):
        return itertools.repeat((self.photos, self.labels), self.steps)


@fault("pin|pageable|copies|copy|transfer")
def pageable_copies(fixed):
    """Batches are copied to the GPU from memory that is not pinned."""
    return Pageable(fixed), Training(mlp_of_photos())


@fault("non_blocking|overlap|pin|copies|copy|transfer|synchron|wait")
def copies_that_the_host_waits_for(fixed):
    """The host waits for each copy, and launches nothing meanwhile."""
    train = Training(resnet18(), blocking=not fixed)

    def step(inputs, labels):
        train(inputs, labels)
        logged([0.0])

    return Pageable(True, 128), step


JPEG = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).resize((320, 320)).save(JPEG, "JPEG")


def decoded(_):
    image = Image.open(io.BytesIO(JPEG.getvalue())).convert("RGB").resize((SIDE, SIDE))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@fault("worker")
def no_workers(fixed):
    """Photos are decoded in the training's own process."""
    workers = {"num_workers": WORKERS, "persistent_workers": True} if fixed else {}
    return DataLoader(Photos(decoded), few(64), pin_memory=True, **workers), Training(resnet18())


@fault("restart|persistent|start")
def workers_started_in_each_epoch(fixed):
    """Epochs of four batches start their workers anew."""
    photos = Photos()
    photos.length = 4 * few(128)
    loader = DataLoader(photos, few(128), num_workers=WORKERS, pin_memory=True, persistent_workers=fixed)
    return loader, Training(resnet18())


class SlowWhere(Dataset):
    """Photos of which one in `every` comes from a storage that takes a while."""

    def __init__(self, every, seconds):
        self.photos, self.every, self.seconds = Photos(), every, seconds

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        if self.seconds and index // few(64) % self.every == 0:
            time.sleep(self.seconds)  # FAULT
        return self.photos[index]


@fault(r"sleep|slow|item|worker|__getitem__")
def one_slow_worker(fixed):
    """All batches of one worker come late, and all others wait behind them, in order."""
    photos = SlowWhere(WORKERS, 0.0 if fixed else 0.01)
    loader = DataLoader(photos, few(64), num_workers=WORKERS, pin_memory=True, persistent_workers=True)
    return loader, Training(resnet18())


def _healthy():
    """Return the healthy loops: three networks whose batches are on the GPU, and the same fed by workers."""

    def loaded(images, side=SIDE):
        settings = {"num_workers": WORKERS, "pin_memory": True, "persistent_workers": True}
        return DataLoader(Photos(side=side, length=32 * images), few(images), drop_last=True, **settings)

    def compiled(model):
        train = Training(model)
        train.forward = torch.compile(train.model)
        return train

    def vit():
        return torchvision.models.VisionTransformer(SIDE, 16, 6, 6, 384, 1536, num_classes=10)

    def graph():
        loader = Ready(256, (3, 32, 32))
        return loader, in_a_graph(Training(mlp(4096, 6)), loader)

    return {
        "resnet50_compiled": lambda _: (Ready(128), compiled(resnet50())),
        "transformer_compiled": lambda _: (Ready(128), compiled(vit())),
        "small_network_as_a_graph": lambda _: graph(),
        "resnet50_fed_by_workers": lambda _: (loaded(128), compiled(resnet50())),
        "transformer_fed_by_workers": lambda _: (loaded(128), compiled(vit())),
        "network_fed_by_workers": lambda _: (loaded(256), Training(resnet18(), torch.float16)),
    }


for name, make in _healthy().items():
    LOOPS[name] = SimpleNamespace(make=partial(_made, make), kind="healthy gpu", names="", source=make)


def mean_step(loader, step, least_s=0.8):
    """Return the mean duration of a warm step in s, of whole epochs; the GPU is waited for before and after them."""

    def seconds(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            step(*batch) if isinstance(batch, tuple | list) else step(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    batches, epoch = itertools.chain.from_iterable(itertools.repeat(loader)), len(loader)
    seconds(4)  # compiles, and each size of a batch is met
    return seconds(epoch * max(1, round(least_s / seconds(4) / epoch)))


def write_files():
    """Write nothing: the datasets of these loops read no files."""
