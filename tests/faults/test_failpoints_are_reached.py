"""Against failpoints that no run reaches: a fault there would prove nothing."""

from __future__ import annotations

import json

from injection import Fault
from plans import Plan

from forge.core.failpoints import FAILPOINTS


def test_a_run_with_a_resume_reaches_every_failpoint(runs):
    run = runs("reached", 1)
    stop = Fault("term", "data.read", at=10)
    first = run.train(plan=Plan((stop,), points=True))
    assert first.code == 75, first.text
    again = run.train(plan=Plan(points=True))
    assert again.code == 0, again.text
    reached = {json.loads(line) for line in (run.folder / "points.jsonl").read_text().splitlines()}
    assert reached == set(FAILPOINTS)
