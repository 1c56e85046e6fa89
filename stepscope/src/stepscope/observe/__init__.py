"""Measures a training loop, and knows no rule: facts come out.

- `recorder`: the engine, which measures steps. `watched` drives it in an unedited script, `loop` runs a loop itself.
- `examination`: the phases of a recorder: stopwatch, profile, sampled lines. `trials` tries settings afterwards.
- `hooks`, `launch`: put the recorder into a script's process, and collect the reports of its processes.
- `items`, `hazards`, `contention`, `sampler`, `pauses`: single measurements.
- `profile`, `host`, `device`, `job`: read facts from traces.
"""
