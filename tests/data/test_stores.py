import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from filelock import FileLock

from helpers import config
from helpers.data import stores

needs_server = pytest.mark.skipif(not stores.available(), reason="there is no package of the server for this machine")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")

BUCKET = stores.Bucket("http://127.0.0.1:9", "course", "an-access-key", "a-secret-key", session_token="a-token")
OWN = {
    "S3_ENDPOINT": "https://store.example/",
    "S3_BUCKET": "mine",
    "AWS_ACCESS_KEY_ID": "an-access-key",
    "AWS_SECRET_ACCESS_KEY": "a-secret-key",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with stores.serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def no_own_store(monkeypatch):
    monkeypatch.delenv("S3_ENDPOINT", raising=False)


def processes_of(server):
    """The process that watches a server, and the server."""
    watcher = psutil.Process(server._watcher.pid)
    return [watcher, *watcher.children(recursive=True)]


def wait_until_gone(processes):
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        time.sleep(0.02)


def run(code, *arguments):
    """Run a script of its own, in which nothing has used obstore."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, cwd=config.PROJECT)
    return process, lambda: json.loads(process.stdout.readline())


# ------------------------------------------------------------------------------------------------- buckets and folders


def test_a_bucket_never_shows_its_keys():
    for shown in (str(BUCKET), repr(BUCKET), f"{BUCKET}"):
        assert "http://127.0.0.1:9" in shown and "course" in shown
        assert not any(key in shown for key in ("an-access-key", "a-secret-key", "a-token"))


def test_a_bucket_through_a_link_has_only_another_endpoint():
    through = BUCKET.through(SimpleNamespace(endpoint="http://127.0.0.1:10"))
    assert through == replace(BUCKET, endpoint="http://127.0.0.1:10")


@pytest.mark.parametrize("place", [BUCKET, stores.Folder(Path("objects"))], ids=["bucket", "folder"])
def test_a_place_survives_pickling(place):
    assert pickle.loads(pickle.dumps(place)) == place


def test_a_folder_holds_objects_and_is_made_when_it_is_connected(tmp_path):
    folder = stores.Folder(tmp_path / "new" / "objects")
    assert not folder.path.exists()
    folder.connect().put("a/b", b"content")
    assert (folder.path / "a" / "b").read_bytes() == b"content"
    assert str(folder) == str(tmp_path / "new" / "objects")


@pytest.mark.processes
def test_a_request_is_not_repeated():
    with socket.create_server(("127.0.0.1", 0)) as refusing, ThreadPoolExecutor(1) as thread:
        store = replace(BUCKET, endpoint=f"http://127.0.0.1:{refusing.getsockname()[1]}").connect()
        failing = thread.submit(store.get, "a")
        connection, _ = refusing.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        with pytest.raises(Exception, match="503"):
            failing.result()
        refusing.setblocking(False)
        with pytest.raises(BlockingIOError):
            refusing.accept()


# ----------------------------------------------------------------------------------------------- the reader's own store


def test_without_a_variable_there_is_no_store_of_the_readers_own(no_own_store):
    assert config.s3() is None


def test_the_variables_name_the_readers_own_store(monkeypatch):
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    expected = stores.Bucket("https://store.example", "mine", "an-access-key", "a-secret-key")
    assert stores.Bucket(**config.s3()) == expected
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    assert stores.Bucket(**config.s3()) == replace(expected, region="eu-north-1", session_token="a-token")


@pytest.mark.parametrize("missing", list(OWN)[1:])
def test_a_missing_variable_is_named(monkeypatch, missing):
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=missing):
        config.s3()


def test_the_course_uses_the_readers_own_store(monkeypatch, tmp_path, capsys):
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    place, server = stores.course_store(tmp_path / "objects")
    assert (place.name, server) == ("mine", None)
    assert capsys.readouterr().out == "Objects: https://store.example/mine (your own store).\n"
    assert not list(tmp_path.iterdir())


def test_the_course_uses_a_folder_where_there_is_no_server(monkeypatch, tmp_path, capsys, no_own_store):
    monkeypatch.setattr(stores, "available", lambda: False)
    place, server = stores.course_store(tmp_path / "objects")
    assert (place, server) == (stores.Folder(tmp_path / "objects"), None)
    assert f"Objects: {tmp_path / 'objects'} (a folder" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------- ports


def test_thirty_servers_have_ports_of_their_own():
    reserved = [stores._reserve_ports() for _ in range(30)]
    ports = {port for _, first in reserved for port in range(first, first + stores._BLOCKS.step)}
    assert len(ports) == 30 * stores._BLOCKS.step
    assert max(ports) + stores._GRPC < 32768  # where Linux begins to give ports to outgoing connections
    for guard, _ in reserved:
        guard.close()


@pytest.mark.parametrize("offset", [0, 4, stores._GRPC])
def test_a_block_with_a_port_that_is_taken_is_passed_over(monkeypatch, offset):
    guard, first = stores._reserve_ports()
    monkeypatch.setattr(stores, "_BLOCKS", range(first, first + 10, 10))
    with pytest.raises(stores.ServerFailed, match="found none"):
        stores._reserve_ports()
    guard.close()
    with socket.create_server(("127.0.0.1", first + offset)):
        with pytest.raises(stores.ServerFailed, match="found none"):
            stores._reserve_ports()
    guard, again = stores._reserve_ports()
    guard.close()
    assert again == first


# ---------------------------------------------------------------------------------------------------------- the server


def test_where_there_is_no_package_of_the_server_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(stores, "available", lambda: False)
    with pytest.raises(stores.ServerFailed, match="use a stores.Folder"):
        stores.serve(tmp_path)


@needs_server
@pytest.mark.processes
def test_a_range_is_answered_with_status_206(server):
    import obstore

    store = server.bucket.connect()
    store.put("alphabet", b"abcdefghij")
    assert bytes(store.get_range("alphabet", start=2, end=5)) == b"cde"
    url = obstore.sign(store, "GET", "alphabet", timedelta(minutes=5))
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=2-4"})) as answer:
        assert (answer.status, answer.read()) == (206, b"cde")


@needs_server
@pytest.mark.processes
@pytest.mark.parametrize("wrong", [{"secret_key": "guessed"}, {"access_key": "guessed"}], ids=["secret", "name"])
def test_wrong_credentials_are_refused(server, wrong):
    server.bucket.connect().put("private", b"content")
    with pytest.raises(Exception, match="403"):
        replace(server.bucket, **wrong).connect().get("private")


@needs_server
@pytest.mark.processes
def test_settings_for_other_stores_change_nothing(server, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_SESSION_TOKEN": "of-another-store",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "http_proxy": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    store = server.bucket.connect()
    store.put("here", b"content")
    assert bytes(store.get("here").bytes()) == b"content"
    server.restart()
    assert bytes(store.get("here").bytes()) == b"content"


@needs_server
@pytest.mark.processes
def test_a_server_that_is_killed_and_restarted_has_its_objects_and_its_address(server):
    before, store = server.bucket, server.bucket.connect()
    contents = {f"object-{number}": os.urandom(100_000 * number + 1) for number in range(20)}
    for name, content in contents.items():
        store.put(name, content)
    server.kill()
    with pytest.raises(Exception, match="error sending request"):
        store.get("object-0")
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
def test_a_started_server_is_not_started_twice(server):
    before = processes_of(server)
    assert server.start() is server
    assert processes_of(server) == before


@needs_server
@pytest.mark.processes
def test_the_next_server_in_a_folder_has_the_objects_of_the_one_before(tmp_path, no_own_store, capsys):
    with stores.serve(tmp_path) as server:
        server.bucket.connect().put("a", b"content")
        old = processes_of(server)
    wait_until_gone(old)
    assert not stores._socket_files(int(server.bucket.endpoint[-5:]))
    place, server = stores.course_store(tmp_path)
    assert capsys.readouterr().out == f"Objects: {place} (SeaweedFS on this machine).\n"
    assert bytes(place.connect().get("a").bytes()) == b"content"
    new = processes_of(server)
    del server
    gc.collect()
    wait_until_gone(new)  # nobody can reach it any more


@needs_server
@pytest.mark.processes
def test_a_cell_that_runs_again_gets_a_new_server_with_the_same_objects(tmp_path):
    server = stores.serve(tmp_path)
    server.bucket.connect().put("a", b"content")
    old = processes_of(server)
    server = stores.serve(tmp_path)
    wait_until_gone(old)
    assert bytes(server.bucket.connect().get("a").bytes()) == b"content"
    server.stop()


@needs_server
@pytest.mark.processes
def test_a_folder_in_which_another_process_serves_is_left_alone(tmp_path):
    with FileLock(tmp_path / "server.lock"):  # as that process has it
        with pytest.raises(stores.ServerFailed, match="server.lock"):
            stores.Server(tmp_path).start()
    assert not (tmp_path / "objects").exists()


@needs_server
@pytest.mark.processes
def test_several_servers_start_at_once_and_each_has_its_own_objects(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        servers = list(threads.map(lambda number: stores.serve(tmp_path / str(number)), range(4)))
    try:
        for number, server in enumerate(servers):
            server.bucket.connect().put("number", str(number).encode())
        found = [bytes(server.bucket.connect().get("number").bytes()) for server in servers]
        assert found == [b"0", b"1", b"2", b"3"]
    finally:
        for server in servers:
            server.stop()


@needs_server
@pytest.mark.processes
def test_a_port_that_is_taken_at_the_last_moment_costs_another_attempt(tmp_path, monkeypatch):
    reserve, taken = stores._reserve_ports, []

    def reserve_and_take():
        guard, first = reserve()
        if not taken:
            taken.append(socket.create_server(("127.0.0.1", first + 2)))
        return guard, first

    monkeypatch.setattr(stores, "_reserve_ports", reserve_and_take)
    with stores.serve(tmp_path) as server, taken[0]:
        server.bucket.connect().put("a", b"content")


@needs_server
@pytest.mark.processes
def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "objects").write_text("a file, where its folder should be")
    with pytest.raises(stores.ServerFailed, match=r"server.log, ends:\n(.*\n)*.*objects"):
        stores.serve(tmp_path)


SERVE = """
import json, os, sys, time
from helpers.data import stores

server = stores.serve(sys.argv[1])
"""


@needs_server
@needs_fork
@pytest.mark.processes
def test_a_worker_forked_after_the_start_can_use_the_store(tmp_path):
    worker = """
if os.fork() == 0:
    server.bucket.connect().put("a", b"content")
    print(json.dumps(str(bytes(server.bucket.connect().get("a").bytes()), "ascii")), flush=True)
    os._exit(0)
os.wait()
server.stop()
"""
    process, said = run(SERVE + worker, str(tmp_path))
    assert said() == "content"
    assert process.wait() == 0


@needs_server
@needs_fork
@pytest.mark.processes
def test_a_killed_notebook_leaves_no_server_though_its_workers_live(tmp_path):
    workers = """
worker = os.fork()
if worker:
    print(json.dumps([server._watcher.pid, worker]), flush=True)
time.sleep(1000)
"""
    process, said = run(SERVE + workers, str(tmp_path))
    watcher, worker = (psutil.Process(number) for number in said())
    serving = [watcher, *watcher.children()]
    assert len(serving) == 2
    try:
        process.kill()
        process.wait()
        wait_until_gone(serving)
        assert worker.is_running()
    finally:
        worker.kill()


@needs_server
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_not_even_a_killed_watcher_leaves_a_server(tmp_path):
    with stores.serve(tmp_path) as server:
        serving = processes_of(server)
        os.kill(serving[0].pid, signal.SIGKILL)
        wait_until_gone(serving)
        server.restart()
        server.bucket.connect().put("a", b"content")
