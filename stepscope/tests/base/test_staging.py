"""Files and folders that appear whole or not at all, whatever happens to the process that makes them."""

import itertools
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import filelock
import pytest

from stepscope.base import staging
from stepscope.cli import main

pytestmark = pytest.mark.processes
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

ONE_USER, ANOTHER_USER = 65533, 65534  # any numbers but root's


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def forked(function, *arguments, user=None):
    """Start a function in a process of its own, of another user if need be."""

    def run():
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        function(*arguments)

    filelock.FileLock  # now, since another user may not be allowed to read it
    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


def started(function, path, **user):
    """As `forked`, and come back when it waits, for ever."""
    there = multiprocessing.get_context("fork").Event()
    process = forked(function, path, lambda: (there.set(), time.sleep(600)), **user)
    while not there.wait(0.1):
        assert process.is_alive()
    return process


def kill(process):
    process.kill()
    process.join()


def make_folder(path, wait):
    with staging.folder(path, replace=True) as new:
        (new / "half").write_text("x")
        wait()


def write(path, wait):
    """Write, and wait when the content is in the staging file, which does not have its name yet."""
    sys.addaudithook(lambda event, arguments: event == "os.rename" and wait())
    staging.write(path, "new")


@pytest.mark.parametrize("replace", [False, True])
def test_a_block_that_raises_leaves_the_existing_files(tmp_path, replace):
    if replace:
        staging.write(tmp_path / "new/old", "old")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt), staging.folder(tmp_path / "new", replace=replace) as new:
        staging.write(new / "deep/file", "content")
        raise KeyboardInterrupt
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", ["Grüße\n", b"\r\n\x00\xff"])
def test_a_file_has_exactly_the_bytes_that_were_written(tmp_path, content):
    staging.write(tmp_path / "deep/file", content, durable=True)
    assert (tmp_path / "deep/file").read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names_in(tmp_path / "deep") == ["file"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "regular file"),
        (os.mkdir, "regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "regular file"),
        (lambda path: path.write_bytes(b"12345"), "at most"),
    ],
)
def test_a_file_without_an_end_or_with_too_much_content_is_refused(tmp_path, capsys, make, says):
    make(path := tmp_path / "results.json")
    with pytest.raises(OSError, match=rf"{says}.*results\.json"):
        staging.read(path, most=4)
    if says == "regular file":
        assert main(["page", str(path)]) == 1
        assert says in "".join(capsys.readouterr())


