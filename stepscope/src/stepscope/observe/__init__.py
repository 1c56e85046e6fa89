"""Measures a training loop and returns facts. `stepscope.rules` judges them.

- `recorder`: the engine, which measures steps. `watched` drives the engine in an unedited script, `loop` runs a loop.
- `examination`: the phases of an examination: stopwatch, profile, sampled lines. `trials` tries settings afterwards.
- `hooks`, `launch`: put the recorder into a script's process, and collect the reports of its processes.
- `items`, `hazards`, `contention`, `sampler`, `pauses`: one measurement each.
- `profile`, `host`, `device`, `job`: read facts from traces.
"""
