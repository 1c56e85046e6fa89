"""Runs scripts that are not ours under ``stepscope run``, as they are and with a fault planted; prints what was found.

    python stepscope/tests/examination/scripts.py FOLDER [--only NAME …] [--record]

The scripts are fetched from GitHub into FOLDER/sources, unless they are there; their data are drawn, and the packages
that they need are installed into FOLDER/site-packages. Without and with a fault, a script runs twice in turn; the true
gain is how much shorter the shortest mean step is without the fault. `--record` keeps facts and gains beside those of
`examine`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import examine
import numpy as np
from PIL import Image

from stepscope.facts import saving

FETCHED = {  # repositories, each with the commit or the tag of which the scripts are
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "pytorch/vision": "bde124ee2f3419fe31ad79c858af40206e8bf792",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "huggingface/transformers": "v5.24.0",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
}
NEEDED = ["huggingface_hub", "safetensors", "lightning==2.6.6", "jsonargparse[signatures]", "tiktoken"]
NEEDED += ["transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"]
OURS = ["torch", "torchvision", "numpy", "psutil", "filelock", "nvidia-ml-py"]  # here already: not to be had twice
GITHUB = "https://github.com"
MARK = "# planted"


@dataclass(frozen=True)
class Script:
    """A training script in a repository, with the data that it reads and the arguments with which it runs here."""

    name: str
    repository: str
    path: str
    data: Callable[[Path], object]  # draws them into the folder above that of the script
    arguments: str = ""
    beside: tuple[str, ...] = ()  # other files of the repository that it needs


@dataclass(frozen=True)
class Fault:
    """A fault of one kind in a script: what is replaced by what (`edits`), and with which arguments it runs then.

    Where no line of the script is at fault, the first finding has one of the `names`. It is measured against the script
    with `fixed` replaced instead; `both` is replaced in both.
    """

    kind: str
    script: str
    edits: tuple[tuple[str, str], ...] = ()
    arguments: str = ""
    names: tuple[str, ...] = ()
    both: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()


def digits(folder: Path, count: int = 8_000) -> None:
    """Write images and labels in the format of MNIST."""
    raw, generator = folder / "data" / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    (folder / "script" / "results").mkdir()  # where one of the scripts writes
    for part, number in (("train", count), ("t10k", 1_000)):
        images, labels = generator.integers(0, 256, (number, 28, 28)), generator.integers(0, 10, number)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = np.array([2048 + values.ndim, *values.shape], dtype=">i4").tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(head + values.astype(np.uint8).tobytes())


def photos(folder: Path, edge: int = 300) -> None:
    """Write photos as an `ImageFolder` reads them."""
    generator = np.random.default_rng(0)
    shutil.rmtree(folder / "photos", ignore_errors=True)
    for number in range(640):
        place = folder / "photos" / ("train" if number < 600 else "val") / f"class{number % 5}"
        place.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        small.resize((edge, edge), Image.Resampling.BICUBIC).save(place / f"{number}.jpg")


def letters(folder: Path) -> None:
    """Write a text as nanoGPT reads it, which looks for it beside the script."""
    place = folder / "script" / "data" / "drawn"
    place.mkdir(parents=True)
    for part in ("train", "val"):
        np.random.default_rng(0).integers(0, 65, 200_000).astype(np.uint16).tofile(place / f"{part}.bin")


def lightning_digits(folder: Path) -> None:
    """Write MNIST where an example of Lightning looks for it."""
    digits(folder, 60_000)
    for place in (folder.parent / "Datasets", folder / "script" / "data"):
        place.unlink(missing_ok=True)
        place.symlink_to(folder / "data")


EXAMPLES = "pytorch/examples"
SCRIPTS = (
    Script("mnist", EXAMPLES, "mnist/main.py", digits, "--no-accel --epochs 1"),
    Script("mnist_rnn", EXAMPLES, "mnist_rnn/main.py", digits, "--epochs 1"),
    Script("siamese", EXAMPLES, "siamese_network/main.py", digits, "--no-accel --epochs 1 --batch-size 8"),
    Script("vae", EXAMPLES, "vae/main.py", digits, "--no-accel --epochs 2"),
    Script(
        "imagenet", EXAMPLES, "imagenet/main.py", photos,
        "--no-accel -a squeezenet1_1 -b 8 -j 2 --epochs 1 ../photos",
    ),
    Script(
        "timm", "huggingface/pytorch-image-models", "train.py", photos,
        "--data-dir ../photos --model resnet10t.c3_in1k --num-classes 5 --device cpu -b 8 -j 2 --epochs 1 "
        "--no-prefetcher --img-size 160",
        ("timm",),
    ),
    Script(
        "nanoGPT", "karpathy/nanoGPT", "train.py", letters,
        "--device=cpu --compile=False --dataset=drawn --n_layer=3 --n_head=4 --n_embd=128 --block_size=64 "
        "--batch_size=12 --gradient_accumulation_steps=2 --max_iters=200 --eval_iters=20",
        ("model.py", "configurator.py"),
    ),
    Script(
        "Lightning", "Lightning-AI/pytorch-lightning", "examples/pytorch/basics/autoencoder.py", lightning_digits,
        "--trainer.max_epochs=1 --trainer.accelerator=cpu",
    ),
    Script(
        "torchvision", "pytorch/vision", "references/classification/train.py", photos,
        "--data-path ../photos --model squeezenet1_1 --device cpu -b 8 -j 2 --epochs 1 --lr 0.001 "
        "--train-crop-size 128",
        tuple(f"references/classification/{name}.py" for name in ("presets", "sampler", "transforms", "utils")),
    ),
    Script(
        "Trainer", "huggingface/transformers", "examples/pytorch/image-pretraining/run_mae.py", photos,
        "--dataset_name imagefolder --train_dir ../photos/train/** --remove_unused_columns False --do_train --use_cpu "
        "--config_overrides hidden_size=96,num_hidden_layers=2,intermediate_size=192,decoder_hidden_size=96,"
        "decoder_num_hidden_layers=1,decoder_intermediate_size=192 --output_dir out --cache_dir cache "
        "--per_device_train_batch_size 8 --dataloader_num_workers 2 --num_train_epochs 1",
    ),
)  # fmt: skip

TRAINS = "        optimizer.step()\n"
TESTS = "        test(model, device, test_loader)\n"
NO_WORKERS = "kwargs = {'num_workers': 1, 'pin_memory': True} if use_accel else {}"
WORKERS = "'num_workers': 2, 'persistent_workers': True"
MEASURED = "measured = [(each.mean().item(), each.std().item(), each.norm().item()) for each in recon_batch]"
LOGS = "print({name: each.tolist() for name, each in model.named_parameters()}, file=open('log.txt', 'w'))"
SAVES = "torch.save([model.state_dict(), optimizer.state_dict()], 'checkpoint.pt')"
QUANTILES = "quantiles = [each.grad.abs().quantile(0.99).item() for each in model.parameters()]"
ENERGY = "energies = [sum(value * value for value in image.tobytes()) for image in examples[image_column_name]]"
RESIZE = """                transforms.Resize(1200),
                transforms.RandomResizedCrop(224),
