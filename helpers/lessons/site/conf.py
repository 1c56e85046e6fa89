"""Configures Sphinx and MyST-NB for the site; `site.build` collects its pages."""

from pathlib import Path

from helpers import config

project = "Faster PyTorch training"
author = f"The authors of “{project}”"
html_title = project
language = "en"
root_doc = "README"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.autosummary", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
templates_path = [str(Path(__file__).parent / "templates")]
suppress_warnings = ["toc.duplicate_entry"]  # a page that a list names first and its pattern then matches

html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False  # it would be the page's own source, not the notebook
html_domain_indices = False  # the pages of the modules list what they have
html_show_copyright = html_show_sphinx = False
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # no second search field
    "navigation_with_keys": False,  # arrow keys scroll, for those who read by keyboard
    "pygments_dark_style": "a11y-high-contrast-dark",
    "pygments_light_style": "a11y-high-contrast-light",
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
}
if config.REPOSITORY:
    html_theme_options |= {
        "repository_url": config.REPOSITORY,
        "repository_branch": "colab",  # where a release's copies of the notebooks are, for the button of that name
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }

nb_execution_mode = "off"  # `execute.run` has executed them
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
copybutton_selector = "div:not(.output) > div.highlight pre"  # nobody runs what a cell printed

autosummary_ignore_module_all = False  # what a room offers is what its `__all__` names
autodoc_typehints = "none"  # the docstrings have the types, with shapes and units
add_module_names = False
napoleon_google_docstring = False
napoleon_use_rtype = False  # what is returned with its type, in one line
