"""Names of checkpoint directories: one function writes them, one reads them back."""

import pytest

from forge.core.paths import by_step, checkpoint_name, checkpoint_step


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 100_000_000, 10**12])
def test_a_step_is_read_back_from_the_name_of_its_checkpoint(step):
    assert checkpoint_step(checkpoint_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["best", "step-100", "step-00000100.bak", "step-000000100", "step-0000010\u0660", "step-"],
)
def test_other_names_are_of_no_step(name):
    assert checkpoint_step(name) is None


def test_names_sort_by_step_and_second_copies_after_the_first(tmp_path):
    names = ["step-100000000", "step-00000020.2", "step-99999999", "best", "step-00000020"]
    found = sorted((tmp_path / name for name in names), key=by_step)
    assert [folder.name for folder in found] == [names[i] for i in (3, 4, 1, 2, 0)]
