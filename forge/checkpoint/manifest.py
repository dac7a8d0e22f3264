"""Both forms of what a checkpoint has on disk about its files and what made it: the manifest in one of
Forge's own trainer, `checkpoint.json`, and the seal beside one of another program. No torch.

Only this module reads, checks, seals and writes the manifest. Its digest protects it from disk errors,
not from a program or a person that writes a new one: keys, types and bounds are checked as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_serializer

from forge.core.config import ResolvedConfig
from forge.core.errors import USE_THAT_VERSION, DataError, OtherFormat
from forge.core.file_list import FileEntry
from forge.core.files import (
    MAX_JSON_BYTES,
    MAX_SMALL_JSON_BYTES,
    PlainName,
    canonical,
    digest_bytes,
    digest_file,
    is_file_below,
    read_json,
    relative_path,
    write_json,
)
from forge.core.process import hostname
from forge.core.program_settings import Program
from forge.core.provenance import code, config_digest, cpu_name, installed_packages, versions
from forge.core.records import LaunchEnvironment, Record, RecordPart, validated
from forge.core.train_settings import Shard, Train

FORMAT: Literal[6] = 6
MANIFEST = "checkpoint.json"

# Steps, sizes and counts fit into 64 bits.
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Part(BaseModel):
    """A part of the manifest. Unknown keys are kept, because the digest covers them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    def to_json(self) -> dict[str, Any]:
        """The values as they are in the file."""
        return self.model_dump()


class StoredFile(Part):
    """A file of the checkpoint: its size and blake3."""

    bytes: Count
    digest: str

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.bytes, self.digest)


class SkippedSteps(Part):
    """Number of steps without an update: in the run, and in a row just before the checkpoint."""

    steps: Count
    in_a_row: Count


class ReferenceLosses(Part):
    """Loss of each rank on its reference batch of `samples` samples, which validation recomputes."""

    samples: Count
    losses: Annotated[list[float], Field(min_length=1)]


class Code(Part):
    """Version of Forge; where it ran from a git checkout its commit, and whether files differ from it.
    diff: blake3 of these differences (`git diff HEAD`); None without any."""

    version: str
    commit: str | None
    dirty: bool | None
    diff: str | None = None

    @model_serializer(mode="wrap")
    def _without_a_diff(self, values: Any) -> dict[str, Any]:
        """Most have none, as those that were written before there was this key."""
        content: dict[str, Any] = values(self)
        return {k: v for k, v in content.items() if k != "diff" or v is not None}


class RecordedModel(Part):
    """`model` of the recorded config."""

    dropout: float


class RecordedTrain(Part):
    """`train` of the recorded config."""

    shard: Shard
    compile: bool | None
    fp8: str | None


class RecordedIds(Part):
    """Content ids of the run, as in `core.config.Ids`; "" and {} for those that it does not have."""

    tokenizer: str
    tokens: str
    sources: dict[str, str]
    inputs: str
    model: str
    plugins: dict[str, str] = Field(default={}, exclude_if=lambda plugins: not plugins)
    plugins_before: dict[str, list[str]] = Field(default={}, exclude_if=lambda plugins: not plugins)


class RecordedConfig(Part):
    """The config that made the checkpoint, with every key that its version of Forge had.

    Not a `Config`: a version of Forge with other keys can still read the checkpoint. The fields are
    those that validation and resume read.
    """

    model: RecordedModel
    train: RecordedTrain
    ids: RecordedIds
    parent: str | None

    @classmethod
    def of(cls, config: ResolvedConfig) -> Self:
        """The record of a config, with the ids that config.json leaves out because they are empty."""
        return cls(**{**config.to_json(), "ids": RecordedIds(**config.ids.model_dump())})


class Artifact(Part):
    """A tokenizer, tokens or pretrained weights: content id and digest."""

    id: str
    digest: str


class Numerics(Part):
    """Everything besides weights and data that a loss depends on bitwise (trainer/numerics.py)."""

    device: str
    device_name: str
    precision: Literal["fp32", "bf16"]
    threads: Annotated[int, Field(ge=1, le=2**16)]
    gpu_products: str
    cpu_products: str
    cpu_capability: str

    @property
    def cpu_threads(self) -> int | None:
        """Threads a rank, on which the order of sums depends; None on a GPU, which adds without them."""
        return self.threads if self.device == "cpu" else None


class Versions(Part):
    """Versions of Python and of packages."""

    python: str
    torch: str
    torchao: str | None
    """None where it was not used."""

    @classmethod
    def of(cls, train: Train) -> Self:
        """The versions that a training with these settings uses here."""
        return cls.model_validate({"torchao": None, **versions(fp8=train.fp8 is not None)})


class Hardware(Part):
    """Host and processor of rank 0; the processors of all ranks, where these compute differently."""

    host: str
    cpu: str


class ParentCheckpoint(Part):
    """The checkpoint of another run that this run started from; `digest` is that of its manifest."""

    run: str
    step: Count
    digest: str