"""
COLLATE = """def collate(items):
    images = [[[[float(each) for each in row] for row in image[0]]] for image, _ in items]  # planted
    return torch.tensor(images), torch.tensor([label for _, label in items])  # planted


def train("""
STORED = """
class MNIST(datasets.MNIST):
    def __getitem__(self, index):
        import time
        time.sleep(0.004)
        return super().__getitem__(index)


def train("""
FAULTS = (
    Fault(
        "as it is", "mnist", names=("transforms of each image",),
        fixed=(("DataLoader(dataset1,", "DataLoader(list(dataset1),"),),
    ),
    Fault(
        "as it is", "mnist_rnn", names=("transforms of each image",),
        fixed=(
            ("DataLoader(\n        datasets.MNIST(", "DataLoader(\n        list(datasets.MNIST("),
            ("])),\n        batch_size", "]))),\n        batch_size"),
        ),
    ),
    Fault(
        "as it is", "vae", names=("transforms of each image",),
        fixed=(
            ("DataLoader(\n    datasets.MNIST(", "DataLoader(\n    list(datasets.MNIST("),
            ("ToTensor()),\n    batch_size", "ToTensor())),\n    batch_size"),
        ),
    ),
    Fault(
        "slow items", "siamese",
        ((
            "        return image_1, image_2, target\n",
            "        for _ in range(20):\n"
            "            image_1 = torch.tensor([[[float(each) for each in row] for row in image_1[0]]])  # planted\n"
            "        return image_1, image_2, target\n",
        ),),
    ),
    Fault(
        "slow collating", "mnist",
        (
            ("def train(", COLLATE),
            ("DataLoader(dataset1,**train_kwargs)", "DataLoader(dataset1, collate_fn=collate, **train_kwargs)"),
        ),
    ),
    Fault("decoding of large images", "imagenet", names=("decoding at every read",)),
    Fault(
        "resizing of large images", "imagenet",
        (("                transforms.RandomResizedCrop(224),\n", RESIZE),), names=("resizing at every read",),
    ),
    Fault(
        "too few workers", "mnist", (("train_kwargs = {", "train_kwargs = {'num_workers': 1, "),),
        names=("too few workers", "items that wait"),
        both=(("\ndef train(", STORED), ("datasets.MNIST('../data', train=True", "MNIST('../data', train=True")),
        fixed=(("train_kwargs = {", "train_kwargs = {'num_workers': 8, "),),
    ),
    Fault(
        "too many workers", "mnist", (("train_kwargs = {", "train_kwargs = {'num_workers': 24, "),), "--epochs 4",
        names=("too many workers", "workers slower than none"),
        fixed=(("train_kwargs = {", "train_kwargs = {'num_workers': 1, "),),
    ),
    Fault(
        "workers restarted", "vae", ((NO_WORKERS, "kwargs = {'num_workers': 2}"),), "--epochs 10",
        names=("workers restarted every epoch",),
        both=(
            ("ToTensor()),\n    batch_size=args.batch_size, shuffle=True",
             "ToTensor()),\n    sampler=range(2560), batch_size=args.batch_size"),
            ("        test(epoch)\n", ""),
        ),
        fixed=((NO_WORKERS, f"kwargs = {{{WORKERS}}}"),),
    ),
    Fault("`.item()` in a loop", "vae", ((TRAINS, f"{TRAINS}        {MEASURED}  # planted\n"),)),
    Fault("quantiles of gradients", "torchvision", ((TRAINS, f"{TRAINS}        {QUANTILES}  # planted\n"),)),
    Fault("slow transform", "Trainer", (("        examples[", f"        {ENERGY}  # planted\n        examples["),)),
    Fault("logging", "vae", ((TRAINS, f"{TRAINS}        {LOGS}  # planted\n"),)),
    Fault("checkpoint in each step", "mnist", ((TRAINS, f"{TRAINS}        {SAVES}  # planted\n"),)),
    Fault(
        "evaluation too often", "nanoGPT",
        (("        losses = estimate_loss()\n", "        losses = estimate_loss()  # planted\n"),), "--eval_interval=5",
    ),
    Fault(
        "evaluation after short epochs", "mnist", arguments="--epochs 30", names=("work between the epochs",),
        both=(("DataLoader(dataset1,**train_kwargs)", "DataLoader(dataset1, sampler=range(640), **train_kwargs)"),),
        fixed=((TESTS, ""),),
    ),
)  # fmt: skip


class Examination:
    """Runs scripts in a folder."""

    def __init__(self, folder: Path, install: bool = True):
        self.folder = folder.absolute()
        self.environment = os.environ | {"PYTHONPATH": str(self.folder / "site-packages"), "CUDA_VISIBLE_DEVICES": ""}
        if install and not (self.folder / "site-packages").exists():
            self._install()

    def _install(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        without = self.folder / "without.txt"
        without.write_text("\n".join(f'{name}; sys_platform == "never"' for name in OURS))
        uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", sys.executable]
        subprocess.run([*uv, "--target", self.folder / "site-packages", "--overrides", without, *NEEDED], check=True)

    def _source(self, repository: str) -> Path:
        clone = self.folder / "sources" / repository.replace("/", "+")
        if not clone.exists():
            new = clone.with_suffix(".new")
            fetch = ["fetch", "--quiet", "--depth", "1", f"{GITHUB}/{repository}", FETCHED[repository]]
            subprocess.run(["git", "init", "--quiet", new], check=True)
            for command in (fetch, ["checkout", "--quiet", "FETCH_HEAD"]):
                subprocess.run(["git", "-C", new, *command], check=True)
            new.rename(clone)
        return clone

    def placed(self, script: Script, edits: tuple[tuple[str, str], ...] = (), variant: str = "") -> Path:
        """Return the script in a folder of its own, edited, with its data."""
        place = self.folder / "runs" / f"{script.name}{variant}"
        shutil.rmtree(place, ignore_errors=True)
        (place / "script").mkdir(parents=True)
        source = self._source(script.repository)
        for name in script.beside:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copy
            copy(source / name, place / "script" / Path(name).name)
        text = (source / script.path).read_text()
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{script.path} of {script.repository} has changed: there is no {old!r} in it.")
            text = text.replace(old, new, 1)
        path = place / "script" / Path(script.path).name
        path.write_text(text)
        script.data(place)
        return path

    def diagnosed(self, path: Path, arguments: str) -> dict:
        """Return the result of a script, with diagnosis and facts; raises RuntimeError if there is none."""
        command = [path.name, *arguments.split()]
        return examine.watched(sys.executable, command, cwd=path.parent, env=self.environment)[0]


def record_of(name: str, path: Path, found: dict, fault: Fault | None = None) -> dict:
    """Return the record of a script, as `examine` keeps it; without a fault the script is healthy."""
    lines = [number for number, text in enumerate(path.read_text().splitlines(), 1) if MARK in text]
    return {
        "name": f"{name} in a published script",
        "kind": "healthy scripts" if fault is None else "scripts",
        "names": "|".join(map(re.escape, fault.names)) if fault else "",
        "lines": [f"{path.name}:{number}" for number in lines],
        "version": saving.VERSION,
        "facts": found["facts"],
    }


def main() -> None:
    """Examine the scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    examination, scripts = Examination(options.folder), {each.name: each for each in SCRIPTS}

    def wanted(*names: str) -> bool:
        return options.only is None or not {*names}.isdisjoint(options.only)

    def show(record: dict) -> None:
        print(json.dumps(examine.judged({"machine": "here"} | record)), flush=True)
        if options.record:
            examine.keep(record)

    for script in SCRIPTS:
        if wanted(script.name) and not any(each.kind == "as it is" and each.script == script.name for each in FAULTS):
            path = examination.placed(script)
            show(record_of(script.name, path, examination.diagnosed(path, script.arguments)))
    for fault in FAULTS:
        if not wanted(fault.kind, fault.script):
            continue
        script = scripts[fault.script]
        without = examination.placed(script, fault.both + fault.fixed, "-without")
        path = examination.placed(script, fault.both + fault.edits)
        if fault.kind.startswith("decoding"):
            photos(path.parent.parent, 1600)
        arguments = f"{script.arguments} {fault.arguments}"
        others = arguments if fault.fixed else script.arguments
        rounds = [(examination.diagnosed(path, arguments), examination.diagnosed(without, others)) for _ in range(2)]
        truth = examine.gain_of([[found["diagnosis"]["step_ms"] for found in each] for each in rounds])
        show(record_of(f"{fault.kind}, {fault.script}", path, rounds[-1][0], fault) | truth)


if __name__ == "__main__":
    main()
