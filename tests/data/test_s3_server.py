import gc
import os
import signal
import sys
import time

import psutil
import pytest
from filelock import FileLock

from helpers.data import buckets, s3_server

needs_server = pytest.mark.skipif(not s3_server.available(), reason="no package of the server for this machine")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server.serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def no_own_store(monkeypatch):
    monkeypatch.delenv("S3_ENDPOINT", raising=False)


def processes_of(server):
    """The process that watches a server, and the server."""
    watcher = psutil.Process(server._watcher.process.pid)
    return [watcher, *watcher.children(recursive=True)]


def wait_until_gone(processes):
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        time.sleep(0.02)


def test_the_course_uses_the_readers_own_store(monkeypatch, tmp_path, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "S3_BUCKET"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("S3_ENDPOINT", "https://store.example/")
    place, server = s3_server.course_store(tmp_path / "objects")
    assert (place.name, server) == ("mine", None)
    assert "https://store.example/mine" in capsys.readouterr().out


def test_the_course_uses_a_folder_where_there_is_no_server(monkeypatch, tmp_path, capsys, no_own_store):
    monkeypatch.setattr(s3_server, "available", lambda: False)
    place, server = s3_server.course_store(tmp_path / "objects")
    assert (place, server) == (buckets.Folder(tmp_path / "objects"), None)
    assert str(tmp_path / "objects") in capsys.readouterr().out


@needs_server
@pytest.mark.processes
def test_a_server_that_is_killed_and_restarted_has_its_objects_and_its_address(server):
    before, store = server.bucket, server.bucket.connect()
    contents = {f"object-{number}": os.urandom(100_000 * number + 1) for number in range(20)}
    for name, content in contents.items():
        store.put(name, content)
    server.kill()
    server.restart()
    assert server.bucket == before
    assert {name: bytes(store.get(name).bytes()) for name in contents} == contents


@needs_server
@pytest.mark.processes
def test_a_server_sends_no_telemetry_and_its_keys_are_in_no_list_of_processes(server):
    _, weed = processes_of(server)
    assert "-master.telemetry=false" in weed.cmdline()
    shown = " ".join(part for process in processes_of(server) for part in process.cmdline())
    assert server.bucket.secret_key not in shown and server.bucket.access_key not in shown


@needs_server
@pytest.mark.processes
def test_the_next_server_in_a_folder_has_the_objects_of_the_one_before(tmp_path, no_own_store):
    with s3_server.serve(tmp_path) as server:
        server.bucket.connect().put("a", b"content")
        old = processes_of(server)
    wait_until_gone(old)
    assert not s3_server._socket_files(int(server.bucket.endpoint[-5:]))
    place, server = s3_server.course_store(tmp_path)
    assert bytes(place.connect().get("a").bytes()) == b"content"
    new = processes_of(server)
    del server
    gc.collect()
    wait_until_gone(new)  # nobody can reach it any more


@needs_server
@pytest.mark.processes
def test_a_folder_in_which_another_process_serves_is_left_alone(tmp_path):
    with FileLock(tmp_path / "server.lock"):  # as that process has it
        with pytest.raises(buckets.StoreError, match="server.lock"):
            s3_server.Server(tmp_path).start()
    assert not (tmp_path / "objects").exists()


@needs_server
@pytest.mark.processes
def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "objects").write_text("a file, where its folder should be")
    with pytest.raises(buckets.StoreError, match=r"server.log, ends:\n(.*\n)*.*objects"):
        s3_server.serve(tmp_path)


@needs_server
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_not_even_a_killed_watcher_leaves_a_server(tmp_path):
    with s3_server.serve(tmp_path) as server:
        serving = processes_of(server)
        os.kill(serving[0].pid, signal.SIGKILL)
        wait_until_gone(serving)
        server.restart()
        server.bucket.connect().put("a", b"content")
