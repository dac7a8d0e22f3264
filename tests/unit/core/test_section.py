"""Keys that earlier versions had: files and records with them are read, and nobody sets them unheard."""

from __future__ import annotations

from typing import ClassVar

import pytest

from forge.core.config import checked
from forge.core.errors import ConfigError
from forge.core.section import Retired, Section, with_retired, without_retired


class _Below(Section):
    RETIRED: ClassVar = {"pairs": Retired(False, "set keep to 2")}

    keep: int = 1


class _Whole(Section):
    RETIRED: ClassVar = {"again": Retired({"every": None}, "`forge reproduce` does it")}

    name: str = "base"
    below: _Below = _Below()


NOW = {"name": "base", "below": {"keep": 2}}
THEN = {"name": "base", "again": {"every": None}, "below": {"keep": 2, "pairs": False}}


@pytest.mark.parametrize("values", [NOW, THEN, {**NOW, "again": {}}])
def test_retired_keys_at_their_default_are_dropped(values):
    assert checked(_Whole, values, "config.yaml").model_dump() == NOW


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"again": {"every": 5}}, "again: this key was removed: `forge rep"),
        ({"again": None}, "again is None: this key was removed"),
        ({"below": {"pairs": True}}, "below.pairs is True: this key was removed: set keep"),
    ],
)
def test_a_retired_key_that_is_set_is_refused_with_what_replaces_it(values, message):
    with pytest.raises(ConfigError) as error:
        checked(_Whole, values, "config.yaml")
    assert message in str(error.value)


def test_digests_have_retired_keys_at_their_default():
    assert with_retired(_Whole, NOW) == with_retired(_Whole, THEN) == THEN


def test_records_are_read_whatever_a_retired_key_was_set_to():
    then = {"again": {"every": 5}, "below": {"keep": 2, "pairs": True}, "name": "base"}
    assert without_retired(_Whole, then) == NOW
