"""What the course keeps in files that anybody may damage: each is read, or refused by an error of ours."""

import json
from unittest import mock

import pytest
from support import damage, shards
from support.timed import compared

from helpers import figures
from helpers.config import CourseError
from helpers.data import cifar10
from helpers.lessons import class_page, preflight, recording
from helpers.loading.shards.index import Index, ShardsError
from helpers.results import hardware, scoreboard
from stepscope.base.staging import DamagedFolder

pytestmark = pytest.mark.processes


def results(runs):
    """Return two results as the scoreboard has them, the second with a ratio to the first."""
    options = {"loader": [], "step": "a layer", "data": "zeros"}
    scoreboard.add("01 naive", compared(100, 110, before=[90, 91]), "now", **options)
    scoreboard.add("03 workers", compared(200, 210, before=[100, 111]), "now", baseline="before", **options)
    path = scoreboard.own_path()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.unlink()
    return lines


def manifest(folder):
    return [json.loads((cifar10.prepare(drawn=(2, 1), download=False).train.parent / "manifest.json").read_text())]


def recorded(path):
    notebook = path.with_name("no-rung.ipynb")
    notebook.touch()
    recording.record(path.parent, [notebook], 1)


def page(path):
    class_page.write(path.parent, path.parent / "class.html")


def images(path):
    cifar10.prepare(drawn=(2, 1), download=False)


def images_at_a_glance(path):
    assert len([*preflight._images()]) == 1


READERS = {  # the file, what stands in it, who reads it, and the error that may be raised
    "scoreboard": ("scoreboard.jsonl", results, lambda path: scoreboard.ladder_text(), CourseError),
    "class": ("scoreboard.jsonl", results, page, ()),
    "results of processes": ("processes.jsonl", results, recorded, CourseError),
    "manifest": ("cifar10-drawn-2/manifest.json", manifest, images, DamagedFolder),
    "manifest at a glance": ("cifar10-drawn-2/manifest.json", manifest, images_at_a_glance, ()),
    "shards": (
        "index.json",
        lambda folder: [json.loads(shards.packed(9)[1].to_json())],
        lambda path: Index.from_json(path.read_bytes(), str(path)),
        ShardsError,
    ),
}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    for name in ("COURSE_DATA", "COURSE_RUNS"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("COURSE_PRESET", "ci")
    for name in ("ladder", "ratios", "on_a_gpu"):  # pictures take seconds
        monkeypatch.setattr(figures, name, mock.Mock(return_value=mock.Mock(_repr_html_=str)))
    monkeypatch.setattr(recording, "hardware", mock.Mock(**{"describe.return_value": hardware.describe()}))


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_refused_by_an_error_of_ours(tmp_path, reader):
    name, make, read, refused = READERS[reader]
    damage.each(tmp_path / name, make(tmp_path), read, refused)
