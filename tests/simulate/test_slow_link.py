import asyncio
import gc
import socket
import socketserver
import threading
from types import SimpleNamespace

import psutil
import pytest
from support.clock import Clock
from support.ranks import wait_until

from helpers import simulate
from helpers.data import s3_server
from helpers.simulate import slow_link

FAST = {"first_byte_ms": 0, "mb_per_s": 10_000}


class Lines(socketserver.StreamRequestHandler):
    """Answers a line with a number by so many bytes; after an odd number it ends the connection."""

    def handle(self):
        for line in self.rfile:
            self.wfile.write(b"x" * int(line))
            if int(line) % 2:
                break


@pytest.fixture
def server():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Lines) as server:
        server.daemon_threads = True
        server.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def connected(link):
    return socket.create_connection(("127.0.0.1", int(link.endpoint.rpartition(":")[2])))


def ask(connection, line, size):
    """Send a line, and return the answer, which has so many bytes."""
    connection.sendall(line + b"\n")
    return connection.recv(size, socket.MSG_WAITALL)


def proxied(monkeypatch, chunks, **dials):
    """Pass chunks, each there after so many seconds, through the link; when each arrived, on a simulated clock."""
    clock, arrived = Clock(monkeypatch, simulate), []

    async def sleep(seconds):
        clock.sleep(max(seconds, 0) + (slow_link._LATE if seconds > 0 else 0))

    async def read(_):
        if not chunks:
            return b""
        seconds, data = chunks.pop(0)
        clock.now = max(clock.now, seconds)
        return data

    async def drain():
        pass

    monkeypatch.setattr(slow_link.asyncio, "sleep", sleep)
    proxy = slow_link._Proxy("127.0.0.1", "9", *map(str, dials.values()))
    client = SimpleNamespace(write=lambda data: arrived.append((round(clock.now, 6), len(data))), drain=drain)
    asyncio.run(proxy.download([1.0], SimpleNamespace(read=read), client))
    return arrived


@pytest.mark.parametrize(
    ("chunks", "first", "last"),
    [  # asked at 1.0; the last byte of a chunk 50 ms after its first one
        ([(1.002, b"x" * 50_000)] + [(1.003, b"x" * 50_000)] * 9, 1.08, 1.53),
        ([(2.0, b"x" * 50_000), (5.0, b"x" * 50_000)], 2.05, 5.03),  # a slow server; the link catches up with 20 ms
    ],
)
def test_an_answer_arrives_when_the_formula_says_or_later_if_the_server_is_slower(monkeypatch, chunks, first, last):
    arrived = proxied(monkeypatch, chunks, first_byte_ms=30, mb_per_s=1)
    assert (arrived[0], arrived[-1]) == ((first, 50_000), (last, 50_000))


@pytest.mark.processes
def test_requests_connections_and_bytes_are_counted(server):
    with simulate.Link(server.endpoint, **FAST) as link:
        assert link.counts() == (0, 0, 0)
        with connected(link) as first, connected(link) as second:
            for size in (10, 200_000, 2):
                assert ask(first, b"%d" % size, size) == b"x" * size
            before = link.counts()
            assert before == (3, 1, 200_012)
            ask(second, b"8", 8)
        assert link.counts() == (4, 2, 200_020)
        assert link.counts().since(before) == (1, 1, 8)


@pytest.mark.processes
def test_when_the_server_ends_a_connection_or_is_gone_so_is_the_connection_to_the_link(server):
    with simulate.Link(server.endpoint, **FAST) as link:
        with connected(link) as connection:
            assert ask(connection, b"200001", 300_000) == b"x" * 200_001
        server.shutdown()
        server.server_close()
        with connected(link) as refused:
            assert ask(refused, b"4", 4) == b""


@pytest.mark.processes
def test_a_link_ends_when_it_is_stopped_and_when_nobody_has_it_any_more(server):
    links = [simulate.Link(server.endpoint) for _ in range(2)]
    stopped, forgotten = (psutil.Process(link._child.process.pid) for link in links)
    links[0].stop()
    links[0].stop()
    assert not stopped.is_running()
    links.clear()
    gc.collect()
    wait_until(lambda: not forgotten.is_running() or forgotten.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.processes
@pytest.mark.skipif(s3_server.program() is None, reason="there is no package of the server for this machine")
def test_a_signed_request_through_a_link_is_answered(tmp_path):
    with s3_server.Server(tmp_path) as server:
        far, link = simulate.far_away(server.bucket, **FAST)
        store = far.connect()
        store.put("a", b"0123456789" * 1_000_000)
        assert bytes(store.get_range("a", start=5_000_003, end=5_000_006)) == b"345"
        server.restart()
        before = link.counts()
        assert bytes(store.get("a").bytes()) == b"0123456789" * 1_000_000
        passed = link.counts().since(before)
        assert (passed.requests, passed.connections) == (1, 1)
        assert 10_000_000 < passed.bytes < 10_001_000  # with the head
        link.stop()