class Lineage(Part):
    """Code, config, data and hardware that made the checkpoint; `parent` is None for a run that
    started at step 0, `sources` {} for a run without sources, `model` for one that did not start from
    pretrained weights."""

    code: Code
    config: RecordedConfig
    config_digest: str
    tokenizer: Artifact
    tokens: Artifact
    versions: Versions
    hardware: Hardware
    numerics: Numerics
    parent: ParentCheckpoint | None
    sources: dict[str, Artifact]
    model: Artifact | None
    environment: LaunchEnvironment | None = None
    """None where machine.yaml names no container and no variables."""
    packages: dict[str, str] | None = None
    """Versions of all installed packages by name; None of a checkpoint that does not tell."""

    @model_serializer(mode="wrap")
    def _without_later_keys(self, values: Any) -> dict[str, Any]:
        """Without keys that are None and that earlier lineages do not have: their digest holds."""
        content: dict[str, Any] = values(self)
        later = ("environment", "packages")
        return {k: v for k, v in content.items() if k not in later or v is not None}

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        *,
        tokenizer_digest: str,
        tokens_digest: str,
        numerics: dict[str, Any],
        parent: ParentCheckpoint | None = None,
        source_digests: dict[str, str] | None = None,
        model: Artifact | None = None,
    ) -> Self:
        """The lineage of a run that trains on these data, on this host. source_digests: of the tokens of
        each source, for a run with sources."""
        return cls(
            code=Code(**code()),
            config=RecordedConfig.of(config),
            config_digest=config_digest(config),
            tokenizer=Artifact(id=config.ids.tokenizer, digest=tokenizer_digest),
            tokens=Artifact(id=config.ids.tokens, digest=tokens_digest),
            versions=Versions.of(config.train),
            hardware=Hardware(host=hostname(), cpu=cpu_name()),
            numerics=Numerics(**numerics),
            parent=parent,
            sources={
                name: Artifact(id=config.ids.sources[name], digest=digest)
                for name, digest in (source_digests or {}).items()
            },
            model=model,
            packages=installed_packages(),
        )

    @property
    def data_digests(self) -> dict[str, str]:
        """The digest of each artefact that training reads."""
        sources = {name: tokens.digest for name, tokens in self.sources.items()}
        return data_digests(self.tokens.digest, sources, self.tokenizer.digest)


def data_digests(tokens: str, sources: Mapping[str, str], tokenizer: str) -> dict[str, str]:
    """The digest of each artefact that a run reads, by what people call it. sources: {} for a run without
    sources; else the list of them, `tokens`, may change while they stay."""
    of_sources = {f"tokens of source {name}": digest for name, digest in sources.items()}
    return {**(of_sources or {"tokens": tokens}), "tokenizer": tokenizer}


class RecordedStage(Part):
    """Weights of the sources from a step on."""

    step: Count
    weights: dict[str, float]


class SourceUse(Part):
    """A source: tokens of its training split, windows in an epoch of it, and how many samples the run and
    its parents have drawn from it before `step`."""

    tokens: Count
    windows: Count
    samples: Count


class RecordedMix(Part):
    """By which weights a run with sources draws its samples: what a resume, a child and reports need.

    `stages` begin where the run does, or where a parent of it began to draw by its weights;
    `drawn_before` are samples by source before the first of them.
    """

    stages: list[RecordedStage]
    drawn_before: dict[str, Count]
    sources: dict[str, SourceUse]


class MergedParent(Part):
    """A checkpoint in a merge: its step, digest and weight."""

    step: Count
    digest: str
    weight: float


class Merged(Part):
    """Merge of checkpoints of one run: sums of weight times parent in fp64, in order of steps, rounded to
    fp32."""

    form: Literal["mean", "minus-sqrt", "weights"]
    """docs/plugins/merge.md has their formulas."""
    parents: Annotated[list[MergedParent], Field(min_length=2)]
    """Oldest first."""
    code: Code
    loss: float
    """Validation loss of the merge; as `newest_loss` in nats per token."""
    newest_loss: float
    """That of the newest parent, on the same windows."""

    def __str__(self) -> str:
        return f"a merge ({self.form}) of steps {', '.join(str(one.step) for one in self.parents)}"


