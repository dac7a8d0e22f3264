"""Threat: a part of the bench that ends with a traceback since something that it calls has changed."""

from __future__ import annotations

import pytest

from tests.support.bench_parts import ON_SLURM, measured

from .conftest import require_slurm

pytestmark = pytest.mark.tools


@pytest.mark.weekly
@pytest.mark.parametrize("part", sorted(ON_SLURM))
def test_every_part_runs_to_its_numbers(part: str) -> None:
    require_slurm()
    assert "skipped" not in measured(part, timeout_sec=580)
