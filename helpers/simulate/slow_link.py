"""A simulated link: an object store on this machine that seems far away.

This file also runs as the link's process. It imports nothing of `helpers` at its top, since PyTorch would come with
it: 200 MB, and seconds of start-up.
"""

import asyncio
import json
import math
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from stepscope.base import child

_CHUNK = 128 * 1024  # bytes that arrive at once: 1.5 ms at 90 MB/s
_LATE = 0.0005  # seconds by which a sleep is too long on average: it ends at a full millisecond
_FORGIVEN = 0.02  # seconds that a connection catches up after its process had to wait for a core
_QUESTION = b"COUNTS\n"  # for `Link.counts`; no HTTP request begins so


class Counts(NamedTuple):
    """What passed so far: requests, connections that made one, and bytes that came back."""

    requests: int
    connections: int
    bytes: int

    def since(self, before: Self) -> Self:
        """Return what passed after `before`."""
        return type(self)(*(now - then for now, then in zip(self, before, strict=True)))


class Dials:
    """Time to the first byte and bandwidth, and the time that requests take with them."""

    def __init__(self, first_byte_ms: float, mb_per_s: float):
        if first_byte_ms < 0 or mb_per_s <= 0:
            raise ValueError(f"Expected 0 ms or more and more than 0 MB/s, found {first_byte_ms} and {mb_per_s}.")
        self.first_byte_ms, self.mb_per_s = first_byte_ms, mb_per_s

    def __str__(self) -> str:
        return f"simulated link ({self.first_byte_ms:g} ms to the first byte, {self.mb_per_s:g} MB/s a connection)"

    def seconds(self, requests: int, size: float, connections: int = 1) -> float:
        """Return how long `requests` of equal size take for `size` bytes in all: first bytes, and size ÷ bandwidth."""
        one = self.first_byte_ms / 1e3 + size / max(requests, 1) / (self.mb_per_s * 1e6)
        return math.ceil(requests / connections) * one


class Link(Dials, AbstractContextManager):
    """A slow link in front of a server: a small proxy in its own process, which ends with this one.

    The first byte of an answer arrives `first_byte_ms` after the request, or later if the server is slower; then every
    connection has `mb_per_s` for itself, in each direction. Opening a connection costs nothing. Bytes are passed on
    unchanged, so signatures hold. If the server stops, its connections are closed; when it is back, new ones work.

    Parameters
    ----------
    endpoint : str
        The server's, such as ``"http://127.0.0.1:8333"``; the attribute `endpoint` is the link's.
    first_byte_ms, mb_per_s : float
        Assumed. AWS names 100 to 200 ms and 85 to 90 MB/s for S3 (notebook 14 has the sources).
    """

    def __init__(self, endpoint: str, first_byte_ms: float = 30, mb_per_s: float = 90):
        super().__init__(first_byte_ms, mb_per_s)
        server = urlsplit(endpoint)
        if server.scheme != "http" or not server.port:
            raise ValueError(f"Expected an endpoint such as http://127.0.0.1:8333, found {endpoint!r}.")
        arguments = [__file__, server.hostname, server.port, first_byte_ms, mb_per_s]
        self._child = child.Child(arguments, stdout=subprocess.PIPE)
        assert self._child.process.stdout is not None  # a pipe
        self._port = int(self._child.process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """End the link; its connections break."""
        self._child.stop()

    def counts(self) -> Counts:
        """Return what passed so far; its `bytes` include the headers of answers, some 300 bytes each."""
        link = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        with link, link.makefile("rb") as answer:
            link.sendall(_QUESTION)
            return Counts(*json.load(answer))


class _Proxy:
    def __init__(self, host: str, port: str, first_byte_ms: str, mb_per_s: str):
        self.server = host, int(port)
        self.first_byte, self.per_second = float(first_byte_ms) / 1e3, float(mb_per_s) * 1e6
        self.requests = self.connections = self.bytes = 0

    async def run(self) -> None:
        child.end_with_owner()
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=4 * _CHUNK)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Serve a connection until one side closes it."""
        writers, tasks = [to_client], []
        with suppress(OSError):  # the server or the client is away
            first = await client.read(_CHUNK)
            if first == _QUESTION:
                to_client.write(json.dumps([self.requests, self.connections, self.bytes]).encode())
            elif first:
                self.connections += 1
                server, to_server = await asyncio.open_connection(*self.server, limit=4 * _CHUNK)
                writers.append(to_server)
                asked: list[float] = []  # when the unanswered request arrived
                ways = self.upload(asked, first, client, to_server), self.download(asked, server, to_client)
                tasks = [asyncio.create_task(each) for each in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()

    async def upload(self, asked: list[float], data: bytes, client, to_server) -> None:
        free = 0.0
        while data:
            if not asked:  # the client's first bytes after an answer are a request: HTTP/1.1 takes turns
                asked.append(free := time.monotonic())
                self.requests += 1
            free = await self.send(data, to_server, free)
            if asked:
                asked[0] = free
            data = await client.read(_CHUNK)

    async def download(self, asked: list[float], server, to_client) -> None:
        free = 0.0
        while data := await server.read(_CHUNK):
            if asked:
                free = max(asked.pop() + self.first_byte, time.monotonic())
            free = await self.send(data, to_client, free)
            self.bytes += len(data)

    async def send(self, data: bytes, writer: asyncio.StreamWriter, free: float) -> float:
        """Send `data` when a connection that is free from `free` on has transferred it; return that moment."""
        free = max(free, time.monotonic() - _FORGIVEN) + len(data) / self.per_second
        await asyncio.sleep(free - time.monotonic() - _LATE)
        writer.write(data)
        await writer.drain()
        return free


if __name__ == "__main__":
    asyncio.run(_Proxy(*sys.argv[1:]).run())