class Manifest(Part):
    """The content of `checkpoint.json`. Steps are completed steps, samples are counted from step 0."""

    LISTED_IN: ClassVar[str] = "the manifest"
    is_edited: ClassVar[bool] = False  # such a one is not read

    step: Count
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    decay_steps: Count
    why_not_compiled: str
    """Why training has not compiled the blocks (train.compile); "" where it has."""
    next_sample: Count
    skipped: SkippedSteps
    reference: ReferenceLosses
    lineage: Lineage
    files: dict[PlainName, StoredFile]
    mix: RecordedMix | None
    """None for a run without sources."""
    spike_window: list[Annotated[list[float], Field(min_length=2, max_length=2)]]
    """Loss and gradient norm of the last steps that updated the weights, oldest first, on which the rule
    of train.spike depends; [] without it."""
    format: Literal[6] = FORMAT
    merged: Merged | None = Field(default=None, exclude_if=lambda merged: merged is None)
    """None of a checkpoint of training. A merge has weights and no optimizer state; all else is that of
    its newest parent, but for `reference`."""
    digest: str = ""
    """Over all else; empty until the manifest is sealed."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest in a checkpoint's directory.

        Raises DataError where it is missing, corrupt or not one of Forge's; OtherFormat where another
        version of Forge wrote it; UnfitError when the disk reports an error.
        """
        content = read_json(folder / MANIFEST, MAX_SMALL_JSON_BYTES)
        if not isinstance(content, dict) or "format" not in content:
            raise DataError(f"{folder} is not a checkpoint", cause="not written by Forge")
        if content["format"] != FORMAT:
            what = f"checkpoint {folder}"
            raise OtherFormat.of(what, content["format"], FORMAT, fix=USE_THAT_VERSION)
        if not _is_sealed(content):
            raise DataError(
                f"{folder / MANIFEST} does not match the digest that it contains",
                cause="a disk error, or an edit",
            )
        return validated(cls, content, folder / MANIFEST)

    def write(self, folder: Path) -> Self:
        """Write the manifest into a checkpoint's directory, durably; the sealed manifest. Raises
        UnfitError when it cannot be written."""
        sealed = self.sealed()
        write_json(folder / MANIFEST, sealed.to_json())
        return sealed

    def sealed(self) -> Self:
        """The manifest with its own digest."""
        return self.model_copy(update={"digest": _digest(self.to_json())})

    def digest_in(self, folder: Path) -> str:
        """blake3 of checkpoint.json, which has the digests of all files."""
        return digest_file(folder / MANIFEST)

    def names_in(self, folder: Path) -> set[str]:
        """Names of the files in the directory, besides the manifest."""
        return {path.name for path in folder.iterdir()} - {MANIFEST}

    def with_files(self, files: dict[str, StoredFile]) -> Self:
        """The manifest with these files, not sealed."""
        return self.model_copy(update={"files": files, "digest": ""})


def _digest(content: dict[str, Any]) -> str:
    """blake3 of the canonical JSON of all but the digest. Raises ValueError for NaN and infinity."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return digest_bytes(canonical(rest))


def _is_sealed(content: dict[str, Any]) -> bool:
    try:
        return bool(content.get("digest") == _digest(content))
    except (ValueError, RecursionError):  # NaN, or nested too deeply: Forge writes no such value
        return False


# --- another program --------------------------------------------------------------------------------

# Path in a checkpoint, or "" for a checkpoint that is a file.
SealedName = Annotated[str, AfterValidator(lambda name: name and relative_path(name))]


class SealLineage(RecordPart):
    """Artifacts and code that made a checkpoint of a program."""

    run: str
    config_digest: str
    command: list[str]
    source: Artifact | None
    """The directory of the program, and the digest of its files."""
    inputs: Artifact | None
    """Id and digest of its input files."""
    world_size: int
    code: Code
    """Version of Forge."""
    environment: LaunchEnvironment | None = None
    """None where machine.yaml names no container and no variables."""

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        program: Program,
        *,
        source_digest: str,
        inputs_digest: str,
        world_size: int,
        environment: LaunchEnvironment | None = None,
    ) -> Self:
        """The lineage of the checkpoints that this run saves now, with this installation of Forge.
        Digests: of the program's directory and of its input files, where it has them."""
        return cls(
            run=config.run,
            config_digest=config_digest(config),
            command=program.command,
            source=_artifact(program.source, source_digest),
            inputs=_artifact(config.ids.inputs, inputs_digest),
            world_size=world_size,
            code=Code(**code()),
            environment=environment,
        )


def _artifact(name: str | None, digest: str) -> Artifact | None:
    return Artifact(id=name, digest=digest) if name else None


class Seal(Record):
    """NAME.forge.json: a complete checkpoint of a program."""

    FIX: ClassVar[str] = USE_THAT_VERSION
    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES
    LISTED_IN: ClassVar[str] = "its seal"

    step: int
    files: dict[SealedName, StoredFile]
    """Files by their path in the checkpoint; "" for a checkpoint that is a file."""
    lineage: SealLineage
    digest: str
    """blake3 of step and files."""

    @property
    def world_size(self) -> int:
        return self.lineage.world_size

    @property
    def is_edited(self) -> bool:
        return self.digest != seal_digest(self.step, self.files)

    def digest_in(self, folder: Path) -> str:
        return self.digest

    def names_in(self, folder: Path) -> set[str]:
        return {*names_in(folder)}


def names_in(path: Path) -> Iterator[str]:
    """Paths of the files in a checkpoint, sorted; "" for a checkpoint that is a file. Without links that
    lead out of it: a checkpoint from elsewhere could have one to any file."""
    if path.is_file():
        yield ""
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and (not file.is_symlink() or is_file_below(file, path)):
            yield str(file.relative_to(path))


def seal_digest(step: int, files: dict[str, StoredFile]) -> str:
    return digest_bytes(canonical([step, {n: f.model_dump(mode="json") for n, f in files.items()}]))
