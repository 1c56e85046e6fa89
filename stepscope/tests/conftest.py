"""Fixtures of all tests of stepscope."""

pytest_plugins = ["support.shared"]
