"""Numbers as messages show them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.base.wording import rounded


@pytest.mark.parametrize(("value", "count", "text"), [
    (675_891, 3, "676,000"), (675_891, 2, "680,000"), (12.345, 3, "12.3"), (0.01234, 2, "0.012"), (9.996, 3, "10.0"),
    (999.6, 3, "1,000"), (1, 3, "1.00"),
])  # fmt: skip
def test_a_number_has_so_many_digits(value, count, text):
    assert rounded(value, count) == text


@given(st.floats(1e-6, 1e12))
def test_three_digits_are_within_half_a_percent(value):
    assert float(rounded(value).replace(",", "")) == pytest.approx(value, rel=0.00501)
