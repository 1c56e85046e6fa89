"""Files and folders that appear whole or not at all, whatever happens to the process that makes them."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from helpers import config, staging

pytestmark = pytest.mark.processes

ONE_USER, ANOTHER_USER = 65533, 65534  # any numbers but root's

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can write files of several users"
)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def start(code, *arguments):
    """Start a Python that runs `code`. In it, `path` is the first argument, and `wait` says that it waits, for ever."""
    before = (
        "import os, pathlib, sys, time\n"
        "from helpers import staging\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "def wait():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", before + code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=config.PROJECT)


def started(code, *arguments):
    """As `start`, and come back when it waits."""
    process = start(code, *arguments)
    line = process.stdout.readline()
    assert line == "waiting\n", line + process.stderr.read()
    return process


def end(process, interrupt=False):
    """Kill a process, or interrupt it as Ctrl-C does; return what it printed, and its errors."""
    if interrupt:
        process.send_signal(signal.SIGINT)
    else:
        process.kill()
    return process.communicate(timeout=120)


def run_thirty_at_once(code, path):
    """Run `code` in thirty processes that begin when all of them are there; none may complain."""
    processes = [start(f"print('waiting', flush=True)\nsys.stdin.readline()\n{code}", path) for _ in range(30)]
    assert [process.stdout.readline() for process in processes] == ["waiting\n"] * 30
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=300)[1] for process in processes] == [""] * 30


FOLDER = "with staging.folder(path) as new:\n    (new / 'half').write_text('x')\n    wait()\n"
SCRATCH = FOLDER.replace("folder(", "scratch(")
REPLACE = FOLDER.replace("(path)", "(path, replace=True)")
# Waits when the content is in the staging file, which does not have its name yet
WRITE = (
    "def waiting(event, arguments):\n"
    "    if event == 'os.rename': wait()\n"
    "sys.addaudithook(waiting)\n"
    "staging.write(path, 'new')\n"
)
BLOCKS = pytest.mark.parametrize(
    "code", [FOLDER, SCRATCH, REPLACE, WRITE], ids=["folder", "scratch", "replace", "write"]
)


# ---------------------------------------------------------------------------------------------------------------------
# What is made


def test_a_folder_appears_when_its_block_ends(tmp_path):
    with staging.folder(tmp_path / "deep/er/new") as new:
        (new / "file").write_text("content")
        assert not (tmp_path / "deep/er/new").exists()
    assert (tmp_path / "deep/er/new/file").read_text() == "content"
    assert names_in(tmp_path / "deep/er") == ["new"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("options", [{}, {"replace": True}], ids=["new", "replacing"])
def test_a_block_that_raises_leaves_what_was_there(tmp_path, failure, options):
    if options:
        (tmp_path / "new").mkdir()
        (tmp_path / "new/old").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(failure), staging.folder(tmp_path / "new", **options) as new:
        (new / "deep").mkdir()
        (new / "deep/file").write_text("content")
        raise failure
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", ["Grüße\n", b"\r\n\x00\xff", ""])
def test_a_file_has_exactly_the_bytes_that_were_written(tmp_path, content):
    for durable in (False, True):
        staging.write(tmp_path / "deep/file", content, durable=durable)
        found = (tmp_path / "deep/file").read_bytes()
        assert found == (content.encode() if isinstance(content, str) else content)
        assert names_in(tmp_path / "deep") == ["file"]


def test_a_file_that_is_written_may_be_read_by_others_as_any_file_of_the_user(tmp_path):
    (tmp_path / "usual").touch()
    staging.write(tmp_path / "file", "content")
    with staging.folder(tmp_path / "folder"):
        pass
    (tmp_path / "usual folder").mkdir()
    for made, usual in (("file", "usual"), ("folder", "usual folder")):
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == stat.S_IMODE((tmp_path / usual).stat().st_mode)


def test_a_file_that_is_replaced_keeps_its_permissions_and_the_link_to_it(tmp_path):
    file, link = tmp_path / "shared.jsonl", tmp_path / "link.jsonl"
    file.write_text("old")
    file.chmod(0o666)
    link.symlink_to(file)
    staging.write(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o666


def test_a_reader_finds_the_old_file_or_the_new_one_and_never_a_part(tmp_path):
    staging.write(tmp_path / "file", "0" * 100_000)
    found, ended = set(), threading.Event()

    def read():
        while not ended.is_set():
            found.add((tmp_path / "file").read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 10):
        staging.write(tmp_path / "file", str(number) * 100_000)
    ended.set()
    reader.join()
    assert found and found <= {str(number) * 100_000 for number in range(10)}


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127])
def test_names_as_long_as_a_disk_allows_can_be_made(tmp_path, name):
    staging.write(tmp_path / name, "content")
    with staging.folder(tmp_path / name, replace=True):
        pass
    assert names_in(tmp_path) == [name]


def test_a_scratch_folder_is_removed_unless_it_was_renamed(tmp_path):
    with staging.scratch(tmp_path / "one") as scratch:
        (scratch / "file").touch()
        assert scratch.parent == tmp_path
    assert names_in(tmp_path) == []
    with staging.scratch(tmp_path / "one") as scratch:
        scratch.rename(tmp_path / "kept")
    assert names_in(tmp_path) == ["kept"]


def test_blocks_may_be_nested_in_one_folder_and_in_each_other(tmp_path):
    with staging.folder(tmp_path / "one") as one, staging.folder(tmp_path / "two") as two:
        staging.write(one / "file", "1")
        staging.write(tmp_path / "file", "2")
        with staging.folder(two / "three"):
            pass
    assert names_in(tmp_path) == ["file", "one", "two"]
    assert (names_in(tmp_path / "one"), names_in(tmp_path / "two")) == (["file"], ["three"])


def test_what_is_staged_can_be_recognized(tmp_path):
    with staging.folder(tmp_path / "one") as one:
        (found,) = (path for path in tmp_path.iterdir() if path.is_dir())
        assert staging.is_staging(found) and staging.is_staging(one / "deep/file")
        assert all(staging.is_staging(path) for path in tmp_path.iterdir())
    others = [tmp_path / "one", Path(".env.staging"), Path(".app.staging-eu")]
    assert not any(staging.is_staging(path) for path in others)


def test_a_system_that_removes_no_open_file_is_no_error(tmp_path, monkeypatch):
    """Windows; there, the library for locks removes the file when it has closed it."""
    really_unlink = Path.unlink

    def unlink(path, **options):
        if path.suffix == ".lock":
            raise PermissionError("open")
        really_unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        staging.write(tmp_path / "file", "content")
    staging.clean(tmp_path)
    assert names_in(tmp_path) == ["file"]


def test_importing_does_not_import_filelock():
    code = "import sys; from helpers import staging; sys.exit('filelock' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=config.PROJECT).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# Something is there already


@pytest.mark.parametrize(
    "make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")], ids=["folder", "file", "link"]
)
def test_an_existing_target_is_named_before_the_work_begins(tmp_path, make):
    make(tmp_path / "new")
    with pytest.raises(staging.TargetExists, match="new: expected nothing here"), staging.folder(tmp_path / "new"):
        pytest.fail("the block ran")
    assert names_in(tmp_path) == ["new"]


def test_a_target_that_another_process_made_meanwhile_stays(tmp_path):
    with pytest.raises(staging.TargetExists, match="new: expected nothing here"), staging.folder(tmp_path / "new"):
        staging.write(tmp_path / "new/file", "another's")
    assert (tmp_path / "new/file").read_text() == "another's"
    assert names_in(tmp_path) == ["new"]


@pytest.mark.parametrize("target", ["new/file", "new"], ids=["folder", "file"])
def test_a_target_that_another_process_made_in_the_last_moment_stays(tmp_path, monkeypatch, target):
    monkeypatch.setattr(staging, "_refuse_existing", lambda path: None)  # as if it came right after the check
    with pytest.raises(staging.TargetExists, match="new: expected nothing here"), staging.folder(tmp_path / "new"):
        staging.write(tmp_path / target, "another's")
    assert (tmp_path / target).read_text() == "another's"
    assert names_in(tmp_path) == ["new"]


@pytest.mark.parametrize("old", ["folder", "file", "nothing"])
def test_replacing_puts_the_new_folder_in_the_place_of_whatever_was_there(tmp_path, old):
    if old == "folder":
        staging.write(tmp_path / "place/old", "old")
    elif old == "file":
        staging.write(tmp_path / "place", "old")
    with staging.folder(tmp_path / "place", replace=True) as new:
        (new / "file").touch()
    assert names_in(tmp_path) == ["place"] and names_in(tmp_path / "place") == ["file"]


def test_a_replaced_link_leaves_the_folder_that_it_led_to(tmp_path):
    staging.write(tmp_path / "elsewhere/precious", "mine")
    (tmp_path / "place").symlink_to("elsewhere")
    with staging.folder(tmp_path / "place", replace=True):
        pass
    assert not (tmp_path / "place").is_symlink()
    assert (tmp_path / "elsewhere/precious").read_text() == "mine"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses to rename the folder of an open file")
def test_a_reader_can_read_on_in_a_file_of_a_replaced_folder(tmp_path):
    staging.write(tmp_path / "place/file", "old")
    with open(tmp_path / "place/file") as reader:
        with staging.folder(tmp_path / "place", replace=True) as new:
            (new / "file").write_text("new")
        assert reader.read() == "old"
    assert (tmp_path / "place/file").read_text() == "new"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, PermissionError(errno.EPERM, "not permitted")])
def test_what_was_there_comes_back_if_the_new_folder_cannot_take_its_place(tmp_path, monkeypatch, failure):
    def fail(staged, path):
        raise failure

    staging.write(tmp_path / "place/old", "old")
    monkeypatch.setattr(staging, "_rename", fail)
    with pytest.raises((KeyboardInterrupt, PermissionError)):
        with staging.folder(tmp_path / "place", replace=True) as new:
            (new / "file").touch()
    assert names_in(tmp_path) == ["place"] and names_in(tmp_path / "place") == ["old"]


@pytest.mark.slow
def test_thirty_replacing_one_folder_at_once_all_succeed_and_one_of_theirs_is_there_whole(tmp_path):
    run_thirty_at_once(
        "for number in range(5):\n"
        "    with staging.folder(path, replace=True) as new:\n"
        "        for name in 'abc': (new / name).write_text(f'{os.getpid()} {number}')\n",
        tmp_path / "place",
    )
    assert names_in(tmp_path) == ["place"] and names_in(tmp_path / "place") == ["a", "b", "c"]
    assert len({(tmp_path / "place" / name).read_text() for name in "abc"}) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Killed, and cleaned


@BLOCKS
def test_what_a_killed_process_left_is_removed_by_the_next_that_makes_something_there(tmp_path, code):
    staging.write(tmp_path / "other", "")
    end(started(code, tmp_path / "new"))
    left = set(names_in(tmp_path)) - {"other"}
    assert len(left) == 2 and "new" not in left  # the staging folder and its lock
    staging.write(tmp_path / "other", "")
    assert names_in(tmp_path) == ["other"]


@BLOCKS
def test_what_a_living_process_makes_is_never_removed(tmp_path, code):
    process = started(code, tmp_path / "new")
    before = names_in(tmp_path)
    for _ in range(5):
        staging.clean(tmp_path)
        with staging.folder(tmp_path / "other", replace=True):
            pass
    assert names_in(tmp_path) == sorted([*before, "other"])
    end(process)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system cannot stop a process")
def test_what_a_stopped_process_makes_is_never_removed(tmp_path):
    process = started(FOLDER, tmp_path / "new")
    before = names_in(tmp_path)
    process.send_signal(signal.SIGSTOP)
    staging.clean(tmp_path)
    assert names_in(tmp_path) == before
    end(process)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
@BLOCKS
def test_ctrl_c_leaves_nothing(tmp_path, code):
    _, error = end(started(code, tmp_path / "new"), interrupt=True)
    assert "KeyboardInterrupt" in error
    assert names_in(tmp_path) == []


def test_what_ctrl_c_left_half_removed_is_removed_by_the_next(tmp_path, monkeypatch):
    def interrupt(path, **_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        with staging.scratch(tmp_path / "new"):
            patched.setattr(shutil, "rmtree", interrupt)
    assert len(names_in(tmp_path)) == 2
    staging.clean(tmp_path)
    assert names_in(tmp_path) == []


STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock", "os.listdir")
KILLED_AT = (
    "numbers = iter(range(10**6))\n"
    "def kill(event, arguments):\n"
    f"    if event in {STEPS} and (event == 'fcntl.flock' or str(path.parent) in str(arguments[0])):\n"
    "        if next(numbers) == int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
    "import filelock\n"
    "sys.addaudithook(kill)\n"
    "with staging.folder(path, replace=True) as new:\n"
    "    (new / 'file').write_text('new')\n"
    "print(next(numbers))\n"
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill")
def test_killed_at_any_step_there_is_a_whole_folder_or_none_and_the_next_leaves_nothing_else(tmp_path):
    moments = int(start(KILLED_AT, tmp_path / "count/new", -1).communicate()[0])
    assert moments > 15
    for moment in range(moments):
        folder = tmp_path / str(moment)
        staging.write(folder / "new/file", "old")
        process = start(KILLED_AT, folder / "new", moment)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        staging.clean(folder)
        assert names_in(folder) in ([], ["new"]), moment  # nothing: killed between the two renames
        if (folder / "new").exists():
            assert (folder / "new/file").read_text() in ("old", "new")


@needs_fork
def test_a_forked_worker_that_ends_does_not_end_the_lock_of_its_parent(tmp_path):
    code = (
        "import multiprocessing, filelock\n"
        "with staging.scratch(path):\n"
        "    worker = multiprocessing.get_context('fork').Process(target=int)\n"
        "    worker.start(); worker.join()\n"
        "    wait()\n"
    )
    process = started(code, tmp_path / "new")
    staging.clean(tmp_path)
    assert len(names_in(tmp_path)) == 2
    end(process)


def test_a_program_that_outlives_the_killed_process_does_not_keep_its_lock(tmp_path):
    code = (
        "import subprocess\n"
        "with staging.scratch(path):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, stdout=2)\n"
        "    os.set_inheritable(0, True)\n"
        "    wait()\n"
    )
    process = started(code, tmp_path / "new")
    process.kill()
    process.wait()
    staging.clean(tmp_path)
    assert names_in(tmp_path) == []
    process.communicate()


@pytest.mark.parametrize(
    "name", [".env.staging", ".app.staging-eu", ".app.staging-1234567", "app.staging-12345678", ".notes"]
)
def test_what_others_named_is_not_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / f"{name}.lock").touch()
    before = names_in(tmp_path)
    staging.clean(tmp_path)
    assert names_in(tmp_path) == before


def test_a_folder_named_like_a_staging_folder_is_not_removed_without_a_lock_file(tmp_path):
    (tmp_path / ".app.staging-12345678").mkdir()
    staging.clean(tmp_path)
    assert names_in(tmp_path) == [".app.staging-12345678"]


def test_a_link_named_like_a_staging_folder_is_not_followed(tmp_path):
    staging.write(tmp_path / "elsewhere/precious", "mine")
    (tmp_path / ".a.staging-12345678").symlink_to("elsewhere")
    (tmp_path / ".a.staging-12345678.lock").touch()
    staging.clean(tmp_path)
    assert (tmp_path / "elsewhere/precious").read_text() == "mine"


def test_thirty_at_once_in_a_folder_with_leftovers_write_and_clean_without_an_error(tmp_path):
    for number in range(3):
        end(started(FOLDER, tmp_path / f"killed-{number}"))
    run_thirty_at_once(
        "for number in range(5):\n"
        "    staging.write(path / f'{os.getpid()}.json', str(number))\n"
        "    with staging.folder(path / f'{os.getpid()}-{number}') as new:\n"
        "        (new / 'file').write_text('content')\n",
        tmp_path,
    )
    assert len(names_in(tmp_path)) == 30 * 6
    assert all((folder / "file").read_text() == "content" for folder in tmp_path.iterdir() if folder.is_dir())
    assert all(file.read_text() == "4" for file in tmp_path.glob("*.json"))


# ---------------------------------------------------------------------------------------------------------------------
# A shared folder of several users


@pytest.fixture(params=[0o777, 0o1777], ids=["shared", "shared and sticky"])
def shared(request):
    """A folder in which every user may write; pytest's own are closed to other users."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(request.param)
    yield folder
    shutil.rmtree(folder)