def test_a_file_that_is_replaced_keeps_its_permissions_and_the_link_to_it(tmp_path):
    file, link = tmp_path / "shared.jsonl", tmp_path / "link.jsonl"
    file.write_text("old")
    file.chmod(0o666)
    link.symlink_to(file)
    staging.write(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o666


def test_staging_files_and_folders_can_be_recognized(tmp_path):
    with staging.folder(tmp_path / "one") as one:
        (found,) = (path for path in tmp_path.iterdir() if path.is_dir())
        assert staging.is_staging(found) and staging.is_staging(one / "deep/file")
        assert all(staging.is_staging(path) for path in tmp_path.iterdir())
    others = [tmp_path / "one", Path(".env.staging"), Path(".app.staging-eu")]
    assert not any(staging.is_staging(path) for path in others)


def test_an_existing_target_is_named_before_the_work_begins(tmp_path):
    (tmp_path / "new").mkdir()
    with pytest.raises(staging.TargetExists, match=str(tmp_path / "new")), staging.folder(tmp_path / "new"):
        pytest.fail("the block ran")
    assert names_in(tmp_path) == ["new"]


def test_a_target_that_another_process_made_meanwhile_stays(tmp_path):
    with pytest.raises(staging.TargetExists, match=str(tmp_path / "new")), staging.folder(tmp_path / "new"):
        staging.write(tmp_path / "new/file", "another's")
    assert (tmp_path / "new/file").read_text() == "another's"
    assert names_in(tmp_path) == ["new"]


@pytest.mark.parametrize("old", ["deep/place/old", "deep/place", "deep/other/file"])
def test_a_folder_appears_when_its_block_ends_and_replaces_an_existing_one(tmp_path, old):
    staging.write(tmp_path / old, "old")
    with staging.folder(tmp_path / "deep/place", replace="place" in old) as new:
        (new / "file").touch()
        assert (tmp_path / old).read_text() == "old" and not (tmp_path / "deep/place/file").exists()
    assert names_in(tmp_path / "deep") == sorted({"place", old.split("/")[1]})
    assert names_in(tmp_path / "deep/place") == ["file"]


@needs_fork
@pytest.mark.parametrize("make", [make_folder, write])
def test_staging_files_stay_while_their_process_lives_and_are_removed_after_it_was_killed(tmp_path, make):
    process = started(make, tmp_path / "new")
    left = set(names_in(tmp_path))
    assert len(left) == 2 and "new" not in left  # the staging folder and its lock
    staging.write(tmp_path / "other", "")
    assert left < set(names_in(tmp_path))  # what a living process makes is never removed
    kill(process)
    staging.write(tmp_path / "other", "")
    assert names_in(tmp_path) == ["other"]


STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock", "os.listdir")


@needs_fork
def test_a_process_killed_at_any_step_leaves_a_whole_folder_or_none_and_the_next_cleans_up(tmp_path):
    def make(folder, moment):
        def end(event, arguments):
            here = event in STEPS and (event == "fcntl.flock" or str(folder) in str(arguments[0]))
            if here and next(numbers) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        numbers = itertools.count()
        sys.addaudithook(end)
        with staging.folder(folder / "new", replace=True) as new:
            (new / "file").write_text("new")

    for moment in itertools.count():
        folder = tmp_path / str(moment)
        staging.write(folder / "new/file", "old")
        process = forked(make, folder, moment)
        process.join()
        if process.exitcode == 0:  # it has no more steps
            break
        assert process.exitcode == -signal.SIGKILL
        if (folder / "new").exists():  # it does not if the process was killed between the two renames
            assert (folder / "new/file").read_text() in ("old", "new")
        there = ["new"] if (folder / "new").exists() else []
        staging.clean(folder)
        assert names_in(folder) == there, moment
    assert moment > 15


@needs_fork
def test_thirty_processes_at_once_share_a_folder_with_leftovers(tmp_path):
    meeting = multiprocessing.get_context("fork").Barrier(30)

    def make():
        meeting.wait()
        staging.write(tmp_path / f"{os.getpid()}.json", "content")
        with staging.folder(tmp_path / "place", replace=True) as new:
            for name in "abc":
                (new / name).write_text(str(os.getpid()))

    kill(started(make_folder, tmp_path / "killed"))
    processes = [forked(make) for _ in range(30)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 30
    assert all(file.read_text() == "content" for file in tmp_path.glob("*.json"))
    assert names_in(tmp_path / "place") == ["a", "b", "c"]
    assert len({file.read_text() for file in (tmp_path / "place").iterdir()}) == 1  # all of one process
    assert len(names_in(tmp_path)) == 30 + len(["place"])


@pytest.fixture
def shared():
    """A folder in which every user may write; pytest's own are closed to other users."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can write files of several users")
def test_files_of_another_user_do_no_harm_and_are_removed_by_that_user(shared):
    def write_as(user, name):
        process = forked(staging.write, shared / name, "", user=user)
        process.join()
        assert process.exitcode == 0

    process = started(write, shared / "new", user=ONE_USER)
    before = names_in(shared)
    write_as(ANOTHER_USER, "other")
    assert names_in(shared) == sorted([*before, "other"])
    kill(process)
    write_as(ANOTHER_USER, "other")
    write_as(ONE_USER, "mine")
    assert names_in(shared) == ["mine", "other"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB and 50 files."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=50", "tmpfs", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_named_and_leaves_the_old_file_and_no_part_of_a_folder(small_disk):
    with pytest.raises(staging.NotEnoughDisk, match="new"), staging.folder(small_disk / "new") as new:
        (new / "file").write_bytes(bytes(2 * 2**20))
    with pytest.raises(staging.NotEnoughDisk, match="new"), staging.folder(small_disk / "new") as new:
        for number in range(50):
            (new / str(number)).touch()
    assert names_in(small_disk) == []
    staging.write(small_disk / "file", "old")
    with pytest.raises(OSError), open(small_disk / "fill", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(staging.NotEnoughDisk, match=str(small_disk)):
        staging.write(small_disk / "file", "new")
    assert names_in(small_disk) == ["file", "fill"] and (small_disk / "file").read_text() == "old"


def test_free_space_is_checked_before_many_files_are_made(tmp_path):
    staging.check_free(tmp_path, 10, 1000)
    with pytest.raises(staging.NotEnoughDisk, match=str(tmp_path)):
        staging.check_free(tmp_path, 10**9, 10**9)
