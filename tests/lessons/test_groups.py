"""A fresh script for each group of a class."""

import re

import pytest

from helpers.__main__ import main
from helpers.lessons import faults
from helpers.lessons.faults import catalogue


@pytest.fixture(autouse=True)
def images(drawn_images, monkeypatch):
    for name, value in drawn_images.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("seed", [0, 7, -2])
def test_no_two_groups_have_the_same_faults(seed):
    seeds = catalogue.seeds_of_groups(99, seed)
    assert len(set(seeds)) == len({faults.draw(each) for each in seeds}) == 99
    assert seeds[0] == 100 * seed + 1
    assert catalogue.seeds_of_groups(8, seed) == seeds[:8]


def test_a_seed_whose_faults_another_group_has_is_left_out(monkeypatch):
    monkeypatch.setattr(catalogue, "draw", lambda seed: (seed // 2,))
    assert catalogue.seeds_of_groups(4, 7) == [701, 702, 704, 706]


def test_each_group_gets_its_script_and_its_line_for_grading(tmp_path, capsys):
    folder = tmp_path / "scripts"
    assert main(["exercise", "--groups", "3", "--seed", "7", "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"python -m helpers grade --seed (\d+) (.*)", out)
    assert [seed for seed, _ in lines] == ["701", "702", "703"]
    assert len(set(map(str, folder.iterdir()))) == 3
    for number, (seed, path) in enumerate(lines, 1):
        assert path == str(folder / f"train-group-{number}-seed-{seed}.py")
        script = (folder / path).read_text(encoding="utf-8")
        images = re.search(r"DATA = Path\((.*)\)", script)[1].strip("'\"")
        assert script == faults.text(faults.draw(int(seed)), images)


@pytest.mark.parametrize("groups", [0, 100])
def test_a_number_of_groups_that_no_class_has_is_refused(tmp_path, groups):
    with pytest.raises(catalogue.WrongGroups, match=f"1 to 99 groups, found {groups}"):
        faults.write_for_groups(tmp_path / "scripts", groups, 7, tmp_path)
    assert not (tmp_path / "scripts").exists()


def test_a_file_in_place_of_the_folder_is_named(tmp_path, capsys):
    (tmp_path / "train.py").write_text("mine")
    assert main(["exercise", "--groups", "2", "--seed", "7", "--out", str(tmp_path / "train.py")]) == 1
    assert "TargetExists: Expected the name of a folder for 2 scripts" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine"
