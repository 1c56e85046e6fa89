"""Tests of `helpers.tensorboard`: running TensorBoards, asked over HTTP."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from support import recordings
from support.asking import overview
from support.written import on_a_gpu, write

from helpers import config, tensorboard, traces
from helpers.tensorboard import corrections

pytestmark = pytest.mark.processes

RUNS = ["gpu", "two-workers", "zero-workers"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    recordings.record(root / "zero-workers", 0, spans=2)
    recordings.record(root / "two-workers", 2)
    (root / "gpu").mkdir()
    write(root / "gpu" / "host_1.10.pt.trace.json", on_a_gpu())
    return root


@pytest.fixture(scope="module")
def server(logdir):
    started = tensorboard.start(logdir)
    yield started
    started.stop()


def ends(url, seconds=120):
    """Whether nobody listens at `url` any more, after waiting for it."""
    address = urlsplit(url)
    for _ in range(seconds * 10):
        try:
            socket.create_connection((address.hostname, address.port), timeout=60).close()
        except ConnectionError:
            return True
        time.sleep(0.1)
    return False


def python(code, *arguments, **options):
    """Start a process that runs `code`, and return it once it has printed a line, with that line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    return process, process.stdout.readline().strip()


# -------------------------------------------------------------------------------------------- starting with corrections


