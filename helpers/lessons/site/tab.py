"""A picture of TensorBoard's profiler tab, for pages on which it cannot run."""

from __future__ import annotations

import shutil
from pathlib import Path

from helpers import config, tensorboard

TRACE = config.PROJECT / "data" / "reference" / "tour"
ALT = (
    "TensorBoard's profiler tab with the run of the guided tour: on the left the choice of run and view, on the right "
    "the Overview, with the time of a step, what it consists of, and a bar for each step."
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 120_000  # ms: the machine may have other work


def picture(path: Path) -> bool:
    """Write a picture of the tab, with the trace of the guided tour; return False if there is no browser to take it.

    Raises
    ------
    TensorBoardFailed
        If TensorBoard does not start.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return False
    if browser is None:
        return False
    server = tensorboard.start(TRACE)
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
            page = chromium.new_page(viewport={"width": 1400, "height": 930})
            page.set_default_timeout(_PATIENCE)
            page.goto(f"{server.url}#pytorch_profiler")
            frame = page.frame_locator("iframe")
            frame.get_by_text("Average Step Time").wait_for()
            frame.locator("svg rect").last.wait_for()
            path.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=path, animations="disabled")
            chromium.close()
    finally:
        server.stop()
    return True
