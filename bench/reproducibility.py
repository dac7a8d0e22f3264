"""What changes the bits of a trained model? Each change of how a run is trained, beside the same run.

python -m bench.reproducibility [--quick] [--python PYTHON]    about 4 min; no GPU is used
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import yaml

from forge.core.paths import RunPaths
from forge.core.provenance import cpu_name
from forge.core.records import Trained
from forge.trainer import metrics

GOAL, SAVED_EVERY = 80, 15
ENDED_AT = 20  # between two checkpoints
TRIES = 5  # on a busy machine a run may reach its goal before it is ended
PATIENCE_SEC = 300.0
RANKS = "--ranks-per-node"
SAME = "the same command again"


@dataclass(frozen=True)
class Way:
    """A way to train the run. ends: signals by which its first launch ends at ENDED_AT."""

    what: str
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    ends: signal.Signals | None = None
    ranks: int = 2
    python: str = sys.executable


def ways(python: str | None) -> list[Way]:
    """The reference, and what is compared with it. python: of another environment with Forge."""
    # What these libraries use on a CPU without AVX-512; the same variables switch kernels in all of them.
    older_cpu = {
        **{"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        **{"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    }
    compared = [
        Way("reference: 2 ranks, replicated, 1 thread each"),
        Way(SAME),
        Way("stopped at a step and resumed", ends=signal.SIGTERM),
        Way("killed with kill -9 and resumed", ends=signal.SIGKILL),
        Way("FSDP2 over both ranks", ("--train.shard=all",)),
        Way("activation checkpointing", ("--train.recompute=full",)),
        Way("half of the micro-batch", ("--train.micro_batch_size=2",)),
        Way("torch.compile", ("--train.compile=true",)),
        # Passive: on few cores threads that spin would take the time of those that work.
        Way("2 threads a rank", environ={"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}),
        Way("1 rank", ranks=1),
        Way("4 ranks", ranks=4),
        Way("kernels of a CPU without AVX-512", environ=older_cpu),
    ]
    return [*compared, Way(f"{python}", python=python)] if python else compared


def quick(every: list[Way]) -> list[Way]:
    """The reference, and few of the others; another Python that was asked for is among them."""
    reference, *others = every
    few = (
        way
        for way in others
        if way.what == SAME or way.ends or way.ranks == 1 or way.python != sys.executable
    )
    return [reference, *few]


def write_config(project: Path, *, is_quick: bool) -> Path:
    corpus = project / "corpus"
    corpus.mkdir()
    for number in range(24):
        lines = (f"{number} times {n} is {number * n}." for n in range(500))
        (corpus / f"{number}.txt").write_text("\n".join(lines))
    size = {"dim": 32, "layers": 2} if is_quick else {"dim": 128, "layers": 4}
    values = {
        "tokenizer": {"vocab_size": 512, "sample_mib": 1},
        "tokenize": {"inputs": [str(corpus)], "val_fraction": 0.2},
        "model": {**size, "heads": 2},
        "train": {
            **{
                "seq_len": 64,
                "batch_size": 8,
                "max_steps": GOAL,
                "warmup_steps": 3,
                "log_every": 1,
            },
            **{"checkpoint_every": SAVED_EVERY, "eval_samples": 2, "micro_batch_size": 4},
            "compile": False,
        },
    }
    path = project / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def command(way: Way, *arguments: str) -> list[str]:
    return [way.python, "-m", "forge", *arguments]


def train(project: Path, name: str, way: Way) -> RunPaths:
    """Train a run this way to its goal. Raises SystemExit with what was said where it fails."""
    options = [f"--run={name}", "--machine.launcher=torchrun", f"{RANKS}={way.ranks}"]
    line = command(way, "train", "config.yaml", *options, "--machine.device=cpu", *way.options)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **way.environ}
    paths = RunPaths(project / "results" / name)
    if way.ends and not any(
        is_interrupted(line, project, environ, paths, way.ends) for _ in range(TRIES)
    ):
        raise SystemExit(f"{way.what}: no run was between steps {ENDED_AT} and {GOAL}")
    done = subprocess.run(
        line,
        cwd=project,
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{way.what}: {' '.join(line)} ended with {done.returncode}:\n{done.stderr}"
        )
    return paths


def is_interrupted(
    line: Sequence[str],
    project: Path,
    environ: Mapping[str, str],
    paths: RunPaths,
    how: signal.Signals,
) -> bool:
    """Start the run, and end its first launch at ENDED_AT or later; whether that was before its goal.
    Removes a run of which it was not."""
    process = subprocess.Popen(
        line, cwd=project, env=environ, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        end = time.monotonic() + PATIENCE_SEC
        while last_step(paths) < ENDED_AT and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        if how is signal.SIGTERM:
            process.send_signal(how)
        else:
            os.killpg(process.pid, how)  # its ranks die with their parent
        process.wait(PATIENCE_SEC)
    finally:
        process.kill()
    if last_step(paths) >= ENDED_AT and not paths.trained.exists():
        return True
    shutil.rmtree(paths.root, ignore_errors=True)
    return False


def losses(paths: RunPaths) -> dict[int, float]:
    """The training loss of each step, of the last launch that took it."""
    lines = metrics.read(paths.metrics) if paths.metrics.exists() else []
    return {line.step: line.loss for line in lines if isinstance(line, metrics.TrainLine)}


def last_step(paths: RunPaths) -> int:
    return max(losses(paths), default=0)


def row(way: Way, paths: RunPaths, reference: RunPaths) -> dict[str, str]:
    """Whether the weights are those of the reference to the last bit, and how far losses are apart."""
    own, other = losses(paths), losses(reference)
    apart = max(abs(own[step] - other[step]) for step in other)
    is_equal = weights(paths) == weights(reference)
    return {
        "what differs": way.what,
        "weights": "bitwise equal" if is_equal else f"others ({weights(paths)[:12]})",
        "largest difference of a loss": f"{apart:.1e}" if apart else "0.0",
    }


def weights(paths: RunPaths) -> str:
    return Trained.read(paths.trained).weights_digest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, and four ways only")
    parser.add_argument("--python", help="also with this Python, of an environment with Forge")
    options = parser.parse_args()
    if options.python and not shutil.which(options.python):
        parser.error(f"--python: {options.python} is not a program")
    chosen = ways(options.python)
    if options.quick:
        chosen = quick(chosen)
    if not (shutil.which("c++") or shutil.which("g++")):
        chosen = [way for way in chosen if "--train.compile=true" not in way.options]
        print("torch.compile is left out: it needs a C++ compiler")
    with tempfile.TemporaryDirectory(dir=".") as name:
        project = Path(name).absolute()
        write_config(project, is_quick=options.quick)
        for step in ("tokenizer", "tokenize"):
            subprocess.run(
                [*command(chosen[0], step, "config.yaml")],
                cwd=project,
                check=True,
                stderr=subprocess.DEVNULL,
            )
        runs = [train(project, f"run{number}", way) for number, way in enumerate(chosen)]
        rows = [row(way, run, runs[0]) for way, run in zip(chosen[1:], runs[1:], strict=True)]
        reference = weights(runs[0])
    print(f"{chosen[0].what}, {GOAL} steps, weights {reference[:12]}, {cpu_name()}")
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
