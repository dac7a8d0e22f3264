"""Against a preflight that nobody waits for: it starts torch, CUDA and NCCL before every training."""

from __future__ import annotations

import time

# Half of it is the start of the processes; a user who waits longer than this switches preflight off.
GOAL_SEC = 20.0


def test_preflight_of_one_rank_passes_and_its_seconds_are_recorded(device, new_run, measured):
    """No limit yet: how long two cold processes take to start on a machine with a GPU is not known."""
    run = new_run("checked")
    started = time.perf_counter()
    done = run.start("preflight").end()
    seconds = time.perf_counter() - started
    assert done.code == 0, done.text
    measured("seconds", seconds)
    measured("goal", GOAL_SEC)
