"""Records of `forge submit` and of the jobs that it has submitted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forge.core.records import Record


class SubmitCheck(Record):
    """.snakemake/forge/submit-check.json: what the dry run of `forge submit` found."""

    refused: str = ""
    """The error with which the command would be refused, and its exit code."""
    code: int = 0
    rules: list[str] = Field(default=[])
    """Of the jobs that will run."""
    submitted: str = ""
    """The file with the runs as they are now."""
    runs: dict[str, str] = Field(default={})
    """The directory of each run, by its name."""
    shared: list[str] = Field(default=[])
    """What these jobs make that belongs to no run, such as tokens."""
    machine: str | None = None
    """The machine.yaml in use."""
    account: str = ""
    """Of default-resources, as `partition` and `qos`."""
    partition: str = ""
    qos: str = ""
    requests: list[list[str]] = Field(default=[])
    """Account and partition of each request to Slurm."""


class Controller(Record):
    """.snakemake/forge/controllers/JOB.json: a job of `forge submit`, written by that command."""

    PRIVATE = True  # words and variables of a command may have a password
    job: str
    cluster: str
    command: list[str]
    """Arguments for Snakemake."""
    check: SubmitCheck
    environment: dict[str, str]
    """Variables of the shell that Slurm, or a site's prolog, sets anew in a job."""
    time: float = 0.0
    """Of the submission, in seconds since the epoch; 0 in records of earlier versions."""


ControllerPhase = Literal["running", "done", "failed", "refused", "cancelled", "stopped"]


class ControllerState(Record):
    """.snakemake/forge/controllers/JOB.state.json: what that job does or how it
    ended, written by the job."""

    job: str
    phase: ControllerPhase
    reason: str = ""
    time: float
    """Of the last change of the phase, in seconds since the epoch."""
    starts: int = 1
    """Number of times that the job has started: first, and after requeues."""
    told: list[str] = Field(default=[])
    """Events that `notify.command` has been called for."""
