"""Where objects live: a bucket of an S3 store, or a folder in its place; and what their errors mean.

The client, obstore, repeats a request that got no answer, was cut off, or met a busy server: for `PATIENCE` seconds,
with growing pauses.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import LocalStore, S3Store

if TYPE_CHECKING:  # obstore has these names for type checkers only
    from obstore.store import BackoffConfig, ClientConfig, S3Credential

PATIENCE = 120.0  # seconds


class StoreError(OSError):
    """A store does not start or answer, or refuses the credentials or the request; the message says which."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of an S3 store. Its keys are never shown. It can be pickled, and opens nothing before `connect`."""

    endpoint: str
    name: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    region: str = "us-east-1"
    session_token: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.name}"

    def connect(self) -> S3Store:
        """Return a client for this process: call it after a fork, never before.

        Raises `RuntimeError` if this process is a fork of one that had used a client.
        """
        _check_fork(self)
        pauses: BackoffConfig = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
        key: S3Credential = {"access_key_id": self.access_key, "secret_access_key": self.secret_key, "expires_at": None}
        options: ClientConfig = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "1h"}  # 30 s without a byte
        host = urlsplit(self.endpoint).hostname
        if host == "127.0.0.1":  # no proxy of the environment leads here
            options |= {"proxy_url": f"http://{host}:9", "proxy_excludes": host}
        # obstore takes missing settings from variables such as AWS_SESSION_TOKEN, and AWS_ENDPOINT_URL_S3 even replaces
        # the given endpoint (0.12.1).
        return S3Store(
            self.name, endpoint=self.endpoint, aws_endpoint_url_s3=self.endpoint, region=self.region,
            credential_provider=lambda: key | {"token": self.session_token or None}, skip_signature=False,
            client_options=options | {"allow_http": self.endpoint.startswith("http:")},
            virtual_hosted_style_request=False,
            retry_config={"max_retries": 1_000, "retry_timeout": timedelta(seconds=PATIENCE), "backoff": pauses},
        )  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """A folder whose files are the objects. It can be pickled, and opens nothing before `connect`."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def connect(self) -> LocalStore:
        """Return a client for this process, and make the folder if there is none; raises as that of `Bucket`."""
        _check_fork(self)
        return LocalStore(str(self.path), mkdir=True)


@contextmanager
def request(what: str) -> Iterator[None]:
    """Translate the client's errors: StoreError, or FileNotFoundError if there is no such object or bucket.

    `what` says what is requested, and where.
    """
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        text = str(error).strip() or type(error).__name__
        message = re.search(r"<Message>(.+?)</Message>", text)
        said = f"It says: {message[1] if message else text.splitlines()[0]}"
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(f"{what}: not in the store. {said}") from error
        # 408 and 429 mean that the store is busy, as 500 and more do
        if isinstance(error, exceptions.PermissionDeniedError) or re.search(r"status code: 4(?!08|29)", text):
            raise StoreError(
                f"{what}: the store refuses this. Expected the keys of a user who may do it, and the bucket's own "
                f"endpoint and region. {said}"
            ) from error
        raise StoreError(
            f"{what}: expected an answer from the store, found none for {PATIENCE:g} s. Is it running? {said}"
        ) from error


_user: int | None = None  # the process that used a client first; a forked child inherits the number


def _check_fork(place: Bucket | Folder) -> None:
    """Refuse a fork of a process that used a client: a fork lacks its threads, and requests would wait for them."""
    global _user
    if _user not in (None, os.getpid()):
        raise RuntimeError(
            f"{place}: expected a process that began without an object store, found a fork of process {_user}, which "
            "had used one: its requests would hang. Start the workers anew: DataLoader(…, "
            "multiprocessing_context='forkserver'), or 'spawn', the only one on Windows."
        )
    _user = os.getpid()
