"""Diagnoses a training script as it is: ``stepscope run train.py ARGS…``, and nothing of it is edited.

The command starts the script with a folder before its PYTHONPATH, whose ``sitecustomize`` Python imports as it starts.
That lets a `Watch` see each batch that a DataLoader gives and each step of an optimizer. The modules:

- `start`: the command. It starts the script, waits for it, and prints what its processes found.
- `hooks`: what is put into the script's process, before it imports anything.
- `watch`: what a step is, and the diagnosis of some of them, one after the other.

Where a script may be edited, `stepscope.watch` does the same for its loop.
"""
