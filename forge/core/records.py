"""Records: the JSON files that hold the results of the steps of a run, one class for each file.

Each file has the number of its format; a file of another version of Forge is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forge.core.errors import DataError, OtherFormat
from forge.core.files import (
    MAX_SMALL_JSON_BYTES,
    RelativePath,
    as_object,
    parse_json,
    read_object,
    write_json,
)
from forge.core.process import Process
from forge.core.section import WithPlugins
from forge.core.service_settings import Report, ValidateSettings


class RecordPart(BaseModel):
    """A part of a record. Unknown keys are refused: the format determines the keys."""

    # defer_build: a command uses few of the classes, and building all of them slows its start.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Record(RecordPart):
    """A JSON file that is written atomically and never changed."""

    FORMAT: ClassVar[int] = 1
    FIX: ClassVar[str] = "remove it and run the step that writes it again"
    PRIVATE: ClassVar[bool] = False  # only its owner may read it
    MAX_BYTES: ClassVar[int] = MAX_SMALL_JSON_BYTES

    def write(self, path: Path) -> None:
        """Replace the file, atomically. Raises UnfitError when the disk cannot be written."""
        values = self.model_dump(mode="json", by_alias=True)
        write_json(path, {"format": self.FORMAT, **values}, private=self.PRIVATE)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises DataError where the file is missing, corrupt or edited, OtherFormat where it is of
        another version of Forge."""
        values = content(path, cls.FORMAT, cls.FIX, cls.MAX_BYTES)
        return validated(cls, values, path, fix=cls.FIX)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Self:
        """Parse the bytes of the file, which the caller has verified. Raises as `read`."""
        values = as_object(parse_json(data, path), path, "format")
        return validated(cls, _of_format(values, path, cls.FORMAT, cls.FIX), path, fix=cls.FIX)

    @classmethod
    def read_if_there(cls, path: Path) -> Self | None:
        """Read the file, as `read`; None without a file."""
        return cls.read(path) if path.exists() else None


Content = TypeVar("Content", bound=BaseModel)


def validated(model: type[Content], values: Any, path: Path, *, fix: str = "") -> Content:
    """The content of a JSON file as its class. DataError, with the first key that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as err:
        first = err.errors()[0]
        key = ".".join(str(part)[:60] for part in first["loc"]) or "all of it"
        raise DataError(
            f"{path} cannot be read: {key}: {first['msg']}",
            cause="edited by hand, or written by another program",
            fix=fix,
        ) from None


def content(
    path: Path, expected: int, fix: str, most: int = MAX_SMALL_JSON_BYTES
) -> dict[str, Any]:
    """The object in a file, without its format. Raises DataError where it has none, OtherFormat where it
    is not the expected one."""
    return _of_format(read_object(path, "format", most=most), path, expected, fix)


def _of_format(values: dict[str, Any], path: Path, expected: int, fix: str) -> dict[str, Any]:
    if (number := values.pop("format")) != expected:
        raise OtherFormat.of(path, number, expected, fix=fix)
    return values


# --- directories -----------------------------------------------------------------------------------


class Lock(Record):
    """.lock: the process that may write a directory, known as `Process` knows it."""

    FORMAT = 2
    FIX = "see that no command of that version works there any more, then remove the file"

    host: str
    pid: int
    pid_namespace: int
    boot_id: str
    machine_id: str
    start_ticks: int
    slurm_job: str | None
    command: str
    restart: int
    """Number of times that Slurm had restarted the job."""
    cluster: str | None = None
    """Slurm's name of the cluster of the job: ids of jobs repeat between clusters."""

    @property
    def process(self) -> Process:
        return Process.from_json(self.model_dump())


class Damage(Record):
    """damage.json: why the checkpoint in this directory was moved to quarantine."""

    reasons: list[str]


# --- the workflow ----------------------------------------------------------------------------------


class WorkflowRuns(Record):
    """.snakemake/forge/runs.json: the runs of the last workflow command, whatever set its config."""

    folders: dict[str, str]
    """Run name -> its directory, relative to the project's."""


