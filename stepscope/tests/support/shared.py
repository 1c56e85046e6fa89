"""What the tests of both packages share: no settings of the user's, an order for processes side by side, a browser."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from hypothesis import settings

# Before anything reads them: tests are those of a reader without settings, and what runs side by side has a thread each
# (threads on all cores would wait for each other).
SETTINGS = ("COURSE_", "CIFAR10_", "JUPYTER", "IPYTHON", "PYTEST_ADDOPTS", "PYTHONSAFEPATH", "PYTHONWARNINGS", "MAKE")
SETTINGS += ("PYTHONDONTWRITEBYTECODE",)  # with it, every process compiles torch anew, for seconds
for name in list(os.environ):
    if name.startswith(SETTINGS) or name.lower().endswith("_proxy"):
        del os.environ[name]
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as nohup leaves it, for all processes that are started here
    signal.signal(signal.SIGINT, signal.default_int_handler)

from stepscope.base import machine  # noqa: E402

settings.register_profile("unhurried", deadline=None)  # no test is about how long something takes
settings.load_profile("unhurried")


def pytest_collection_modifyitems(items):
    for item in items:
        if "executed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.notebooks)
            item.add_marker(pytest.mark.timeout(1200))
        if not item.get_closest_marker("timeout"):
            # s with its fixtures, on a busy machine; then it fails, with all threads' stacks
            item.add_marker(pytest.mark.timeout(900 if item.get_closest_marker("slow") else 300))
    # What takes longest begins first: at the end, no process then waits long for another. Of notebooks it is the last
    longest = ("notebooks", "browser", "processes")
    ranks = {}
    for item in items:
        rank = next((rank for rank, name in enumerate(longest) if item.get_closest_marker(name)), len(longest))
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: _notebook(item.nodeid), reverse=True)
    items.sort(key=lambda item: ranks[item.path])


def _notebook(nodeid: str) -> str:
    """Return the name of the notebook of which a test is, and nothing for other tests."""
    name = re.search(r"\[(\d\d-[a-z][\w-]*)\]$", nodeid)
    return name[1] if name else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Side by side run files of tests, each in one process, and notebooks, each with all that is tested of it."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrNotebook(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _notebook(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # keep the order
    return ByFileOrNotebook(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """With ``-n auto`` a process a core and two more: many tests wait, for steps that take a fixed time."""
    return machine.cores() + 2


@pytest.fixture(scope="session", autouse=True)
def own_jupyter(tmp_path_factory):
    """No settings, extensions or kernels of the user's own."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        yield


@contextmanager
def jupyter(folder, module, *options, **variables):
    """Run a Jupyter server in a folder, with nobody's own settings, and give its address when it listens there."""
    command = [sys.executable, "-m", module, "--no-browser", "--allow-root", "--port=0", "--IdentityProvider.token="]
    own = {f"JUPYTER_{name}_DIR": str(folder) for name in ("CONFIG", "DATA", "RUNTIME")}
    with (folder / "log").open("wb") as log:
        environment = os.environ | variables | own
        process = subprocess.Popen([*command, *options], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        port = None
        while port is None or not _listens(port):  # it says its port a moment before it listens there
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
            text = "".join(path.read_text() for path in folder.glob("jpserver-*.json"))
            port = json.loads(text)["port"] if text else None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(300)


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A Jupyter server as JupyterHub gives one to the reader Ada; the address that her browser knows."""
    with jupyter(tmp_path_factory.mktemp("hub"), "jupyter_server", "--ServerApp.base_url=/user/ada/") as address:
        yield address


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def browser_program():
    """Where Chromium or Chrome is. Without one, tests in a browser are skipped, but fail in CI."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        message = "no Chromium: `apt install chromium` (Debian), `snap install chromium` (Ubuntu), or Google Chrome"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return program


@pytest.fixture(scope="module")
def chromium(browser_program):
    """A running browser, for the tests of a file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_program, args=["--no-sandbox"])
        yield browser
        browser.close()
