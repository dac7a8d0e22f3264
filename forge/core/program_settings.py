"""The section `program`: a training program in place of Forge's own, and what Forge may expect of it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from forge.core.errors import ConfigError
from forge.core.section import FilePath, Section

# Written {name} in `command` and `resume`.
PLACEHOLDERS = ("run", "checkpoints", "goal", "data", "hub", "resume", "rank")
STEP = "{step}"


class Epochs(Section):
    """A goal in epochs."""

    epochs: int = Field(ge=1)
    """Train this many epochs."""
    steps_per_epoch: int = Field(ge=1)
    """Steps of one epoch, on all ranks together."""


class Checkpoints(Section):
    """Rules for recognizing the program's checkpoints, files or directories in `{checkpoints}`."""

    BOUND = ("pattern",)

    pattern: str = "checkpoint-{step}"
    """Name of a checkpoint; `{step}` stands for its step."""
    complete: list[str] = Field(default=[])
    """Files (globs) in a checkpoint that are there when it is complete. `{step}` stands for its step,
    `{rank}` for every rank, so that a rank that is still writing is waited for."""
    settle_sec: float = Field(30, gt=0, le=3600)
    """A complete checkpoint is sealed when it has not changed for this long while all ranks run, or at
    once when the heartbeats of all ranks are beyond its step, or all ranks have exited with 0."""

    @field_validator("complete")
    @classmethod
    def _are_globs(cls, marks: list[str]) -> list[str]:
        for mark in marks:
            try:  # here, and not in the thread that seals
                next(Path("/nonexistent").glob(mark), None)
            except (IndexError, NotImplementedError, ValueError):
                raise ValueError(
                    f"{mark!r} names no file in a checkpoint: it must be a relative path, in which ** is"
                    " written between slashes alone, such as **/model.bin"
                ) from None
        return marks

    @model_validator(mode="after")
    def _names_a_step(self) -> Self:
        if self.pattern.count(STEP) != 1 or "/" in self.pattern:
            raise ValueError(
                f"pattern is {self.pattern!r}: it must be a plain name with one {{step}}, such as"
                " checkpoint-{step}"
            )
        return self


class StopSettings(Section):
    """Signal that asks the program to save and exit, and its grace period."""

    BOUND = ()

    signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "none"] = "SIGTERM"
    """Signal to every rank; `none`: the program cannot be asked, and is killed."""
    grace_sec: float = Field(60, gt=0, le=10**6)
    """Seconds that a rank has after the signal, before it is killed."""


class HeartbeatSettings(Section):
    """Heartbeat by which Forge sees that a rank makes progress."""

    BOUND = ()

    file: FilePath | None = None
    """File that a rank touches, or writes its step into; `{run}` and `{rank}` stand for the run's
    directory and the rank. null: the one in FORGE_HEARTBEAT."""
    log: bool | Literal["any"] = False
    """true: any output of a rank counts as its heartbeat, too. any: output of any rank counts for all,
    for programs whose rank 0 alone prints."""
    timeout_sec: float = Field(900, gt=0, le=10**6)
    """A rank without heartbeat for this long is hung: the ranks are killed and started again."""


