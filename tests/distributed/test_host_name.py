"""Against ranks of one node that meet at its name, which many containers and laptops do not resolve: each
start waited for the rendezvous until it gave up."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.live_run import PATIENCE_SEC, TWO_RANKS

NAMED = 'hostname no-such-host.invalid && exec "$@"'


def test_two_ranks_train_where_the_name_of_their_host_does_not_resolve(runs):
    run = runs("nameless", "--train.max_steps=2")
    command = [sys.executable, "-m", "forge", *run.arguments("train", *TWO_RANKS)]
    done = subprocess.run(
        ["unshare", "--uts", "sh", "-c", NAMED, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE_SEC,
    )
    if "unshare:" in done.stderr:
        pytest.skip(f"needs root: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert run.events("launch")[0]["host"] == "no-such-host"
    assert run.step() == 2
