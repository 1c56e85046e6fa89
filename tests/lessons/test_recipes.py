"""The files that readers take home, run as they would run them: without the rest of the course."""

import ast
import contextlib
import functools
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import types
import weakref
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from support.notebooks import NOTEBOOKS, content

from helpers import config

FOLDER = config.PROJECT / "notebooks"
ALLOWED = {"numpy", "torch", "torchvision", "PIL", "soundfile", "recipes"} | sys.stdlib_module_names


@pytest.fixture
def recipes(monkeypatch):
    """The module, as a script beside it imports it."""
    monkeypatch.syspath_prepend(FOLDER)
    yield __import__("recipes")
    for name in ("recipes", "train_photos", "train_clips", "train_cifar10"):
        sys.modules.pop(name, None)


@pytest.fixture
def script(recipes, monkeypatch):
    """`train_photos`, with small images and a small network."""
    module = __import__("train_photos")
    monkeypatch.setattr(module, "STORED", 40)
    monkeypatch.setattr(module, "SIDE", 32)
    small = lambda num_classes, **_: torch.nn.Sequential(  # noqa: E731
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(8, num_classes),
    )  # fmt: skip
    monkeypatch.setattr(module.torchvision.models, "resnet50", small)
    return module


def write_photos(folder, classes, of_each, side=(60, 48)):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for photo in range(of_each):
            pixels = np.full((*side, 3), (80 * number, 200 - 20 * photo, 100), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{photo}.png")


@pytest.mark.parametrize(
    "name", ["recipes.py", "train_photos.py", "train_clips.py", "train_cifar10.py", "train_ddp.py"]
)
def test_nothing_of_the_course_is_imported(name):
    tree = ast.parse((FOLDER / name).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in imported} <= ALLOWED


def test_a_data_set_on_the_device_gives_each_image_once(recipes):
    batches = list(recipes.batches_on_device(torch.arange(10), torch.arange(10) * 2, 4))
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert [len(batch) for batch, _ in batches] == [4, 4]
    assert len(images.unique()) == 8 and torch.equal(labels, images * 2)


@functools.cache
def function_of_06(name):
    """A function as a cell has it."""
    cells = content(NOTEBOOKS[6]).cells
    (source,) = (cell.source for cell in cells if cell.cell_type == "code" and f"\ndef {name}(" in cell.source)
    (function,) = (each for each in ast.parse(source).body if getattr(each, "name", "") == name)
    exec(ast.unparse(function), names := {"np": np})
    return names[name]


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 400))
@example([0, 3, 0, 0, 2, 0], 1)
@example([0], 400)
def test_tokens_packed_as_in_06_come_once_each_and_in_order(lengths, block):
    starts, tokens = np.cumsum([0, *lengths]), np.arange(sum(lengths), dtype=np.uint16)
    blocks, padding = function_of_06("in_blocks")(tokens, starts, block, end=999)
    documents = np.split(tokens, starts[1:-1]) if lengths else []
    row = [token for document in documents for token in (*document, 999)]
    assert blocks.shape[1] == block and blocks.dtype == np.uint16 and 0 <= padding < block
    assert blocks.ravel().tolist() == row + [999] * padding


@pytest.mark.slow
def test_the_recipes_run_as_they_are_in_another_folder(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, str(FOLDER / "recipes.py")], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    assert "items/s of a list" in process.stdout and "workers" in process.stdout
    assert "compiled: 0." in process.stdout or "compiled: 1." in process.stdout


def test_a_photo_is_turned_upright_and_cut_but_never_squashed(recipes, tmp_path):
    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[:, 30:90] = 255  # the middle: a square
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "a.png", exif=exif)
    resized = recipes.resize(tmp_path / "a.png", 30)
    assert resized.size == (30, 30) and np.asarray(resized).min() > 200  # but for the edge


