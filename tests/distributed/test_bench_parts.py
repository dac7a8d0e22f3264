"""Threat: a part of the bench that ends with a traceback since something that it calls has changed."""

import pytest

from bench.__main__ import PARTS
from tests.support.bench_parts import ON_SLURM, measured

pytestmark = pytest.mark.tools


@pytest.mark.weekly
@pytest.mark.parametrize("part", [part for part in PARTS if part not in ON_SLURM])
def test_every_part_runs_to_its_numbers(part: str) -> None:
    measured(part, timeout_sec=580)
