"""Answers to a browser: pages that run only the scripts they came with, and files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

SCRIPT = re.compile(rb"<script[^>]*>(.+?)</script>", re.DOTALL)


def page(start_response: Callable, text: bytes) -> list[bytes]:
    """Answer with a page, which may run its own scripts and load files of this server, and nothing else.

    So a name in a trace cannot run as script even where a page takes it for HTML, and no address abroad is asked.
    """
    hashes = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in SCRIPT.findall(text))
    scripts = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = (
        f"default-src 'self'; script-src 'self' 'unsafe-eval' {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'"
    )
    return content(start_response, text, "text/html; charset=utf-8", [("Content-Security-Policy", policy)])


def content(
    start_response: Callable, body: bytes, kind: str, headers: Sequence[tuple[str, str]] = (), *, status: str = "200 OK"
) -> list[bytes]:
    """Answer with `body`, whose type is `kind`."""
    common = [("Content-Type", kind), ("Content-Length", str(len(body))), ("X-Content-Type-Options", "nosniff")]
    start_response(status, [*common, *headers])
    return [body]


def read(name: str) -> bytes:
    """Return the content of a file in this folder."""
    return Path(__file__).with_name(name).read_bytes()


def script(name: str) -> bytes:
    """Return a file of this folder as a script within a page."""
    return b"<script>" + read(name) + b"</script>"


def replace(text: bytes, old: bytes, new: bytes) -> bytes:
    """Return `text` with `new` in the place of `old`, which is there once."""
    if text.count(old) != 1:
        raise ValueError(f"The page to correct should have {old.decode()!r} once; it is there {text.count(old)} times.")
    return text.replace(old, new)