class Program(Section):
    """Another training program in place of `tokenizer`, `tokenize`, `model` and `train`."""

    BOUND = ("inputs",)

    command: list[str] = Field(min_length=1)
    """The program and its arguments, without a shell; every rank runs it. `{run}` `{checkpoints}`
    `{goal}` `{data}` `{hub}` `{resume}` `{rank}` stand for the values of FORGE_RUN, …, FORGE_RESUME and
    RANK."""
    resume: list[str] = Field(default=[])
    """Arguments that are added when there is a checkpoint, such as `--resume_from={resume}`."""
    goal: int | Epochs | None = Field(None)
    """Step at which the run is complete, or `{epochs: 3, steps_per_epoch: 250}`. null: complete when
    every rank exits with 0; only without `checkpoints`."""
    source: FilePath | None = None
    """Directory in which the program runs; null: the project's. Its files are recorded in every seal, and
    copied to the nodes with `stage.project`, which needs it."""
    inputs: list[FilePath] = Field(default=[])
    """Files, directories and globs that the program reads; FORGE_DATA is the directory that has all of
    them. Files of the Hugging Face hub as `hf://owner/name@revision/file` or
    `hf://datasets/owner/name@revision/*.parquet` are downloaded on the login node, to
    `{FORGE_HUB}/owner/name/file`."""
    checkpoints: Checkpoints | None = None
    """null: the program has no checkpoints that Forge knows; every start begins from nothing."""
    keep_last: int | None = Field(None, ge=1)
    """Number of newest sealed checkpoints to keep; null: Forge removes none."""
    stop: StopSettings = StopSettings()
    heartbeat: HeartbeatSettings | None = None
    """null: hangs are not detected."""
    export: list[str] = Field(default=["*"], min_length=1)
    """Files (globs) of a checkpoint that `forge export` copies."""
    validation: list[str] = Field(default=[], alias="validate")
    """Command that checks the last checkpoint, `{checkpoint}`: exit status 0 means valid."""
    validate_timeout_sec: float = Field(3600, gt=0, le=10**6)
    """After this many seconds that command is killed with all that it has started, and the checkpoint is
    not valid."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for key, words, known in (
            ("command", self.command, PLACEHOLDERS),
            ("resume", self.resume, PLACEHOLDERS),
            ("validate", self.validation, (*PLACEHOLDERS[:-2], "checkpoint")),
        ):
            for name in re.findall(r"\{([a-z_]+)\}", " ".join(words)):
                # Other words in braces may be the program's own.
                if name not in known and (meant := difflib.get_close_matches(name, known, n=1)):
                    raise ValueError(
                        f"{key} has {{{name}}}, which stands for nothing (did you mean {{{meant[0]}}}?)"
                    )
        if self.checkpoints and self.goal is None:
            raise ValueError(
                "goal is missing: with checkpoints, Forge must know the step of the end"
            )
        if self.goal is not None and not self.checkpoints:
            raise ValueError("goal is given without checkpoints, by which Forge knows the step")
        return self

    @property
    def local_inputs(self) -> list[str]:
        """Directories that hold the files which `inputs` names on this machine."""
        local = [name for name in self.inputs if "://" not in name]
        plain = [re.split(r"[*?\[]", name, maxsplit=1)[0] for name in local]  # up to a glob
        return [path if Path(path).is_dir() else str(Path(path).parent) for path in plain]

    @property
    def goal_step(self) -> int:
        """The step at which the run is complete; 0 without checkpoints."""
        if isinstance(self.goal, Epochs):
            return self.goal.epochs * self.goal.steps_per_epoch
        return self.goal or 0

    @property
    def folder(self) -> Path:
        """The directory in which the program runs. Raises ConfigError where there is none."""
        source = self.source or "."
        if not Path(source).is_dir():
            raise ConfigError(
                f"program.source is {source!r}: there is no such directory",
                cause=f"paths are relative to {Path.cwd()}",
                fix="name the directory that has the program",
            )
        return Path(source).absolute()

    def require_source(self, what: str) -> None:
        """ConfigError where nodes need a copy of the program's directory, and `source` does not name it.
        what: why they need one."""
        if self.source is None:
            raise ConfigError(
                what,
                cause="without program.source it runs in the project's directory, which is not copied",
                fix="set program.source to the directory that has the program",
            )


def filled(text: str, values: dict[str, Any]) -> str:
    """`text` with each `{name}` that `values` knows replaced; other braces stay."""
    return re.sub(
        r"\{([a-z_]+)\}",
        lambda match: str(values[match[1]]) if match[1] in values else match[0],
        text,
    )
