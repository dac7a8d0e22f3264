"""`forge validate` for another training program: digests, tensors, the program's own check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from forge.checkpoint.index import DCP_INDEX
from forge.checkpoint.sealed import ProgramCheckpoints, SealedCheckpoint
from forge.cluster.lock import lock
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.process import stop_with_parent
from forge.core.program_settings import Program, filled
from forge.core.records import Check, Trained, Validation, failed_checks
from forge.core.terminal import Table, say

SAID_CHARACTERS = 300  # of the output of the program's own check, in a message
OUTPUT_BYTES = 2**16  # of its end, in which these are looked for


def validate(config: ResolvedConfig) -> Path:
    """Validate the run's last sealed checkpoint; the path of validated.json.

    Writes validation.json, valid or not. Raises DataError with the reasons for an invalid one.
    """
    assert config.program
    started, paths = time.time(), RunPaths.of(config)
    with lock(paths.root, "validate"):
        latest = checkpoints_of(config).latest() if config.program.checkpoints else None
        if latest is None and config.program.checkpoints:
            raise DataError(
                f"{paths.root} has no sealed checkpoint",
                fix="train the run first: the target train",
            )
        checks = list(_checks(config, config.program, paths, latest))
        bad = failed_checks(checks)
        result = Validation(
            step=latest.step if latest else 0,
            checkpoint_digest=latest.seal.digest if latest else "",
            status="invalid" if bad else "valid",
            depth="program",
            settings=config.validation_json(),
            reasons=[f"{check.name}: {check.message}" for check in bad],
            checks=checks,
        )
        result.write(paths.validation)
        seconds = round(time.time() - started, 3)
        event = events.Validate(seconds=seconds, status=result.status, step=result.step)
        events.record(paths.events, event)
        _conclude(result, latest.path if latest else paths.root)
        result.short.write(paths.validated)
    return paths.validated


def checkpoints_of(config: ResolvedConfig) -> ProgramCheckpoints:
    """The checkpoints of a run of another program, which must have some."""
    assert config.program and config.program.checkpoints
    return ProgramCheckpoints(RunPaths.of(config), config.program.checkpoints, world_size=1)


def _conclude(result: Validation, path: Path) -> None:
    for check in result.checks:
        say(f"  {check.status:4} {check.name}: {check.message}")
    if result.checks:
        say(f"{path}: {result.status}, step {result.step}")
    else:
        say(f"{path}: nothing to validate, no program.checkpoints and no program.validate")
    if result.reasons:
        raise DataError(
            f"{path} is invalid: " + "; ".join(result.reasons),
            cause="a corrupt file, or a model that the program's own check refuses",
            fix="forge validate CONFIG --all checks every sealed checkpoint of the run",
        )


def _checks(
    config: ResolvedConfig, program: Program, paths: RunPaths, latest: SealedCheckpoint | None
) -> Iterator[Check]:
    if latest:
        trained = Trained.read_if_there(paths.trained)
        if trained and trained.step != latest.step:
            message = f"trained.json says step {trained.step}, latest is at {latest.step}"
            yield Check("goal", "fail", message, "rerun the target train")
        bad = list(latest.bad_files())
        if bad:
            yield Check("digests", "fail", "; ".join(bad))
            return
        yield Check("digests", "ok", f"{len(latest.seal.files)} files as they were sealed")
        yield from _weights(latest)
        yield from _dcp_tensors(latest)
    if program.validation:
        yield _own_check(config, program, paths, latest)


def _weights(latest: SealedCheckpoint) -> Iterator[Check]:
    """Check that weights in safetensors files can be read, and are finite."""
    names = [name or latest.path.name for name in latest.seal.files]
    files = [latest.path / name for name in names if name.endswith(".safetensors")]
    if not files:
        return
    import torch
    from safetensors import SafetensorError, safe_open

    tensors = 0
    for file in files:
        try:
            with disk_trouble(file, "read"), safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  no mapping
                    tensors += 1
                    value = weights.get_tensor(name)
                    if value.is_floating_point() and not torch.isfinite(value).all():
                        message = f"{name} in {file.name} has values that are not finite"
                        yield Check("weights", "fail", message, cause="training diverged")
                        return
        except SafetensorError as err:
            yield Check("weights", "fail", f"{file.name}: {err}", cause="an incomplete file")
            return
    yield Check("weights", "ok", f"{tensors} tensors in {len(files)} files, all finite")


def _dcp_tensors(latest: SealedCheckpoint) -> Iterator[Check]:
    """Check that the tensors of torch.distributed.checkpoint can be read, and are finite."""
    files = (latest.path / name for name in latest.seal.files)
    if folders := [file.parent for file in files if file.name == DCP_INDEX]:
        yield _all_finite(folders)


def _all_finite(folders: Sequence[Path]) -> Check:
    """Whether all floating-point tensors in these directories of torch.distributed.checkpoint are
    finite."""
    from forge.checkpoint.pickled_index import UnknownIndexError
    from forge.checkpoint.program_tensors import floating_parts

    tensors, files, bad = set(), set(), []
    try:
        for folder in folders:
            for part in floating_parts(folder):
                tensors.add((folder, part.name))
                files.add((folder, part.file))
                bad += [] if part.is_finite() else [f"{part.name} in {part.file}"]
    except UnknownIndexError as err:
        fix = "let a command of yours check them: program.validate"
        cause = "a newer torch, or the program's own kind of index"
        return Check("tensors", "warn", f"not checked: {err.what}", fix, cause)
    except DataError as err:
        return Check("tensors", "fail", err.what, cause="an incomplete file")
    if bad:
        message = f"values that are not finite: {', '.join(bad[:5])} ({len(bad)} parts of tensors)"
        return Check("tensors", "fail", message, cause="training diverged")
    return Check("tensors", "ok", f"{len(tensors)} tensors in {len(files)} files, all finite")


def _own_check(
    config: ResolvedConfig, program: Program, paths: RunPaths, latest: SealedCheckpoint | None
) -> Check:
    """The command of program.validate, by its exit status."""
    values = {
        "run": paths.root.absolute(),
        "checkpoints": paths.checkpoints.absolute(),
        "checkpoint": latest.path.absolute() if latest else "",
        "goal": config.goal,
        "data": "",
    }
    command = [filled(word, values) for word in program.validation]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        status, output = _run(command, program, environment)
    except OSError as err:
        message = f"cannot start {command[0]!r}: {err.strerror}"
        return Check("program", "fail", message, "correct program.validate")
    said = " ".join(output.split())[-SAID_CHARACTERS:]
    if status is None:
        message = f"{' '.join(command)} was killed after {program.validate_timeout_sec:g} s: {said}"
        fix = "see where it hangs, or raise program.validate_timeout_sec"
        return Check("program", "fail", message, fix)
    if status:
        message = f"{' '.join(command)} ended with {status}: {said}"
        return Check("program", "fail", message, "see what it says; exit status 0 means valid")
    return Check("program", "ok", said or f"{command[0]} ended with 0")


def _run(
    command: list[str], program: Program, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Exit status and output of a command; None where it did not end in time. Nothing that it has started
    is left, however this ends. Raises OSError where it cannot be started."""
    with tempfile.TemporaryFile() as output:  # no pipe: a process that is left would hold it open
        child = subprocess.Popen(
            command,
            cwd=program.source or ".",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=stop_with_parent,  # noqa: PLW1509  one system call
        )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = child.wait(program.validate_timeout_sec)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        return status, output.read().decode(errors="replace")


def validate_all(config: ResolvedConfig, *, fix: bool) -> None:
    """Verify the digests of every sealed checkpoint of a run, and print a table.

    fix: move corrupt and unsealed ones to quarantine, under the run's lock. Raises DataError if one is
    corrupt.
    """
    checkpoints, paths = checkpoints_of(config), RunPaths.of(config)
    table = Table(("step", "size", "verdict"), numbers=("step", "size"), wrapped=("verdict",))
    corrupt = []
    with lock(paths.root, "validate") if fix else nullcontext():
        for checkpoint in checkpoints.sealed():
            reasons = list(checkpoint.bad_files())
            size = sum(file.bytes for file in checkpoint.seal.files.values())
            verdict = "corrupt" if reasons else "valid"
            cells = [str(checkpoint.step), f"{size / 2**20:,.1f} MiB", verdict]
            table.add(cells, {"verdict": "red" if reasons else "green"})
            corrupt += [f"{checkpoint.path.name}: {reason}" for reason in reasons]
        table.print()
        if fix:
            checkpoints.newest_verified()
    if corrupt:
        raise DataError(
            f"corrupt checkpoints in {paths.checkpoints}: " + "; ".join(corrupt),
            fix="rerun the command that trained the run: it resumes from the newest valid one",
        )
