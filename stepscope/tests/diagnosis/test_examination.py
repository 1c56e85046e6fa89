"""Some loops of the examination, one of each kind; `pipelines.py` runs all of them, and beside busy processes."""

import pytest

NAMES = (
    "zip_opened_for_each_item", "padded_number_by_number", "arrays_through_the_queue", "validated_in_each_step",
    "distances_by_broadcasting", "curve_drawn_after_each_batch", "network_in_float64", "copies_and_histograms",
    "plain_mlp", "checkpointing",
)  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_the_first_finding_names_the_fault_or_there_is_none(name):
    import pipelines  # here, because it takes seconds

    record = {"name": name, "kind": pipelines.LOOPS[name].kind} | pipelines.in_own_process("diagnosis", name)
    assert pipelines.judged(record)["right"], record