def as_user(number, code):
    """`code` that another user runs; what it needs is imported before, since that user may not be able to read it."""
    become = f"os.setgroups([]); os.setgid({number}); os.setuid({number})"
    return f"import filelock\nfilelock.FileLock(os.devnull)\n{become}\n{code}"


def run_as(number, code, path):
    """Run `code`, which may not complain."""
    assert start(as_user(number, code), path).communicate(timeout=120)[1] == ""


@needs_root
@BLOCKS
def test_what_another_user_makes_or_left_does_no_harm_and_is_removed_by_that_user(shared, code):
    process = started(as_user(ONE_USER, code), shared / "new")
    before = names_in(shared)
    run_as(ANOTHER_USER, "staging.write(path / 'other', '')", shared)
    assert names_in(shared) == sorted([*before, "other"])
    end(process)
    run_as(ANOTHER_USER, "staging.write(path / 'other', '')", shared)
    run_as(ONE_USER, "staging.write(path / 'mine', '')", shared)
    assert names_in(shared) == ["mine", "other"]


@needs_root
@pytest.mark.parametrize("shared", [0o777], ids=["shared"], indirect=True)
def test_what_another_users_killed_write_left_is_removed_by_everyone_who_may(shared):
    end(started(as_user(ONE_USER, WRITE), shared / "new"))
    assert len(names_in(shared)) == 2
    run_as(ANOTHER_USER, "staging.clean(path)", shared)
    assert names_in(shared) == []


