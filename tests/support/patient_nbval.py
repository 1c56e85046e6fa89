"""A plugin for nbval: a cell that prints nothing for a while is no failure."""


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "output_timeout"):  # a cell; nbval 0.11 has 5 s here, and no option for it
            item.output_timeout = 300
