"""Where objects live: keys that are never shown, requests that are sent again, and what errors mean."""

import http.server
import pickle
import threading
import time
from dataclasses import replace

import pytest

from helpers.data import buckets

BUCKET = buckets.Bucket("http://127.0.0.1:9", "course", "an-access-key", "a-secret-key", session_token="a-token")


def test_a_place_survives_pickling_and_shows_no_key():
    assert pickle.loads(pickle.dumps(BUCKET)) == BUCKET
    assert not any(key in f"{BUCKET}{BUCKET!r}" for key in ("an-access-key", "a-secret-key", "a-token"))


CONTENT = bytes(range(250)) * 40


class Failing(http.server.BaseHTTPRequestHandler):
    """Answers each request by the next of the server's troubles, and rightly when there is none left."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        trouble = self.server.troubles.pop(0) if self.server.troubles else None
        self.server.requests += 1
        ranges = self.headers.get("Range")
        start, end = map(int, ranges.removeprefix("bytes=").split("-")) if ranges else (0, len(CONTENT) - 1)
        status, body = (206 if ranges else 200), CONTENT[start : end + 1]
        if isinstance(trouble, int):
            status, body = trouble, b"<Error><Message>Because of me.</Message></Error>"
        self.send_response(status)
        headers = {"Content-Length": len(body), "ETag": '"1"', "Last-Modified": "Tue, 24 Nov 2026 00:00:00 GMT"}
        for name, value in (headers | {"Content-Range": f"bytes {start}-{end}/{len(CONTENT)}"}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if trouble in ("cut", "hang") else body)
        if trouble == "hang":
            time.sleep(1)
        self.close_connection = trouble is not None

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def failing(monkeypatch):
    """A server with troubles, and its client, which does not wait 30 s for the next byte."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.troubles, server.requests = [], 0
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    make = buckets.S3Store

    def impatient(*arguments, **options):
        options["client_options"]["read_timeout"] = "0.3s"
        return make(*arguments, **options)

    monkeypatch.setattr(buckets, "S3Store", impatient)
    bucket = replace(BUCKET, endpoint=f"http://127.0.0.1:{server.server_port}")
    with server:
        yield server, bucket
        server.shutdown()


@pytest.mark.parametrize("trouble", [503, "cut", "hang"])
def test_a_store_that_is_busy_cut_off_or_hangs_is_asked_again(failing, trouble):
    server, bucket = failing
    server.troubles += [trouble] * 2
    with buckets.request("an object"):
        assert bytes(bucket.connect().get_range("a", start=1_000, end=9_000)) == CONTENT[1_000:9_000]
    assert server.requests >= 3


def test_a_store_that_goes_on_failing_is_an_error(failing, monkeypatch):
    server, bucket = failing
    monkeypatch.setattr(buckets, "PATIENCE", 0.5)
    server.troubles += ["cut"] * 1_000
    with pytest.raises(buckets.StoreError, match="^an object: .*0.5 s"):
        with buckets.request("an object"):
            bucket.connect().get_range("a", start=0, end=9_000)


@pytest.mark.parametrize(("status", "error"), [(403, buckets.StoreError), (404, FileNotFoundError)])
def test_a_refusal_is_an_error_at_once_in_the_words_of_the_store(failing, status, error):
    server, bucket = failing
    server.troubles += [status]
    with pytest.raises(error, match="^an object: .* It says: Because of me.$"), buckets.request("an object"):
        bucket.connect().get("a")
    assert server.requests == 1