@needs_root
def test_users_prepare_in_a_shared_folder_one_after_the_other(shared):
    for number in (ONE_USER, ANOTHER_USER, ONE_USER):
        code = f"with staging.only_one_process(path): staging.write(path / '{number}', '')"
        run_as(number, code, shared)
    assert names_in(shared) == [".preparing.lock", str(ONE_USER), str(ANOTHER_USER)]


@needs_root
def test_a_folder_in_which_the_user_may_write_but_cannot_list_it(shared):
    (shared / "letterbox").mkdir()
    (shared / "letterbox").chmod(0o733)
    run_as(ONE_USER, "staging.write(path / 'letter', 'content')", shared / "letterbox")
    assert names_in(shared / "letterbox") == ["letter"]


# ---------------------------------------------------------------------------------------------------------------------
# A full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, with room for ten files."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=11", "tmpfs", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill_bytes(folder):
    with pytest.raises(OSError), open(folder / "fill", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def fill_inodes(folder):
    with pytest.raises(OSError):
        for number in range(11):
            (folder / f"fill-{number}").touch()


@pytest.mark.parametrize("fill", [fill_bytes, fill_inodes])
def test_on_a_full_disk_a_write_says_so_and_leaves_the_old_file(small_disk, fill):
    staging.write(small_disk / "file", "old")
    fill(small_disk)
    before = names_in(small_disk)
    with pytest.raises(staging.NotEnoughDisk, match=rf"the disk of {small_disk} became full while writing file; free"):
        staging.write(small_disk / "file", "new")
    assert names_in(small_disk) == before and (small_disk / "file").read_text() == "old"


@pytest.mark.parametrize("options", [{}, {"replace": True}], ids=["new", "replacing"])
def test_a_disk_that_becomes_full_leaves_no_part_of_a_folder(small_disk, options):
    with (
        pytest.raises(staging.NotEnoughDisk, match="while writing new"),
        staging.folder(small_disk / "new", **options) as new,
    ):
        (new / "file").write_bytes(bytes(2 * 2**20))
    assert names_in(small_disk) == []


def test_a_full_disk_on_which_the_parent_folders_cannot_be_made_says_so(small_disk):
    fill_inodes(small_disk)
    with pytest.raises(staging.NotEnoughDisk, match="became full"):
        staging.write(small_disk / "deep/er/file", "new")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_error_that_says_that_the_disk_is_full_becomes_ours_once(tmp_path, number):
    with pytest.raises(staging.NotEnoughDisk, match="while writing inner") as error:
        with staging.scratch(tmp_path / "outer") as outer, staging.scratch(outer / "inner"):
            raise OSError(number, os.strerror(number))
    assert error.value.errno == number


def test_other_errors_of_the_system_stay_as_they_are(tmp_path):
    with pytest.raises(PermissionError, match="mine") as error, staging.scratch(tmp_path / "new"):
        raise PermissionError("mine")
    assert not isinstance(error.value, staging.NotEnoughDisk)


# ---------------------------------------------------------------------------------------------------------------------
# One process at a time


def test_of_thirty_processes_one_at_a_time_is_in_the_block(tmp_path):
    (tmp_path / "count").write_text("0")
    run_thirty_at_once(
        "with staging.only_one_process(path):\n"
        "    before = int((path / 'count').read_text())\n"
        "    time.sleep(0.01)\n"
        "    (path / 'count').write_text(str(before + 1))\n",
        tmp_path,
    )
    assert (tmp_path / "count").read_text() == "30"


def test_a_killed_process_lets_the_next_one_in_which_cleans(tmp_path):
    code = "with staging.only_one_process(path), staging.scratch(path / 'new'): wait()"
    end(started(code, tmp_path))
    assert len(names_in(tmp_path)) == 3
    with staging.only_one_process(tmp_path):
        assert names_in(tmp_path) == [".preparing.lock"]
