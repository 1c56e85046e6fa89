"""Starts, shows and stops real TensorBoards, and asks them over HTTP."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from support.asking import overview
from support.written import on_a_gpu, two_steps, write

from stepscope import tensorboard

pytestmark = pytest.mark.processes

NOBODY = 65534  # the number of a user who owns nothing
RUNS = ["damaged", "gpu", "one", "other"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for run, events in (("gpu", on_a_gpu()), ("one", two_steps()), ("other", two_steps())):
        (root / run).mkdir()
        write(root / run / "host_1.10.pt.trace.json", events)
    (root / "damaged").mkdir()
    (root / "damaged" / "host_1.10.pt.trace.json").write_text('{"traceEvents": [')
    return root


@pytest.fixture(scope="module")
def server(logdir):
    started = tensorboard.start(logdir)
    yield started
    started.stop()


def wait_for_the_end(url):
    """Return when nobody listens at `url` any more."""
    address = urlsplit(url)
    with pytest.raises(ConnectionError):
        while True:
            socket.create_connection((address.hostname, address.port), timeout=60).close()
            time.sleep(0.1)


ASKED_FOR = metadata.entry_points(group="tensorboard_plugins", name="corrected_profiler")


@pytest.mark.skipif(not ASKED_FOR, reason="this environment does not ask for corrections of every TensorBoard")
def test_any_tensorboard_is_corrected_in_an_environment_that_asks_for_it(logdir, tmp_path):
    own = {"TMPDIR": str(tmp_path)}  # it ends where it may not write into the one that all users share
    plain = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir / "one"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | own | {"TORCH_PROFILER_START_METHOD": "spawn", "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    try:
        url = next(re.search(r"http://\S+", line)[0] for line in plain.stdout if " at http://" in line)
        server = tensorboard.Server(logdir, ("one",), url, None, logdir)
        while not server.get("runs")["runs"]:
            time.sleep(0.1)
        assert [categories["DataLoader"] for _, categories in overview(server, "one")] == [300, 0]
    finally:
        plain.terminate()
        plain.wait(120)
        plain.stdout.close()


@pytest.mark.parametrize("page", ["", f"{tensorboard.PLUGIN}/runs"])
def test_without_the_secret_path_nothing_is_read(server, page):
    url = urlsplit(server.url)
    assert urllib.request.urlopen(server.url + page).status == 200
    for path in ("/", url.path[:-2] + "/"):
        with pytest.raises(HTTPError, match="404"):
            urllib.request.urlopen(f"http://{url.netloc}{path}{page}")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can look as another user does")
def test_no_other_user_of_the_machine_finds_the_secret_path(logdir, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # for this server alone: to look through that of all takes long
        Path(folder).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        server = tensorboard.start(logdir / "gpu")
        of_processes = [str(path) for name in ("cmdline", "environ") for path in Path("/proc").glob(f"[0-9]*/{name}")]
        look = ["grep", "-rlsFf", "-", "--devices=skip", *of_processes, folder]
        found = [
            subprocess.run(look, input=urlsplit(server.url).path, stdout=subprocess.PIPE, text=True, **user).stdout
            for user in ({}, {"user": NOBODY, "group": NOBODY, "extra_groups": []})
        ]
        server.stop()
    assert str(server.folder / "address") in found[0]
    assert not found[1]


def test_a_damaged_trace_is_named(server, capsys):
    tensorboard._announce(server)
    assert "The trace of damaged could not be read" in capsys.readouterr().out


HANGS = "from stepscope.base import child\nchild.end_with_owner().join()"


@pytest.mark.parametrize(
    ("stand_in", "patience", "says"),
    [("raise ImportError('not today')", 120, "not today"), (HANGS, 0, "did not start")],
)
def test_a_tensorboard_that_does_not_start_is_ended_and_the_error_says_why(
    logdir, tmp_path, monkeypatch, stand_in, patience, says
):
    (tmp_path / "tensorboard.py").write_text(stand_in)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tensorboard, "TIMEOUT", patience)
    before = psutil.Process().children()
    with pytest.raises(tensorboard.TensorBoardFailed, match=says):
        tensorboard.start(logdir)
    assert psutil.Process().children() == before


def test_tensorboard_starts_where_the_path_of_temporary_files_is_too_long_for_sockets(logdir, tmp_path, monkeypatch):
    long = tmp_path / ("a-job's-own-folder" * 5)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = tensorboard.start(logdir / "gpu")
    assert server.get("runs")["runs"] == ["gpu"]
    server.stop()
    assert not server.folder.exists()


def test_showing_another_folder_replaces_only_the_previous_tensorboard(logdir, server):
    tensorboard.show(logdir / "other")
    before = tensorboard._shown
    tensorboard.show(logdir / "one")
    after = tensorboard._shown
    try:
        assert len({each.url for each in (server, before, after)}) == 3
        wait_for_the_end(before.url)
        assert not before.folder.exists()
        assert after.get("runs")["runs"] == ["one"]
    finally:
        tensorboard.stop()
    wait_for_the_end(after.url)
    assert server.get("runs")["runs"] == RUNS


def test_in_a_notebook_tensorboard_is_embedded_and_ends_with_the_kernel(logdir):
    shown = f"from stepscope import tensorboard\ntensorboard.show({str(logdir)!r})"
    cell = nbformat.v4.new_code_cell(f"{shown}\nprint(tensorboard._shown.url)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=280, startup_timeout=280).execute()
    outputs = notebook.cells[0].outputs
    line, *_, url = "".join(each["text"] for each in outputs if each["output_type"] == "stream").splitlines()
    page = next(each["data"]["text/html"] for each in outputs if each["output_type"] == "display_data")
    assert f"{url}#pytorch_profiler" in line
    assert f'<iframe src="{url}#pytorch_profiler"' in page
    wait_for_the_end(url)


def test_from_the_shell_tensorboard_runs_until_ctrl_c(logdir):
    command = [sys.executable, "-m", "stepscope", "tensorboard", str(logdir)]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = shell.stdout.readline().split()[-1]
    assert urllib.request.urlopen(url).status == 200
    shell.send_signal(signal.SIGINT)
    assert shell.wait(120) == 0
    wait_for_the_end(url)
    shell.stdout.close()


@pytest.mark.parametrize(
    ("variable", "value"),
    # The second without the slash that relative links need
    [("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/"), ("TENSORBOARD_PROXY_URL", "/user/ada/proxy/%PORT%")],
)
def test_behind_a_proxy_the_link_goes_through_the_proxy(server, hub, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    page, fragment = server.link.split("#")
    assert page.startswith("/user/ada/proxy/")
    assert fragment == "pytorch_profiler"
    assert "<title>TensorBoard</title>" in urllib.request.urlopen(hub + page).read().decode()
    runs = urllib.request.urlopen(f"{hub}{page}data/plugin/pytorch_profiler/runs").read().decode()
    assert RUNS[0] in runs


def test_in_colab_a_function_of_colab_shows_the_tab_without_an_address(logdir, server, monkeypatch, capsys):
    shown = []
    output = SimpleNamespace(serve_kernel_port_as_iframe=lambda port, **options: shown.append((port, options)))
    monkeypatch.setattr(tensorboard, "start", lambda logdir: server)
    monkeypatch.setattr(tensorboard, "_shown", None)
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(output=output))  # which exists only there
    tensorboard.show(logdir)
    url = urlsplit(server.url)
    assert shown == [(url.port, {"path": f"{url.path}#pytorch_profiler", "height": "800"})]
    printed = capsys.readouterr().out
    assert "Colab" in printed and "http" not in printed
