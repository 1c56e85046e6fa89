"""Corrects the profiler tab of every TensorBoard that starts in this environment, by ``tensorboard`` in a shell, too.

TensorBoard finds `Corrections` by the entry point in pyproject.toml. It is no plugin of its own: it has no tab.
"""

from __future__ import annotations

import argparse

from tensorboard.plugins import base_plugin

from helpers.tensorboard import corrections


class Corrections(base_plugin.TBLoader):
    """Applies `corrections` when TensorBoard has read its options, before it loads any plugin."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Apply them, and say so."""
        corrections.apply()
        print(corrections.uncorrectable() or "The profiler tab is corrected by this course's helpers.tensorboard.")

    def load(self, context: base_plugin.TBContext) -> None:
        """Load nothing."""
