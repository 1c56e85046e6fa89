import asyncio
import gc
import json
import os
import pickle
import socket
import socketserver
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from support.clock import Clock

from helpers import config, simulate
from helpers.data import stores
from helpers.simulate import link as link_module

FAST = {"first_byte_ms": 0, "mb_per_s": 10_000}


class Lines(socketserver.StreamRequestHandler):
    """Answers a line with a number by so many bytes, and any other line by itself."""

    def handle(self):
        for line in self.rfile:
            self.server.received.append(line)
            self.wfile.write(b"x" * int(line) if line.strip().isdigit() else line)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Lines)
        self.received, self.connections = [], []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request, address):
        self.connections.append(request)
        super().process_request(request, address)

    def handle_error(self, *_):
        """Print nothing about a connection that broke."""

    def go_away(self):
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with connection:
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server():
    with Server() as server:
        yield server
        server.shutdown()


def connected(link):
    return socket.create_connection(("127.0.0.1", int(link.endpoint.rpartition(":")[2])))


def ask(connection, line, size):
    """Send a line, and return the answer, which has so many bytes."""
    connection.sendall(line + b"\n")
    return connection.recv(size, socket.MSG_WAITALL)


def wait_until_gone(process):
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------------- the dials


def test_a_link_takes_the_first_byte_and_the_size_by_the_bandwidth(tmp_path):
    store = simulate.SlowStore(None, first_byte_ms=30, mb_per_s=90)
    assert store.seconds(1, 0) == 0.03
    assert store.seconds(1, 90e6) == pytest.approx(1.03)
    assert store.seconds(10, 90e6) == pytest.approx(1.3)
    assert store.seconds(10, 90e6, connections=5) == pytest.approx(0.26)
    assert store.seconds(11, 99e6, connections=5) == pytest.approx(3 * (0.03 + 0.1))
    assert store.seconds(0, 0) == 0


@pytest.mark.parametrize("dials", [(-1, 90), (30, 0)])
def test_a_link_that_cannot_exist_is_refused(dials):
    with pytest.raises(ValueError, match="0 ms or more and more than 0 MB/s"):
        simulate.SlowStore(None, *dials)


@pytest.mark.parametrize("endpoint", ["https://store.example", "127.0.0.1:8333", "http://127.0.0.1"])
def test_a_link_needs_a_server_with_http_and_a_port(endpoint):
    with pytest.raises(ValueError, match="such as http://127.0.0.1:8333, found"):
        simulate.Link(endpoint)


def proxied(monkeypatch, chunks, **dials):
    """Pass chunks, each there after so many seconds, through the link; when each arrived, on a simulated clock."""
    clock, arrived = Clock(monkeypatch, simulate), []

    async def sleep(seconds):
        clock.sleep(max(seconds, 0) + (link_module._LATE if seconds > 0 else 0))

    async def read(_):
        if not chunks:
            return b""
        seconds, data = chunks.pop(0)
        clock.now = max(clock.now, seconds)
        return data

    async def drain():
        pass

    monkeypatch.setattr(link_module.asyncio, "sleep", sleep)
    proxy = link_module._Proxy("127.0.0.1", "9", *map(str, dials.values()))
    client = SimpleNamespace(write=lambda data: arrived.append((round(clock.now, 6), len(data))), drain=drain)
    asyncio.run(proxy.download([1.0], SimpleNamespace(read=read), client))
    return arrived


def test_an_answer_arrives_when_the_formula_says(monkeypatch):
    chunks = [(1.002, b"x" * 50_000)] + [(1.003, b"x" * 50_000)] * 9
    arrived = proxied(monkeypatch, chunks, first_byte_ms=30, mb_per_s=1)
    assert arrived[0] == (1.08, 50_000)  # asked at 1.0, the last byte of this chunk 50 ms after the first one
    assert arrived[-1] == (1.53, 50_000)


def test_a_server_that_is_slower_than_the_link_is_not_made_faster(monkeypatch):
    chunks = [(2.0, b"x" * 50_000), (5.0, b"x" * 50_000)]
    arrived = proxied(monkeypatch, chunks, first_byte_ms=30, mb_per_s=1)
    assert arrived == [(2.05, 50_000), (5.03, 50_000)]  # it catches up with 20 ms, and no more


# ------------------------------------------------------------------------------------------------------------ the link


@pytest.mark.processes
def test_requests_connections_and_bytes_are_counted(server):
    with simulate.Link(server.endpoint, **FAST) as link:
        assert link.counts() == (0, 0, 0)
        with connected(link) as first, connected(link) as second:
            for size in (10, 200_000, 1):
                assert ask(first, b"%d" % size, size) == b"x" * size
            before = link.counts()
            assert before == (3, 1, 200_011)
            ask(second, b"7", 7)
        assert link.counts() == (4, 2, 200_018)
        assert link.counts().since(before) == (1, 1, 7)


@pytest.mark.processes
def test_a_request_in_several_pieces_is_one_request(server):
    with simulate.Link(server.endpoint, **FAST) as link, connected(link) as connection:
        connection.sendall(b"1")
        while not link.counts().requests:
            time.sleep(0.01)
        assert ask(connection, b"00", 100) == b"x" * 100
        assert link.counts() == (1, 1, 100)


@pytest.mark.processes
def test_what_is_sent_arrives_as_it_was_sent(server):
    request = b"GET /course/a HTTP/1.1 Host: 127.0.0.1:1 " + os.urandom(3_000_000).replace(b"\n", b"")
    with simulate.Link(server.endpoint, **FAST) as link, connected(link) as connection:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(connection.recv, len(request), socket.MSG_WAITALL)
            connection.sendall(request + b"\n")
            assert answer.result() == request
    assert server.received == [request + b"\n"]


