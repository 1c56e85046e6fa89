"""How Sphinx builds the site. What depends on this clone, such as its address, `build` adds."""

from __future__ import annotations

from pathlib import Path

from helpers.lessons.site import api

project = "Faster PyTorch training"
author = f"The authors of “{project}”"
html_title = project
language = "en"
extensions = ["myst_nb", "sphinx_copybutton", *api.EXTENSIONS]
html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = sorted(path.name for path in (Path(__file__).parent / "static").glob("*.css"))
html_copy_source = False  # it would be the page's own source, not the notebook
html_domain_indices = False  # the pages of the modules list what they have
html_show_copyright = html_show_sphinx = False
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # a second field for the search
    "navigation_with_keys": False,  # arrows scroll, for those who read by keyboard
    "pygments_dark_style": "a11y-high-contrast-dark",
    "pygments_light_style": "a11y-high-contrast-light",
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
}

nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 4
copybutton_selector = "div:not(.output) > div.highlight pre"  # what a cell printed is not to be run
globals().update(api.SETTINGS)
