"""Against a resume that is nearly exact: sums over ranks, or compiled graphs, of another order.

Two ranks have one order of adding; from three ranks on the order shows in the last bit. The cases of
`make faults` together have every pair of world size, sharding, accumulation, compile and dropout;
`make test-all` has some of them, one of which compiles: compilers take minutes of a small machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import EVERYTHING
from runs import FaultyRun
from support import forked

from forge.checkpoint import resume
from forge.core.errors import Exit
from forge.core.models.architectures import ARCHITECTURES
from forge.core.optimizers import OPTIMIZERS
from forge.hosts.network import available_cores

STEPS, MIDDLE = 8, 4
SIZES = (
    # 300,928 weights: more than fit in DDP's first bucket, of 1 MiB.
    *("--model.dim=128", "--model.heads=4", "--model.layers=1", "--model.ffn_dim=512"),
    *("--train.batch_size=24", f"--train.max_steps={STEPS}", f"--train.decay_steps={STEPS}"),
    f"--train.checkpoint_every={MIDDLE}",
    # The compiler keeps ranks apart for as long as cores are short.
    "--machine.fabric.timeout_sec=480",
)
DEADLINE_SEC = 500.0
DROPOUT, NO_DROPOUT = "--model.dropout=0.1", "--model.dropout=0"
MUON = "--train.optimizer=muon"
GPT2 = ("--model.architecture=gpt2", "--model.positions=16")
COMPILE, RECOMPUTE = "--train.compile=true", "--train.recompute=selective"


def accumulate(micro: int) -> str:
    return f"--train.micro_batch_size={micro}"


CHOSEN = [
    # 5 + 5 + 2 samples: graphs of two shapes.
    pytest.param(2, "all", (accumulate(5), COMPILE, DROPOUT), marks=pytest.mark.weekly),
    (3, "none", (accumulate(3), DROPOUT)),
    (4, 2, (accumulate(4), RECOMPUTE, DROPOUT, MUON)),  # two copies, of two ranks each
    (2, "none", (*GPT2, DROPOUT)),
    (2, "all", (*GPT2, RECOMPUTE, DROPOUT, MUON)),
    (3, "none", (*GPT2, accumulate(3), NO_DROPOUT)),
    (3, "all", (*GPT2, DROPOUT)),
    # Each of the tables that no case above has.
    *(
        (2, "all", (f"--train.optimizer={name}", DROPOUT))
        for name in OPTIMIZERS
        if name not in ("adamw", "muon")
    ),
    *(
        (3, "none", (f"--model.architecture={name}", DROPOUT))
        for name in ARCHITECTURES
        if name not in ("llama", "gpt2")
    ),
]
OTHERS = [
    (2, "none", (NO_DROPOUT,)),
    (3, "none", (COMPILE, DROPOUT)),
    (3, "all", (accumulate(3), NO_DROPOUT, MUON)),
    (4, "all", (COMPILE, RECOMPUTE, NO_DROPOUT)),
    (8, "none", (accumulate(1), NO_DROPOUT)),
    (8, "none", (accumulate(1), COMPILE, NO_DROPOUT)),
    (8, "all", (DROPOUT,)),
    (8, 4, (accumulate(1), COMPILE, RECOMPUTE, DROPOUT)),
]


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    ("ranks", "shard", "settings"),
    [*CHOSEN, *OTHERS] if EVERYTHING else CHOSEN,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
    ranks: int,
    shard: str | int,
    settings: tuple[str, ...],
    runs: Callable[..., FaultyRun],
    tmp_path: Path,
) -> None:
    whole = runs("whole", ranks, *SIZES, f"--train.shard={shard}", *settings)
    ended = whole.start_train().end(DEADLINE_SEC)
    assert ended.code == Exit.DONE, ended.text
    assert "training without torch.compile" not in ended.text

    resumed = with_a_corrupt_last_checkpoint(whole, tmp_path / "resumed")
    ended = resumed.start_train().end(DEADLINE_SEC)
    assert ended.code == Exit.DONE, ended.text
    assert [event["step"] for event in resumed.events("init")] == [0, MIDDLE]
    assert resumed.story() == whole.story()


@pytest.mark.skipif(available_cores() < 2, reason="validation replays 3 ranks on 2 cores or more")
def test_validation_compares_the_next_losses_of_three_replicas_to_the_last_bit(
    runs: Callable[..., FaultyRun], tmp_path: Path
) -> None:
    run = runs("replayed", 3, *SIZES, DROPOUT)
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    folder = run.paths.checkpoints / f"step-{MIDDLE:08d}"
    ended = forked.start(["validate", str(folder), run.data], tmp_path / "validate.out").end()
    assert ended.code == Exit.DONE, ended.text
    both = ", ".join(f"step {step} bitwise equal" for step in (MIDDLE + 1, MIDDLE + 2))
    assert f"next loss: replayed: {both}" in ended.text


def with_a_corrupt_last_checkpoint(whole: FaultyRun, folder: Path) -> FaultyRun:
    """A copy of the run that resumes from the checkpoint before the last one."""
    run = whole.copy(folder)
    run.paths.trained.unlink()
    last = resume.latest(run.paths)
    assert last is not None
    next(last.folder.glob("*.distcp")).write_bytes(b"")
    return run