@pytest.mark.processes
def test_each_connection_has_the_bandwidth_for_itself(server):
    with simulate.Link(server.endpoint, first_byte_ms=0, mb_per_s=1) as link:
        with connected(link) as busy, connected(link) as other:
            busy.sendall(b"1000000000\n")  # takes a quarter of an hour
            assert busy.recv(1)
            assert ask(other, b"300000", 300_000) == b"x" * 300_000
            assert link.counts().bytes < 1_000_000_000


@pytest.mark.processes
def test_when_the_server_goes_away_connections_break_and_when_it_is_back_new_ones_work(server):
    with simulate.Link(server.endpoint, first_byte_ms=0, mb_per_s=10) as link:
        with connected(link) as idle, connected(link) as busy:
            ask(idle, b"5", 5)
            busy.sendall(b"1000000000\n")
            assert busy.recv(1)
            server.go_away()
            assert idle.recv(10) == b""
            while busy.recv(1_000_000):  # ends long before all has come
                pass
        with connected(link) as refused:
            refused.sendall(b"5\n")
            assert refused.recv(10) == b""
        with Server(server.server_address[1]) as again, connected(link) as connection:
            assert ask(connection, b"5", 5) == b"xxxxx"
            again.shutdown()


@pytest.mark.processes
def test_a_client_that_goes_away_ends_its_connection_to_the_server(server):
    with simulate.Link(server.endpoint, first_byte_ms=0, mb_per_s=1) as link:
        with connected(link) as connection:
            connection.sendall(b"1000000000\n")
            assert connection.recv(1)
        before = link.counts().bytes
        (upstream,) = server.connections
        while upstream.fileno() >= 0:  # its handler ends, since nobody reads any more
            time.sleep(0.01)
        assert link.counts().bytes - before < 100_000_000


@pytest.mark.processes
def test_a_link_is_named_with_its_settings(server):
    with simulate.Link(server.endpoint, first_byte_ms=4, mb_per_s=85.5) as link:
        assert str(link) == "simulated link (4 ms to the first byte, 85.5 MB/s a connection)"


@pytest.mark.processes
def test_a_link_ends_when_it_is_stopped_and_when_nobody_has_it_any_more(server):
    links = [simulate.Link(server.endpoint) for _ in range(2)]
    stopped, forgotten = (psutil.Process(link._process.pid) for link in links)
    links[0].stop()
    links[0].stop()
    assert not stopped.is_running()
    links.clear()
    gc.collect()
    wait_until_gone(forgotten)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_killed_notebook_leaves_no_link_though_its_workers_live():
    script = """
import json, os, time
from helpers.simulate.link import Link

link = Link("http://127.0.0.1:9")
worker = os.fork()
if worker:
    print(json.dumps([link._process.pid, worker]), flush=True)
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=config.PROJECT)
    link, worker = (psutil.Process(number) for number in json.loads(process.stdout.readline()))
    try:
        process.kill()
        process.wait()
        wait_until_gone(link)
        assert worker.is_running()
    finally:
        worker.kill()


@pytest.mark.processes
@pytest.mark.skipif(not stores.available(), reason="there is no package of the server for this machine")
def test_a_signed_request_through_a_link_is_answered(tmp_path):
    with stores.serve(tmp_path) as server, simulate.Link(server.bucket.endpoint, **FAST) as link:
        store = server.bucket.through(link).connect()
        store.put("a", b"0123456789" * 1_000_000)
        assert bytes(store.get_range("a", start=5_000_003, end=5_000_006)) == b"345"
        server.restart()
        before = link.counts()
        assert bytes(store.get("a").bytes()) == b"0123456789" * 1_000_000
        passed = link.counts().since(before)
        assert (passed.requests, passed.connections) == (1, 1)
        assert 10_000_000 < passed.bytes < 10_001_000  # with the head


# ------------------------------------------------------------------------------------------------ the store with dials


@pytest.fixture
def folder(tmp_path):
    folder = stores.Folder(tmp_path)
    folder.connect().put("alphabet", b"abcdefghij" * 100)
    return folder


def test_a_slow_store_answers_when_the_formula_says(folder, monkeypatch):
    clock = Clock(monkeypatch, simulate)
    store = simulate.SlowStore(folder, first_byte_ms=30, mb_per_s=0.001).connect()
    assert bytes(store.get_range("alphabet", start=0, end=10)) == b"abcdefghij"
    assert clock.now == pytest.approx(0.03 + 0.01)
    assert bytes(store.get("alphabet").bytes()) == b"abcdefghij" * 100
    assert clock.now == pytest.approx(0.04 + 1.03)
    store.put("b", b"x" * 100)
    assert clock.now == pytest.approx(1.07 + 0.13)
    assert sorted(entry["path"] for page in store.list() for entry in page) == ["alphabet", "b"]
    assert clock.now == pytest.approx(1.2 + 0.03)


def test_a_slow_store_counts_requests_and_bytes_and_each_thread_as_a_connection(folder):
    slow = simulate.SlowStore(folder, **FAST)
    store = slow.connect()
    store.get("alphabet")
    both = threading.Barrier(2)

    def read(number):
        both.wait()
        return store.get_range("alphabet", start=number, length=7)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(read, range(2)))
    assert slow.counts() == store.counts() == (3, 3, 1014)


def test_a_slow_store_can_be_pickled_before_it_is_connected(folder):
    store = pickle.loads(pickle.dumps(simulate.SlowStore(folder, **FAST))).connect()
    assert len(store.get_range("alphabet", start=990, end=1000)) == 10
    assert str(store) == "simulated link (0 ms to the first byte, 10000 MB/s a connection)"
