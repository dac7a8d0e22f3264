"""Against a GPU that breaks in the middle of a run: torch raises a RuntimeError, as for a bug, and the
run would end. There is no GPU here: a rank raises what torch raises then."""

from __future__ import annotations

import pytest
from injection import Fault
from runs import INTERVAL

from forge.core.errors import Exit


@pytest.mark.parametrize(("kind", "cause"), [("ecc", "GPU fault"), ("illegal", "GPU error")])
def test_training_restarts_from_the_last_checkpoint_and_ends_as_without_the_error(
    kind, cause, runs, uninterrupted
):
    run = runs(f"gpu-{kind}", 2)
    ended = run.train(Fault(kind, "data.read", at=INTERVAL + 2, rank=1))
    assert ended.code == Exit.DONE, ended.text
    [lost] = run.events("lost")
    assert (
        lost["message"].startswith(f"{cause} on ") and "(rank 1): CUDA error: " in lost["message"]
    )
    assert run.starts() == [0, INTERVAL]
    assert run.story() == uninterrupted(2)
    # Outside of a Slurm job there is no other node to prefer.
    assert not run.paths.bad_nodes.exists()


def test_an_index_out_of_range_on_a_gpu_is_a_bug_and_ends_the_run(runs):
    run = runs("gpu-assert", 2)
    ended = run.train(Fault("assert", "data.read", at=2, rank=1))
    assert ended.code == Exit.FAILED, ended.text
    assert "device-side assert triggered" in ended.text
    assert run.events("lost") == []
