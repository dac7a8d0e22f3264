"""`forge validate` for another training program: digests, tensors, the program's own check."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge.checkpoint.index import DCP_INDEX
from forge.checkpoint.sealed import SealedCheckpoint
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.process import run_within
from forge.core.program_settings import Program, filled
from forge.core.records import Check, Trained
from forge.validation.checkpoint_checks import Checks

SAID_CHARACTERS = 300  # of the output of the program's own check, in a message
OUTPUT_BYTES = 2**16  # of its end, in which these are looked for


class ProgramChecks(Checks):
    """The checks of a sealed checkpoint; without one the program's own check alone."""

    CAUSE = "a corrupt file, or a model that the program's own check refuses"

    def __init__(
        self,
        config: ResolvedConfig,
        program: Program,
        checkpoint: SealedCheckpoint | None,
        goal: Trained | None,
    ) -> None:
        super().__init__(config, checkpoint)
        self.program, self.checkpoint, self.goal = program, checkpoint, goal

    def check_files(self) -> None:
        if checkpoint := self.checkpoint:
            self._run({"goal": self._goal, "digests": partial(_digests, checkpoint)})

    def _goal(self) -> Check | None:
        if self.goal is None or self.goal.step == self.step:
            return None
        message = f"trained.json says step {self.goal.step}, latest is at {self.step}"
        return Check("goal", "fail", message, "rerun the target train")

    def check_content(self) -> None:
        """Nothing: the tensors are the program's own."""

    def check_last(self) -> None:
        if checkpoint := self.checkpoint:
            tensors = partial(_dcp_tensors, checkpoint)
            self._run({"weights": partial(_weights, checkpoint), "tensors": tensors})
        if self.program.validation:
            paths = RunPaths.of(self.config)
            own = partial(_own_check, self.config, self.program, paths, self.checkpoint)
            self._run({"program": own})

    @property
    def measured(self) -> dict[str, Any]:
        return {"depth": "program"}


def _digests(checkpoint: SealedCheckpoint) -> str:
    if bad := list(checkpoint.bad_files()):
        raise DataError("; ".join(bad))
    return f"{len(checkpoint.manifest.files)} files as they were sealed"


def _weights(latest: SealedCheckpoint) -> Check | None:
    """Check that weights in safetensors files can be read, and are finite."""
    paths = (latest.folder / name for name in latest.manifest.files)
    files = [path for path in paths if path.name.endswith(".safetensors")]
    if not files:
        return None
    from safetensors import SafetensorError, safe_open

    from forge.checkpoint.program_tensors import TensorPart

    tensors = 0
    for file in files:
        try:
            with disk_trouble(file, "read"), safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  no mapping
                    tensors += 1
                    part = TensorPart(name, file.name, weights.get_tensor(name))
                    if part.tensor.is_floating_point() and not part.is_finite():
                        message = f"{name} in {file.name} has values that are not finite"
                        return Check("weights", "fail", message, cause="training diverged")
        except SafetensorError as err:
            return Check("weights", "fail", f"{file.name}: {err}", cause="an incomplete file")
    return Check("weights", "ok", f"{tensors} tensors in {len(files)} files, all finite")


def _dcp_tensors(latest: SealedCheckpoint) -> Check | None:
    """Check that the tensors of torch.distributed.checkpoint can be read, and are finite."""
    files = (latest.folder / name for name in latest.manifest.files)
    folders = [file.parent for file in files if file.name == DCP_INDEX]
    return _all_finite(folders) if folders else None


def _all_finite(folders: Sequence[Path]) -> Check:
    """Check that all floating-point tensors in these directories of torch.distributed.checkpoint are
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
        "checkpoint": latest.folder.absolute() if latest else "",
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
    seconds, source = program.validate_timeout_sec, program.source or "."
    with tempfile.TemporaryFile() as output:
        status = run_within(seconds, command, cwd=source, environment=environment, output=output)
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        return status, output.read().decode(errors="replace")
