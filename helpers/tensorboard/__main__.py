"""``python -m helpers.tensorboard LOGDIR``: TensorBoard with a corrected profiler tab, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys

from helpers import tensorboard, traces


def main() -> None:
    """Serve the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m helpers.tensorboard", description=__doc__)
    parser.add_argument("logdir", metavar="LOGDIR", help="folder with the traces of one or several runs")
    try:
        tensorboard.serve(parser.parse_args().logdir)
    except (traces.NoTraces, tensorboard.TensorBoardFailed) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