class RunSettings(WithPlugins, Record):
    """.snakemake/forge/RUN.….json: the sections of a run's config that one rule reads and its config.json
    does not hold, so that changing them trains nothing again. The option --settings names the file.

    In the project, and not beside the results: a run's directory may come from somebody else.
    """

    PRIVATE = True  # the address of a tracker may have a password

    # As in Config: a field named `validate` would hide a method of pydantic.
    validation: ValidateSettings = Field(ValidateSettings(), alias="validate")
    report: Report = Report()
    jobs: dict[str, dict[str, Any]] = {}
    """For training, what the profile gives the rule of each kind of job that the launcher submits, as
    `Request.to_json`, by rule; {} without Slurm."""

    @model_validator(mode="before")
    @classmethod
    def _without_certify(cls, values: Any) -> Any:
        """Without the section that earlier versions wrote (Config.RETIRED), for a job in the queue."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key != "certify"}

    @property
    def sections(self) -> dict[str, Any]:
        """The sections of the config that the file holds, by key."""
        return self.model_dump(mode="json", by_alias=True, exclude={"jobs"}, exclude_unset=True)


class LoadedModules(Record):
    """.snakemake/forge/modules-HOST.json: what `module load` changed there, for the later commands of one
    start of a job. In the project: variables decide what ranks execute."""

    PRIVATE = True

    job: str
    restart: int
    asked: list[str]
    names: list[str]
    """Of the modules, in full."""
    before: dict[str, str]
    """Of the variables below; without those that were not set."""
    after: dict[str, str]
    """The variables that were set or changed."""


class StageProof(Record):
    """.snakemake/forge/RUN-….stage.json: that `forge stage` of this project wrote the run's stage record.

    In the project, and not beside the results: the record names the Python that runs on the nodes.
    """

    record: str
    """blake3 of stage.json."""
    cluster: str | None = None
    """Where the job of the record runs: ids of jobs repeat between clusters."""
    restart: int | None = None
    """Which start of the job has staged, 0 for the first; None where only Slurm could tell."""


# --- staging ---------------------------------------------------------------------------------------


class StageRecord(Record):
    """stage.json: what `forge stage` did in this allocation. Empty where it did nothing."""

    FIX: ClassVar[str] = "run forge stage again"

    digest: str = ""
    """Digest of the shards, or of a program's inputs; "" for a program without inputs."""
    bytes: int = 0
    """Size of these files."""
    folders: dict[str, str] = {}
    """The directory that the ranks of each node read: a copy on its disk, or the shared one."""
    sent: list[str] = []
    """Nodes that got a copy now. The others already had one, or read in place."""
    job: str | None = None
    """The Slurm job that the copies are removed with."""
    roots: dict[str, str] = {}
    """The private directory of the job's copies, by node; {} where nothing is to be removed."""
    python: str | None = None
    """The Python on the nodes that runs Forge there, with `stage.project`."""
    source: str = ""
    """The directory on the nodes in which another training program runs, with `stage.project`."""
    source_digest: str = ""
    """Digest of the files in `source`, when they were copied."""
    phase_sec: dict[str, float] = {}
    """Seconds of archiving, sending and verifying."""

    @property
    def interpreter(self) -> str:
        """The Python for the ranks: the one that `stage.project` copied, else this process's."""
        return self.python or sys.executable


# --- the environment of a launch --------------------------------------------------------------------


class ContainerImage(RecordPart):
    """The container of the ranks."""

    engine: str
    version: str
    """What the engine says of itself, such as `podman version 4.3.1`."""
    image: str
    """As machine.yaml names it."""
    digest: str
    """blake3 of an image that is one file, podman's id of one that it stores; "" where there is none, as
    of a directory or of an image that is in a registry."""


class LaunchEnvironment(RecordPart):
    """Variables that machine.yaml adds to the environment of the ranks: values may be of one machine."""

    variables: list[str]
    modules: list[str] = []
    container: ContainerImage | None


# --- preflight -------------------------------------------------------------------------------------


class NodeResult(RecordPart):
    """The checks of one node."""

    node: str
    line: str
    checks: list[Check]


class RanksResult(RecordPart):
    """The checks of the ranks on all healthy nodes."""

    world_size: int
    checks: list[Check]


class RanksIdentity(RecordPart):
    """Facts that the checks of the ranks depend on. While these are unchanged they need not run again."""

    job: str | None
    """Id of the Slurm job."""
    nodes: dict[str, dict[str, str] | None]
    """Node -> versions of its software; None where it did not answer."""
    boots: dict[str, str] = Field(default_factory=dict)
    """Node -> boot id of its kernel, of those that answered."""
    ranks_per_node: int
    launcher: str
    fabric: dict[str, Any]
    """The section of machine.yaml, which another version of Forge may have had other keys in."""
    staged: list[str]
    """Digests of the staged sets of files."""


class PreflightResult(Record):
    """preflight.json: the results of the last `forge preflight`."""

    status: Literal["ok", "failed"]
    nodes: list[NodeResult]
    ranks: RanksResult
    chosen: list[str]
    """The nodes that train; [] where too few are healthy."""
    left_out: dict[str, str]
    """Node -> why it is unhealthy."""
    restart: int
    """Slurm's restart count of the job."""
    identity: RanksIdentity

    @property
    def all_checks(self) -> list[tuple[str, Check]]:
        """(node, or `ranks`; check) of each check."""
        of_nodes = [(node.node, check) for node in self.nodes for check in node.checks]
        return of_nodes + [("ranks", check) for check in self.ranks.checks]


class PreflightPass(Record):
    """.allocation/preflight.json: preflight passed in this allocation."""

    cluster: str | None = None
    job: str | None = None
    """The Slurm job; None outside of one."""
    restart: int = 0
    """How often Slurm had started the job again."""
    host: str
    nodes: list[str]
    """All healthy nodes, spare ones included."""


# --- training and validation -----------------------------------------------------------------------


