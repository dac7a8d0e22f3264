"""Against a committed checkpoint that no run can resume from: one NaN among millions of numbers on the
device, and against a false alarm, since the norm of large numbers overflows.
"""

from __future__ import annotations

import pytest
import torch

from bench.manifests import manifest_of
from forge.checkpoint.async_saver import Saver
from forge.core.errors import TrainingError
from forge.core.paths import RunPaths

pytestmark = pytest.mark.default


@pytest.fixture(params=["copied", "live"])
def save(request, world, tmp_path):
    """save(number): saves a state with this number in the last tensor; the committed checkpoint.

    copied: the saver looks at a copy in host memory; live: at the tensors on the device.
    """
    saver = Saver(world, RunPaths(tmp_path), async_save=True, check_may_write=lambda: None)

    def save(number):
        weights = {f"w{n}": torch.ones(2**18, device=world.device) for n in range(8)}
        weights["w7"][12345] = number
        state = {"model": weights, "optimizer": {}}
        saver.start(state, manifest_of(1), keep_last=1, last=request.param == "live")
        return saver.finish().checkpoint

    return save


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_saver_refuses_a_number_that_is_not_finite(save, number, tmp_path):
    with pytest.raises(TrainingError, match="not finite; this step was not committed"):
        save(number)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_saver_accepts_a_large_finite_number(save):
    """Its square, which a norm sums, is beyond fp32."""
    assert save(1e30).folder.is_dir()
