"""Against a validation that refuses what a GPU has trained, misses what is corrupt, or takes so long that
nobody calls it: it computes on the CPU what training has computed in bf16 on the GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace

from support.live_run import Run

from forge.checkpoint import directory
from forge.core.errors import Exit

# A start of torch, the digests, a few forward passes, and one launch to replay steps. Recorded beside the
# seconds; asserted once a real machine has shown them.
GOAL_SEC = 15.0


def without_machine(run: Run) -> Run:
    """The same run without keys of a machine: `forge validate` reads none and refuses them."""
    kept = (option for option in run.overrides if not option.startswith("--machine."))
    return replace(run, overrides=tuple(kept))


def flip_a_byte(folder):
    """Change one bit in the middle of the largest file of a checkpoint."""
    largest = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return largest.name


def test_trained_checkpoint_is_valid(device, trained, measured):
    started = time.perf_counter()
    done = without_machine(trained).start("validate").end(180)
    seconds = time.perf_counter() - started
    assert done.code == 0, done.text
    measured("seconds", seconds)
    measured("goal", GOAL_SEC)


def test_flipped_bit_in_a_checkpoint_is_found(device, trained, tmp_path):
    run = trained.copy(tmp_path / "flipped")
    name = flip_a_byte(directory.latest_folder(run.paths))
    done = without_machine(run).start("validate").end()
    assert done.code == Exit.DATA, done.text
    assert f"{name} has digest" in done.text