def test_photos_of_equal_names_are_all_copied_and_a_damaged_one_is_said_and_left_out(recipes, tmp_path, capsys):
    paths = [tmp_path / kind / f"1.{ending}" for kind in ("ant", "bee") for ending in ("png", "jpg", "JPG")]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (80, 60), (40 * number, 0, 0)).save(path)
    before = paths[2].read_bytes()
    paths[1].write_bytes(paths[1].read_bytes()[:-30])
    resized = recipes.resize_all(paths, 32, tmp_path)
    assert f"Left out: {paths[1]}: " in capsys.readouterr().out and paths[2].read_bytes() == before
    images, labels = zip(*recipes.Copies(resized, ["ant", "bee"]), strict=True)
    assert labels == (0, 0, 1, 1, 1) and {image.shape for image in images} == {(3, 32, 32)}
    assert [image[0].float().mean() for image in images] == pytest.approx([0, 80, 120, 160, 200], abs=3)
    once = [path.stat().st_mtime_ns for path in resized]
    os.utime(paths[0], ns=(once[0] + 1, once[0] + 1))
    assert recipes.resize_all(paths, 32, tmp_path) == resized
    assert [path.stat().st_mtime_ns == before for path, before in zip(resized, once, strict=True)] == [
        False,
        *4 * [True],
    ]
    assert recipes.resize_all(paths[:1], 16, tmp_path) != resized[:1]
    (tmp_path / "val").mkdir()
    other = paths[5].parent.rename(tmp_path / "val" / "bee") / paths[5].name  # as in another set of photos
    assert recipes.resize_all([other], 32, tmp_path)[0] not in resized


def test_a_pack_is_whole_or_not_there(recipes, tmp_path):
    with pytest.raises(ValueError):
        recipes.pack([Image.new("RGB", (8, 8))], 2, 8, tmp_path / "images.npy")
    assert not (tmp_path / "images.npy").exists()
    assert recipes.pack([None, Image.new("RGB", (8, 8))], 2, 8, tmp_path / "images.npy") == [1]


def test_photos_are_packed_once_and_again_if_they_change(recipes, tmp_path, monkeypatch, capsys):
    write_photos(tmp_path, ["ant"], 3)
    paths, packed = sorted((tmp_path / "ant").iterdir()), tmp_path / "images.npy"
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    assert recipes.pack_photos(paths, 8, packed) == [0, 2] and f"Left out: {paths[1]}: " in capsys.readouterr().out
    assert recipes.pack_photos(paths, 8, packed) == [0, 2] and capsys.readouterr().out == ""
    paths[1].unlink()
    with pytest.raises(FileNotFoundError):
        recipes.resized_if_whole(paths[1], 8)
    assert recipes.pack_photos(paths[2:], 4, packed) == [0] and np.load(packed).shape == (1, 3, 4, 4)
    assert recipes.pack_photos(paths[2:], 8, packed) == [0] and np.load(packed).shape == (1, 3, 8, 8)
    monkeypatch.setattr(recipes.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=100))
    with pytest.raises(OSError, match="expected 576 bytes of space, found 100"):
        recipes.pack_photos([paths[0], paths[2], paths[0]], 8, packed)
    assert len(np.load(packed)) == 1


def test_a_photo_with_a_name_in_another_encoding_belongs_to_a_part(recipes, tmp_path):
    assert recipes.held_out(tmp_path / "caf\udce9.jpg", share=1) and not recipes.held_out(tmp_path / "a.jpg", share=0)


def test_a_loader_without_a_batch_is_an_error_and_no_endless_loop(recipes):
    with pytest.raises(ValueError, match="no batch"):
        recipes.best_workers(lambda workers: recipes.loader_of([1, 2, 3], 8, workers), print, candidates=(0,))


def test_the_numbers_of_workers_are_timed_over_whole_periods(recipes, monkeypatch):
    repeats = []
    monkeypatch.setattr(recipes, "milliseconds", lambda call, count, warmup: repeats.append(count) or 1.0)
    recipes.best_workers(lambda workers: [], print, candidates=(0, 3, 4), rounds=1, steps=20)
    assert sorted(repeats) == [20, 20, 21]