def test_processes_that_spawn_parse_with_the_corrections_too(logdir, tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from helpers.tensorboard import corrections

        if __name__ == "__main__":
            corrections.apply()
            from torch_tb_profiler import io
            from torch_tb_profiler.profiler import loader
            run = loader.RunLoader("run", sys.argv[1], io.Cache(sys.argv[2])).load()
            (worker,) = run.get_workers("Overview")
            print(run.get_profile(worker, "1").overview["performance"])
        """)
    )
    run = [sys.executable, str(script), str(logdir / "two-workers"), str(tmp_path)]
    environment = os.environ | {"TORCH_PROFILER_START_METHOD": "spawn"}
    shown = subprocess.run(run, capture_output=True, text=True, env=environment, check=True).stdout
    expected = round(traces.breakdown(logdir / "two-workers")["DataLoader"].mean())
    assert f"'name': 'DataLoader', 'description': '', 'value': {expected}," in shown


def test_a_tensorboard_that_is_started_otherwise_is_corrected_too(logdir, tmp_path):
    own = {"TMPDIR": str(tmp_path)}  # it ends where it may not write into the one that all users share
    plain = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir / "two-workers"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | own | {"TORCH_PROFILER_START_METHOD": "fork", "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    try:
        url = next(re.search(r"http://\S+", line)[0] for line in plain.stdout if " at http://" in line)
        server = tensorboard.Server(logdir, ("two-workers",), url, plain, logdir, 0)
        while not server.get("runs")["runs"]:
            time.sleep(0.1)
        assert all(categories["DataLoader"] > 0 for _, categories in overview(server, "two-workers"))
    finally:
        plain.terminate()
        plain.wait(120)
        plain.stdout.close()


def test_another_version_of_the_plugin_is_left_alone(monkeypatch):
    from torch_tb_profiler.profiler import trace

    stock = trace.create_trace_event
    monkeypatch.setattr(corrections.metadata, "version", lambda package: "0.5.0")
    corrections.apply.__wrapped__()
    assert trace.create_trace_event is stock
    assert "torch-tb-profiler 0.5.0 is installed" in corrections.uncorrectable()


# ------------------------------------------------------------------------------------------------ starting and ending


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(traces.NoTraces, match="Record a profile first"):
        tensorboard.show(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(traces.NoTraces, match="nowhere does not exist"):
        tensorboard.show(tmp_path / "nowhere")


def test_a_damaged_trace_is_named(tmp_path, capsys):
    write(tmp_path / "host_1.10.pt.trace.json", on_a_gpu())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "host_1.10.pt.trace.json").write_text('{"traceEvents": [')
    tensorboard.show(tmp_path)
    tensorboard.stop()
    assert "could not read the trace of broken:" in capsys.readouterr().out


def test_a_tensorboard_that_does_not_start_shows_its_last_words(logdir, tmp_path, monkeypatch):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("raise ImportError('not today')")
    monkeypatch.setattr(config, "PROJECT", tmp_path)
    with pytest.raises(tensorboard.TensorBoardFailed, match="not today"):
        tensorboard.start(logdir)


def test_a_failure_on_the_way_reaches_the_log(logdir, tmp_path):
    (tmp_path / "no-folder").touch()
    command = [sys.executable, "-m", "helpers.tensorboard.child", logdir, tmp_path / "no-folder", str(os.getpid())]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert child.returncode == 1
    assert "no-folder" in child.stderr


def test_a_tensorboard_that_takes_too_long_is_given_up_and_ended(logdir, tmp_path, monkeypatch):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(config, "PROJECT", tmp_path)
    before = psutil.Process().children()
    monkeypatch.setattr(tensorboard, "TIMEOUT", 0)
    with pytest.raises(tensorboard.TensorBoardFailed, match="did not start within 0 s"):
        tensorboard.start(logdir)
    assert psutil.Process().children() == before


def test_four_tensorboards_at_once_have_four_ports(logdir):
    with ThreadPoolExecutor(4) as pool:
        servers = list(pool.map(tensorboard.start, [logdir] * 4))
    try:
        assert len({each.url for each in servers}) == 4
        assert [each.get("runs")["runs"] for each in servers] == [RUNS] * 4
    finally:
        for each in servers:
            each.stop()


def test_stopping_one_leaves_the_others(logdir, server):
    other = tensorboard.start(logdir)
    other.stop()
    assert ends(other.url)
    assert not other.folder.exists()
    assert server.get("runs")["runs"] == RUNS


def test_showing_another_folder_replaces_the_one_before(logdir):
    tensorboard.show(logdir)
    before = tensorboard._shown
    tensorboard.show(logdir / "two-workers")
    after = tensorboard._shown
    try:
        assert ends(before.url)
        assert after.get("runs")["runs"] == ["two-workers"]
    finally:
        tensorboard.stop()
    assert ends(after.url)


HOLDING = """
    import os, sys, time
    from helpers import tensorboard
    server = tensorboard.start(sys.argv[1])
    fork = os.fork()  # as a DataLoader's worker is
    if fork == 0:
        {fork}
    {rest}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killing_the_notebook_ends_it_though_a_fork_lives_on(logdir):
    code = HOLDING.format(fork="time.sleep(600)", rest="print(server.url, fork, flush=True); time.sleep(600)")
    notebook, line = python(code, logdir)
    url, fork = line.split()
    try:
        notebook.send_signal(signal.SIGKILL)
        notebook.wait()
        assert ends(url)
        assert psutil.pid_exists(int(fork))
    finally:
        os.kill(int(fork), signal.SIGKILL)
        notebook.stdout.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_that_ends_or_stops_leaves_it_running(logdir):
    fork = "tensorboard._shown = server; tensorboard.stop(); sys.exit()"
    rest = "os.waitpid(fork, 0); time.sleep(1.5); print(server.get('runs')['runs'], server.folder.exists())"
    notebook, line = python(HOLDING.format(fork=fork, rest=rest), logdir)
    notebook.communicate()
    assert line == f"{RUNS} True"


IN_A_NOTEBOOK = {
    "Python": "from helpers import tensorboard\ntensorboard.show({logdir!r}, height=500)",
    "magic": "%load_ext helpers.tensorboard\n%tensorboard --logdir {logdir} --height 500\n"
    "from helpers import tensorboard",
}


@pytest.mark.parametrize("way", [pytest.param("Python", marks=pytest.mark.slow), "magic"])
def test_in_a_notebook_it_is_embedded_and_ends_with_the_kernel(logdir, way):
    show = IN_A_NOTEBOOK[way].format(logdir=str(logdir))
    cell = nbformat.v4.new_code_cell(f"{show}\nprint(tensorboard._shown.url)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=280, startup_timeout=280).execute()
    outputs = notebook.cells[0].outputs
    line, url = "".join(each["text"] for each in outputs if each["output_type"] == "stream").splitlines()
    page = next(each["data"]["text/html"] for each in outputs if each["output_type"] == "display_data")
    assert f"{url}#pytorch_profiler" in line
    assert f'<iframe src="{url}#pytorch_profiler"' in page
    assert ends(url)


@pytest.mark.parametrize(
    ("line", "message"), [("", "LOGDIR"), ("nowhere", "does not exist"), ("--height x", "invalid int")]
)
def test_the_magic_says_what_is_wrong_in_one_line(line, message, tmp_path, monkeypatch):
    from IPython.core.error import UsageError

    from helpers.tensorboard import magic

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        magic.show(line)


def test_from_the_shell_it_runs_until_ctrl_c(logdir):
    shell = subprocess.Popen(
        [sys.executable, "-m", "helpers.tensorboard", str(logdir)], stdout=subprocess.PIPE, text=True
    )
    url = shell.stdout.readline().split()[-1]
    assert not ends(url, seconds=1)
    shell.send_signal(signal.SIGINT)
    assert shell.wait(120) == 0
    assert ends(url)
    shell.stdout.close()


# ---------------------------------------------------------------------------------------------------- behind JupyterHub


def test_behind_jupyterhub_the_link_goes_through_its_proxy(server, hub, monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    page, fragment = server.link.split("#")
    assert page.startswith("/user/ada/proxy/")
    assert fragment == "pytorch_profiler"
    assert "<title>TensorBoard</title>" in urllib.request.urlopen(hub + page).read().decode()
    runs = urllib.request.urlopen(f"{hub}{page}data/plugin/pytorch_profiler/runs").read().decode()
    assert RUNS[0] in runs


def test_a_proxy_that_is_named_is_where_the_link_leads(server, hub, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_PROXY_URL", "/user/ada/proxy/%PORT%")  # without the slash that relative links need
    page, fragment = server.link.split("#")
    assert fragment == "pytorch_profiler"
    assert "<title>TensorBoard</title>" in urllib.request.urlopen(hub + page).read().decode()


# ---------------------------------------------------------------------------------------------------------------- Colab


@pytest.fixture
def colab(monkeypatch):
    """A stand-in for Colab's module, which exists nowhere else: it records what it is asked to show."""
    shown = []
    output = types.ModuleType("google.colab.output")
    output.serve_kernel_port_as_iframe = lambda port, path="/", **options: shown.append((port, path, options))
    package = types.ModuleType("google.colab")
    package.output = output
    monkeypatch.setitem(sys.modules, "google.colab", package)
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    return shown


def test_in_colab_its_own_function_shows_the_tab_and_no_address_is_named(logdir, colab, capsys):
    tensorboard.show(logdir, height=500)
    url = tensorboard._shown.url
    tensorboard.stop()
    assert colab == [(urlsplit(url).port, "/#pytorch_profiler", {"height": "500"})]
    printed = capsys.readouterr().out
    assert "in the frame below, through Colab's proxy" in printed and "http" not in printed
