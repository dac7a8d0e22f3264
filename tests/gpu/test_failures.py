"""Against a rank that fails on the GPU and leaves nothing but "exited without a record": after a
device-side assert each further call to CUDA fails, and libraries abort the process.
"""

from __future__ import annotations

import pickle
import re
import shutil

import pytest
from support.live_run import TWO_RANKS, ranks, wait_until

from forge.core.errors import Exit
from forge.core.files import read_json, write_json
from forge.core.process import hostname

# 268 GB of embedded tokens in the first step: more than a GPU has.
HUGE = (
    *("--train.batch_size=2097152", "--train.micro_batch_size=2097152"),
    *("--model.dim=2048", "--model.heads=16", "--model.layers=1"),
)


def failure_of(run, done):
    """The message that the failed rank has recorded; its log, named for its host, has the traceback."""
    assert done.code == Exit.FAILED, done.text
    assert "exited without a record" not in done.text
    [failed] = run.events("failed")
    [log] = run.paths.logs.glob(f"*.{hostname()}.0.log")
    assert "Traceback (most recent call last)" in log.read_text()
    assert failed["rank"] == 0
    return failed["message"]


def with_a_smaller_vocabulary(tiny_project, folder):
    """A copy of the data whose shards claim a vocabulary that is smaller than their ids."""
    shutil.copytree(tiny_project / "data", folder)
    [manifest] = folder.glob("tokens/*/manifest.json")
    write_json(manifest, {**read_json(manifest), "vocab_size": 40})
    return folder


def test_token_id_beyond_the_vocabulary_is_recorded_with_its_cause(
    device, tiny_project, new_run, tmp_path, measured
):
    run = new_run("assert", f"--data={with_a_smaller_vocabulary(tiny_project, tmp_path / 'data')}")
    message = failure_of(run, run.start("train").end())
    measured("recorded", message.splitlines()[0][:100])
    assert "device-side assert" in message or "index out of range" in message


def test_gpu_without_enough_memory_is_recorded_with_what_to_do(gpu, new_run, measured):
    run = new_run("huge", *HUGE)
    message = failure_of(run, run.start("train").end())
    measured("recorded", message.splitlines()[0][:100])
    assert "OutOfMemoryError" in message
    assert "lower train.micro_batch_size" in message


def test_rank_that_stops_is_named_and_the_one_that_waits_leaves_its_collectives(
    device, new_run, measured
):
    """With NCCL, torch ends the rank that waits from a thread of C++, which writes no record."""
    if device.type == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
    run = new_run("stopped", "--machine.fabric.timeout_sec=20")
    started = run.start("train", *TWO_RANKS)
    wait_until(lambda: run.step() >= 3, "three steps")
    ranks()[-1].suspend()
    done = started.end(180)
    assert done.code == Exit.DONE, done.text
    [lost] = run.events("lost")
    measured("recorded", lost["message"])
    assert "exited without a record" not in lost["message"]
    # The launcher asks the node of the quiet rank, if it is still there when the other one gives up.
    named = r"(does not respond|stopped by SIGSTOP \(pid \d+, state T\)); rank "
    assert re.search(named, lost["message"])
    files = list(run.paths.logs.glob("*.flight-recorder.*"))
    assert files and all(pickle.loads(file.read_bytes())["entries"] for file in files)