class Trained(Record):
    """trained.json: the run is at its goal."""

    run: str
    goal_step: int
    step: int
    checkpoint: str
    """Directory of the checkpoint, relative to the run's."""
    weights_digest: str
    config_digest: str
    parent: dict[str, Any] | None = None
    """Run, step and digest of the checkpoint that the run started from."""

    @classmethod
    def read_from(cls, path: Path, step: int) -> Trained | None:
        """Read the record of a goal from this step on; None without one: that of an earlier goal says
        nothing of a checkpoint on the way to a later one."""
        goal = cls.read_if_there(path)
        return goal if goal and goal.step >= step else None


class Exported(Record):
    """exported.json: the last export of a run's newest checkpoint to its default directory."""

    step: int
    folder: RelativePath
    """Relative to the run's directory."""
    files: dict[RelativePath, str]
    """Name -> blake3."""


class Sample(RecordPart):
    """A prompt and its completion by the model."""

    prompt: str
    text: str


class TextBytes(RecordPart):
    """Targets of validation windows, and the bytes of the original text that they cover."""

    targets: int
    bytes: int
    estimated: bool = False
    """By the vocabulary: the ids came without text, or from an earlier version."""


class BitsPerByte(NamedTuple):
    """Validation loss in bits per byte of text. estimated: its bytes, by the vocabulary (shown: `~`)."""

    value: float
    estimated: bool

    @classmethod
    def of(cls, recorded: Any) -> Self | None:
        """Read it from a record with the keys of `keys`; None where bytes are not known."""
        return None if recorded.bpb is None else cls(recorded.bpb, bool(recorded.bpb_estimated))

    @staticmethod
    def keys(measured: BitsPerByte | None) -> dict[str, Any]:
        """Keys of a record, None where they are left out."""
        if measured is None:
            return {"bpb": None, "bpb_estimated": None}
        return {"bpb": measured.value, "bpb_estimated": measured.estimated or None}

    @property
    def number(self) -> str:
        return f"{'~' if self.estimated else ''}{self.value:.4f}"

    def __str__(self) -> str:
        return f"{self.number} bits per byte"


def _is_none(value: object) -> bool:
    return value is None


class Validated(Record):
    """validated.json: the checkpoint of a run is valid."""

    step: int
    checkpoint_digest: str
    """blake3 of checkpoint.json."""
    status: Literal["valid", "invalid"] = "valid"
    loss: float | None = None
    """Validation loss in nats per token; None where it was not measured (validate.depth)."""
    bpb: float | None = Field(default=None, exclude_if=_is_none)
    """The loss in bits per byte of text; None where bytes are not known."""
    bpb_estimated: bool | None = Field(default=None, exclude_if=_is_none)
    """Bytes were estimated by the vocabulary."""
    weights_digest: str | None = None


class Validation(Validated):
    """validation.json: the results of `forge validate`, of valid and invalid checkpoints."""

    depth: str
    settings: dict[str, Any] = {}
    """The sections `validate` and `report` of the config that this was made by."""
    reasons: list[str] = []
    checks: list[Check]
    samples: list[Sample] = []

    @property
    def short(self) -> Validated:
        """The part that later steps of the workflow depend on."""
        return Validated.model_validate(self.model_dump(include=set(Validated.model_fields)))


# --- evaluation ------------------------------------------------------------------------------------


class Score(RecordPart):
    """One metric of one task, or of a group of tasks."""

    task: str
    metric: str
    """The metric's name in the harness; with its filter behind a comma, unless that is `none`."""
    value: float | None
    """None where the number is not finite."""
    stderr: float | None = None
    higher_is_better: bool | None = None
    num_documents: int
    num_fewshot: int | None = None
    """None for a group whose tasks differ."""
    version: str = ""
    """Version of the task."""
    data_digest: str = ""
    """Digest of all documents, prompts and targets; empty for a group."""


class Evaluated(RecordPart):
    """Everything that scores depend on besides the device: equal values give equal scores."""

    checkpoint_digest: str
    """blake3 of checkpoint.json."""
    tasks: list[str]
    task_files: str
    """Digest of the files in evaluate.include_path; empty without them."""
    num_fewshot: int | None
    limit: int | None
    harness: str
    """Version of lm-eval."""
    seq_len: int = 0
    """Tokens that the model read at once: train.seq_len. 0 in records of before, whose models read as
    many as their export has positions, and summed log-probabilities in the precision of training."""


class Evaluation(Record):
    """evaluations/step-….json: the scores of one checkpoint."""

    step: int
    of: Evaluated
    scores: list[Score]
    device: str
    precision: str
    seconds: float
    versions: dict[str, str]


Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """Result of a check: what is wrong, the likely cause, and what to do about it."""

    name: str
    status: Status
    message: str
    fix: str = ""
    cause: str = ""


def failed_checks(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.status == "fail"]


def summary_of_checks(checks: Iterable[Check]) -> str:
    """Names and messages of all checks, in one line."""
    return "; ".join(f"{check.name}: {check.message}" for check in checks)