def test_what_was_packed_is_read_back_by_what_a_spawned_worker_gets(recipes, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
    recipes.pack(map(Image.fromarray, images), 12, 8, tmp_path / "images.npy")
    dataset = recipes.Packed(tmp_path / "images.npy", range(12))
    dataset.__getitems__([0])
    sent = pickle.dumps((dataset, recipes.as_it_is))
    assert len(sent) < 2_000  # no images, though some were read here
    dataset, collate = pickle.loads(sent)
    loader = recipes.loader_of(dataset, 4, 0, train=False, collate_fn=collate)
    read = torch.cat([batch for batch, _ in loader])
    np.testing.assert_array_equal(read, images.transpose(0, 3, 1, 2))


def test_a_crop_may_be_smaller_than_the_image(recipes):
    """Pixels that hold their own number say where a crop was cut."""
    positions = torch.arange(40 * 40).view(1, 1, 40, 40).expand(64, 3, 40, 40)
    crops = recipes.crop_and_flip(positions, 32)
    assert crops.shape == (64, 3, 32, 32)
    steps = crops.diff(dim=3).flatten(1)  # 1 along a row, or all -1: flipped
    assert ((steps == 1).all(1) | (steps == -1).all(1)).all() and (crops.diff(dim=2) == 40).all()
    corners = crops[:, 0].flatten(1).amin(1).unique()
    assert len(corners) > 30 and (corners % 40).max() <= 8 and (corners // 40).max() <= 8  # of 9 × 9


def test_samples_of_two_types_are_not_packed_as_one(recipes, tmp_path):
    with pytest.raises(ValueError, match="sample 1: expected one type"):
        recipes.pack_ragged([np.zeros(3, np.int16), np.zeros(3, np.float32)], tmp_path / "clips.bin")
    with pytest.raises(ValueError, match="found none"):
        recipes.pack_ragged([], tmp_path / "clips.bin")
    with pytest.raises(ValueError, match="sample 1: expected a length, found 0"):
        recipes.pack_ragged([np.zeros(3, np.int16), np.zeros(0, np.int16)], tmp_path / "clips.bin")
    assert not (tmp_path / "clips.bin").exists()


def test_a_mean_without_padding_is_that_of_each_sample_alone(recipes):
    lengths = torch.tensor([3, 7, 5])
    features = [torch.rand(4, length) for length in lengths]
    padded = torch.stack([torch.nn.functional.pad(each, (0, 9 - each.shape[1]), value=torch.nan) for each in features])
    expected = torch.stack([each.mean(dim=1) for each in features])
    torch.testing.assert_close(recipes.mean_without_padding(padded, lengths), expected)
    assert (recipes.mean_without_padding(padded, torch.tensor([0, 7, 5]))[0] == 0).all()


def test_convolutions_without_padding_see_nothing_behind_the_end_of_a_sample(recipes):
    layers = [torch.nn.Conv1d(4, 4, 3, padding=1) for _ in range(2)]

    def means(features, lengths):
        for layer in layers:
            features = layer(recipes.without_padding(features, lengths))
        return recipes.mean_without_padding(features, lengths)

    lengths = torch.tensor([3, 7])
    padded = torch.rand(2, 4, 9)  # with noise behind the ends
    alone = [means(each[:, :length].unsqueeze(0), length.view(1)) for each, length in zip(padded, lengths, strict=True)]
    torch.testing.assert_close(means(padded, lengths), torch.cat(alone))


def test_images_that_are_not_square_keep_their_size_and_move_each_by_itself(recipes):
    positions = torch.arange(1, 20 * 50 + 1).view(1, 1, 20, 50).expand(64, 1, 20, 50)
    crops = recipes.crop_and_flip(positions)
    assert crops.shape == (64, 1, 20, 50)
    middle = crops[:, 0, 4:-4, 4:-4]  # never padding
    steps = middle.diff(dim=2).flatten(1)
    mirrored = (steps == -1).all(1)
    assert ((steps == 1).all(1) | mirrored).all() and 10 < mirrored.sum() < 54 and (middle.diff(dim=1) == 50).all()
    rows, columns = (middle[:, 0].amin(1) - 1) // 50, (middle[:, 0].amin(1) - 1) % 50
    assert all(each.max() <= 8 and len(each.unique()) > 5 for each in (rows, columns))


def test_the_fastest_step_is_found_and_a_hopeless_one_is_asked_with_two_images_only(recipes, monkeypatch, capsys):
    asked, clock = {"slow": [], "fast": [], "hopeless": [], "large": [], "none": []}, [0.0]
    monkeypatch.setattr(recipes, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def step(name, milliseconds, images):
        asked[name].append(len(images))
        clock[0] += milliseconds / 1e3
        if name == "large" and len(images) == 8:
            raise torch.OutOfMemoryError
        if name == "none":
            raise RuntimeError("no kernel for this type")

    waits = {"slow": 6, "fast": 4, "hopeless": 60, "large": 3, "none": 2}
    steps = {name: functools.partial(step, name, wait) for name, wait in waits.items()}
    assert recipes.fastest(steps, torch.zeros(8)) == "fast"
    assert set(asked["hopeless"]) == {2} and asked["slow"].count(8) == 3 * 6 and asked["large"].count(8) == 1
    assert asked["none"] == [2] and "none: no kernel for this type" in capsys.readouterr().out
    assert recipes.fastest(steps, torch.zeros(8), seconds=0) == "fast" and asked["slow"].count(8) == 4 * 6
    with pytest.raises(torch.OutOfMemoryError):
        recipes.fastest({"large": steps["large"]}, torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normalized_pixels_are_of_the_networks_type(recipes, dtype):
    images = torch.arange(12, dtype=torch.uint8).view(2, 3, 2, 1)
    model = torch.nn.Sequential(recipes.Normalize([0.1] * 3, [0.2] * 3), torch.nn.Conv2d(3, 1, 1)).to(dtype)
    torch.testing.assert_close(model[0](images), ((images / 255 - 0.1) / 0.2).to(dtype))
    assert model(images).dtype == dtype


def test_a_first_step_that_the_scaler_skips_leaves_no_trace_in_the_momentum(recipes):
    model, scaler = torch.nn.Linear(3, 2), torch.amp.GradScaler("cpu")
    frozen = torch.zeros(2, requires_grad=False)
    optimizer = recipes.fused_sgd([*model.parameters(), frozen], 0.1)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is nan
    try:
        scaler.scale(float("inf") * model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    assert optimizer.state.keys() == set(model.parameters())
    assert all((of_weight["momentum_buffer"] == 0).all() for of_weight in optimizer.state.values())


def test_batches_come_in_order_and_whole_from_one_ahead(recipes):
    batches = [(torch.full((2,), number), torch.tensor(number)) for number in range(3)]
    came = list(recipes.one_ahead(batches, torch.device("cpu")))
    assert [labels.item() for _, labels in came] == [0, 1, 2]
    assert all((images == labels).all() for images, labels in came)
    assert list(recipes.one_ahead([], torch.device("cpu"))) == []


def test_batches_of_any_shape_are_trained_on_and_counted(recipes):
    model = torch.nn.Linear(2, 3)
    batches = [{"rows": torch.eye(2), "kept": [torch.tensor([True, number > 0])], "name": "a"} for number in range(3)]
    assert recipes.train(batches, lambda batch: batch["rows"].sum() * (batch["name"] == "a"), torch.device("cpu")) == 2

    def right(batch):
        return (model(batch["rows"]).argmax(1) >= 0)[batch["kept"][0]]

    assert recipes.accuracy(model, batches, torch.device("cpu"), right) == 1
    steps = {"one": lambda batch: batch["rows"], "other": lambda batch: batch["rows"]}
    assert recipes.fastest(steps, batches[0], rounds=1) in steps
    named = recipes.each_tensor(UserDict(batches[0]), lambda each: each.to("meta"))
    assert isinstance(named, UserDict) and named["rows"].is_meta and not batches[0]["rows"].is_meta
    assert recipes.two_clocks(torch.utils.data.DataLoader(batches, None), lambda batch: batch["rows"])


def test_samples_of_unequal_lengths_come_back_alone_and_padded(recipes, tmp_path):
    samples = [np.arange(2 * length, dtype=np.int16).reshape(length, 2) + length for length in (3, 1, 2)]
    recipes.pack_ragged(iter([samples[0], None, *samples[1:]]), tmp_path / "clips.bin")  # the second one is damaged
    packed = recipes.Ragged(tmp_path / "clips.bin", [7, 0, 8, 9])
    order = recipes.ByLength(packed.lengths, batch=3)
    ((_, lengths, labels),) = recipes.loader_of(packed, 3, 0, batch_sampler=order, collate_fn=recipes.as_it_is)
    assert sorted(zip(lengths.tolist(), labels.tolist(), strict=True)) == [(1, 8), (2, 9), (3, 7)]
    for number, sample in enumerate(samples):
        found, label = packed[number]
        assert label == 7 + number and found.dtype == torch.int16 and (found.numpy() == sample).all()
    padded, lengths, labels = packed.__getitems__([2, 0])
    assert padded.shape == (2, 3, 2) and (padded[0, 2] == 0).all() and (padded[0, :2].numpy() == samples[2]).all()
    assert (lengths.tolist(), labels.tolist()) == ([2, 3], [9, 7])


def test_batches_by_length_go_on_in_an_epoch_and_equal_lengths_stay_in_their_order(recipes):
    """An order that depends on the processor would give ranks on two machines the same samples."""
    order = recipes.ByLength(np.full(1_200, 5), batch=12, pool=100)
    steps = {tuple(batch) for batch in order}
    drawn = np.random.default_rng((0, 0)).permutation(1_200).reshape(-1, 12)
    assert steps == set(map(tuple, drawn.tolist()))
    order.set_epoch(1)
    whole = list(order)
    order.set_epoch(1, done=60)
    assert list(order) == whole[60:] and len(whole) == 100


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_by_length_have_little_padding_and_are_as_many_and_about_as_long_on_each_rank(
    recipes, ranks, monkeypatch
):
    lengths, found = np.random.default_rng(0).integers(10, 1000, 1_250), []
    for rank in range(ranks):
        monkeypatch.setattr(recipes, "rank_and_ranks", lambda rank=rank: (rank, ranks))
        batches = recipes.ByLength(lengths, batch=12 // ranks)
        first = list(batches)
        batches.set_epoch(1)
        assert len(first) == len(batches) == 104 and list(batches) != first
        found.append(first)
    steps = [np.concatenate(of_step) for of_step in zip(*found, strict=True)]
    assert len({index for step in steps for index in step}) == 104 * 12  # each sample once
    assert recipes.share_of_padding(lengths, steps) < 0.05
    shuffled = np.random.default_rng(0).permutation(1_248).reshape(104, 12)
    assert recipes.share_of_padding(lengths, shuffled) > 0.3
    longest = np.array([[lengths[batch].max() for batch in of_rank] for of_rank in found])
    assert (longest.max(0) - longest.min(0)).mean() < 30


def test_what_is_recomputed_keeps_its_input_only_and_has_the_same_gradients_and_statistics(recipes):
    kept, found = [], []
    for wrapper in (lambda module: module, recipes.Recomputed):
        torch.manual_seed(0)
        images = torch.rand(16, 3, 8, 8)
        layers = [(torch.nn.Conv2d(3, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU()) for _ in range(2)]
        model = torch.nn.Sequential(*(wrapper(torch.nn.Sequential(*each)) for each in layers))
        kept.append(recipes.kept_bytes(model, images))
        model(images).sum().backward()
        statistics = [each for name, each in model.named_buffers() if "running" in name]
        found.append([*(weight.grad for weight in model.parameters()), *statistics])
    assert kept[1] == images.nbytes + 4 * 16 * 3 * 6 * 6 < kept[0]  # the second stage's input has 6 × 6 pixels
    assert all(map(torch.equal, *found))


def test_nothing_of_a_forward_pass_stays_after_its_bytes_are_counted(recipes):
    class Layer(torch.nn.Linear):
        def forward(self, rows):
            output = super().forward(rows).exp()  # its backward needs what it returned
            seen.append(weakref.ref(output))
            return output

    seen = []
    assert recipes.kept_bytes(Layer(4, 4), torch.rand(8, 4)) > 0
    gc.collect()
    assert seen[0]() is None


def test_files_of_class_folders_alone_are_divided_by_their_names(recipes, tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(100):
            (tmp_path / name / f"{name}{number}.JPG").touch()
    train, val = recipes.train_and_val(tmp_path, (".jpg",))
    assert len(train) + len(val) == 200 and 10 <= len(val) <= 35 and not {*train} & {*val}
    (tmp_path / "ant" / "a-new-one.jpg").touch()
    others = recipes.train_and_val(tmp_path, (".jpg",))
    assert {*train} <= {*others[0]} and {*val} <= {*others[1]}


@pytest.mark.parametrize(("classes", "said"), [
    (("ant", "bee"), "train: expected 8 or more photos, found 6"),
    (("dog", "cat"), "val: expected the classes of train, found others: ['dog']"),
    ((), "val: expected 1 or more photos, found 0"),
])  # fmt: skip
def test_the_script_says_which_photos_are_missing(classes, said, script, tmp_path, monkeypatch, capsys):
    """Fewer photos than a batch make no step, and a loop over endless epochs would never end."""
    write_photos(tmp_path / "train", ["ant", "bee", "cat"], 2 if "bee" in classes else 4)
    write_photos(tmp_path / "val", classes, 1)
    monkeypatch.setattr(sys, "argv", ["train_photos.py", str(tmp_path), str(tmp_path / "packed"), "--batch", "8"])
    with pytest.raises(SystemExit):
        script.main()
    assert said in capsys.readouterr().err


@pytest.fixture
def photos(tmp_path):
    for part, of_each in (("train", 12), ("val", 5)):
        write_photos(tmp_path / part, ["ant", "bee", "cat"], of_each)
    damaged = tmp_path / "train" / "bee" / "3.png"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    return tmp_path


@pytest.mark.slow
def test_the_script_trains_validates_and_records_photos_of_ones_own(script, photos, monkeypatch, capsys):
    arguments = ["--epochs", "30", "--batch", "8", "--lr", "3", "--workers", "0", "1"]
    monkeypatch.setattr(sys, "argv", ["train_photos.py", str(photos), str(photos / "packed"), *arguments])
    script.main()
    printed = capsys.readouterr().out
    assert f"Left out: {photos / 'train' / 'bee' / '3.png'}: " in printed
    assert printed.count("\nepoch ") == 30 and "From epoch 0 on: " in printed
    assert "100.0% right" in printed.splitlines()[-1]
    assert list((photos / "packed" / "trace").glob("*.pt.trace.json"))


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_that_was_stopped_goes_on_and_learns_the_same(workers, script, recipes, photos, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "record", lambda *_: None)
    monkeypatch.setattr(recipes, "fastest", lambda *_: "float32")
    save_whole, epochs = recipes.save_whole, 4

    def run(packed, stop_after=epochs):
        def save_and_stop(path, state):
            save_whole(path, state)
            if state["epoch"] == stop_after < epochs:
                raise KeyboardInterrupt

        monkeypatch.setattr(recipes, "save_whole", save_and_stop)
        arguments = ["--epochs", f"{epochs}", "--batch", "8", "--workers", workers]
        monkeypatch.setattr(sys, "argv", ["train_photos.py", str(photos), str(packed), *arguments])
        with contextlib.suppress(KeyboardInterrupt):
            script.main()
        return recipes.load_whole(packed / "checkpoint.pt")["model"]

    whole = run(photos / "whole")
    stopped = run(photos / "stopped", stop_after=2)
    assert not torch.equal(stopped["1.0.weight"], whole["1.0.weight"])
    resumed = run(photos / "stopped")
    assert "From epoch 2 on" in capsys.readouterr().out
    assert all(torch.equal(resumed[name], weights) for name, weights in whole.items())
    write_photos(photos / "train", ["eel"], 1)
    with pytest.raises(ValueError, match="Delete it to begin anew"):
        run(photos / "whole")


# train_cifar10.py


@pytest.fixture
def cifar(recipes):
    return __import__("train_cifar10")


@pytest.fixture
def images(tmp_path):
    """Small images as the course prepares them, 48 to train on and 24 to test; dark ones and bright ones."""
    for part, count in (("train", 48), ("test", 24)):
        (tmp_path / part).mkdir()
        rows = ["file,label"]
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 99, (32, 32, 3), np.uint8) + 150 * (number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / part / f"{number}.png")
            rows.append(f"{number}.png,{number % 2}")
        (tmp_path / part / "labels.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


class Options:
    width, batch, lr, seed, compile, graph = 4, 16, 0.02, 0, False, False


def test_naively_and_as_the_course_has_it_the_network_gets_the_same_pixels_and_learns_the_same(cifar, recipes, images):
    files = cifar.PngFiles(images / "train")
    pixels, labels = cifar.on_device(files)
    assert pixels.dtype == torch.uint8 and pixels.shape == (48, 3, 32, 32) and labels.tolist() == files.labels
    naive = cifar.Training(Options, 20)
    other, control = (
        cifar.Training(Options, 20, before, cifar.AS_IT_COMES, fused=True)
        for before in (recipes.Normalize(cifar.MEAN, cifar.STD), recipes.Normalize(cifar.MEAN, [1, 1, 1]))
    )
    floats = torch.stack([files[index][0] for index in range(16)])
    fed = ((naive, floats), (other, pixels[:16]), (control, pixels[:16]))
    losses, same, differs = ([step(batch, labels[:16]).item() for _ in range(2)] for step, batch in fed)
    assert losses == pytest.approx(same, rel=1e-4)  # later the steps make more of what rounding changes
    assert losses != pytest.approx(differs, rel=1e-3)
    assert losses[1] < losses[0]


@pytest.mark.processes
@pytest.mark.parametrize("naive", [["--naive"], []], ids=["naively", "as the course has it"])
def test_it_trains_until_it_is_good_enough_and_notes_each_epoch(naive, cifar, images, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_cifar10.py", str(images)])  # a batch of 512
    with pytest.raises(SystemExit):
        cifar.main()
    assert "train: expected 512 or more images, found 48." in capsys.readouterr().err
    log = images / "new" / "log.jsonl"
    settings = ["--epochs", "40", "--batch", "16", "--width", "4", "--goal", "0.95", "--log", str(log)]
    monkeypatch.setattr(sys, "argv", ["train_cifar10.py", str(images), *naive, *settings])
    cifar.main()
    epochs = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["epoch"] for each in epochs] == list(range(1, len(epochs) + 1))
    assert [each["accuracy"] >= 0.95 for each in epochs] == [False] * (len(epochs) - 1) + [True]
    assert f"95% of the test images: reached after {epochs[-1]['seconds']:.1f} s" in capsys.readouterr().out
    assert epochs[0]["naive"] == bool(naive) and epochs[0]["train_images"] == 48
    assert len({each["started"] for each in epochs}) == 1 and str(images) not in log.read_text()


def test_each_notebook_but_the_last_which_has_the_script_has_its_recipe_as_the_file_has_it():
    text = (FOLDER / "recipes.py").read_text(encoding="utf-8")
    for path in NOTEBOOKS[:-1]:
        (cell,) = (cell for cell in content(path).cells if "recipe" in cell.metadata.get("tags", []))
        (code,) = re.findall(r"```python\n(.*?)\n```", cell.source, re.DOTALL)
        assert re.search(
            rf"^# {path.name[:2]} · [^\n]*\n\n\n{re.escape(code)}\n\n\n# (\d\d ·|All)", text, re.MULTILINE
        ), path.name
