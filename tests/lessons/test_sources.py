import pytest

from helpers.lessons.sources import source_of
from helpers.simulate import storage


def test_the_source_of_several_objects_comes_below_each_other():
    shown = source_of(storage.SlowStorage.seconds, test_what_has_no_source_is_refused)
    assert shown.language == "python"
    assert shown.data.index("def seconds(self") < shown.data.index("def test_what_has_no_source_is_refused")


def test_what_has_no_source_is_refused():
    with pytest.raises(TypeError):
        source_of(len)
