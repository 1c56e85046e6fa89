"""The site as tests see it: of the whole course, with the outputs of notebook 00, and of one that prints everything."""

import os
from pathlib import Path

import pytest
from filelock import FileLock
from support.site import write_everything

from helpers.lessons import execute, site


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))  # of Sphinx, in its extensions
            item.add_marker(pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"))
        if "built_site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def built_site(drawn_images, tmp_path_factory) -> Path:
    """Folder of the built site, one for all processes that test side by side."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "site.lock"), pytest.MonkeyPatch.context() as patch:
        if not (folder / "site").exists():
            for name in ("COURSE_PRESET", "COURSE_DATA"):
                patch.setenv(name, drawn_images[name])
            patch.setenv("COURSE_RUNS", str(folder / "site-runs"))
            notebooks = execute.all_notebooks()
            execute.run(notebooks[:1], "drawn images")
            everything = write_everything(folder / "99-everything.ipynb")
            site.build(folder / "site", [*notebooks, everything])
    return folder / "site"
