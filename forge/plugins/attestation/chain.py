"""The links from text files to scores, which the statement of an export has in this order.

Each link has the SHA-256 of the one before, so that none can be changed, removed or moved alone. What a
field says is what the files of the run and of `data/` say. docs/plugins/attestation.md explains the
links.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer

from forge.checkpoint.manifest import (
    Artifact,
    Code,
    MergedParent,
    Numerics,
    ParentCheckpoint,
    Versions,
)
from forge.core.records import LaunchEnvironment, RecordPart, Score
from forge.data.shards import ShardEntry, Split, Total


class ChainLink(RecordPart):
    """A link of the chain. `blake3` of an artifact is the digest that records and checkpoints of Forge
    have of it."""

    previous: str = ""
    """SHA-256 of the canonical JSON of the link before, in hex; "" in the first link."""


class TextFile(RecordPart):
    """A text file of the corpus, or an input file of a program, by its name in the config."""

    name: str
    bytes: int
    blake3: str


class Texts(ChainLink):
    """The files that the tokens were made of, or that a program reads."""

    link: Literal["texts"] = "texts"
    files: dict[str, list[TextFile]] | None
    """Files by source, "" without tokenize.sources; None where `data/` no longer has their list, or where
    that is too large for a statement."""


class TokenizerMade(ChainLink):
    """The tokenizer."""

    link: Literal["tokenizer"] = "tokenizer"
    id: str
    blake3: str
    """Of tokenizer.json in `data/tokenizers/ID`."""
    origin: dict[str, Any] | None
    """What its manifest says of how it was made; None where `data/` no longer has it."""


class TokensOfSource(RecordPart):
    """Token shards, by the manifest in `data/tokens/ID`."""

    id: str
    blake3: str
    """Of this manifest."""
    tokenizer: str
    """blake3 of the tokenizer.json that made them."""
    settings: dict[str, Any]
    splits: dict[Split, list[ShardEntry]]
    totals: dict[Split, Total]


class TokensMade(ChainLink):
    """The tokens that the run was trained on."""

    link: Literal["tokens"] = "tokens"
    id: str
    blake3: str
    sources: dict[str, TokensOfSource] | None
    """As in `texts`."""


class ProgramUsed(ChainLink):
    """The training program, where that is not Forge's own."""

    link: Literal["program"] = "program"
    command: list[str]
    source: Artifact | None
    inputs: Artifact | None


class ConfigUsed(ChainLink):
    """The config of the run, without what does not change its training: name, directories, trackers."""

    link: Literal["config"] = "config"
    blake3: str
    """Of all values, with their paths."""
    values: dict[str, Any] | None
    """None for a run of a program whose config.json has changed since, and where `without_folders` is in
    their place."""
    without_folders: dict[str, Any] | None = None
    """The values with `.../NAME` in place of absolute paths; only where there are any, and the statement
    is not of `forge export --full`."""

    @model_serializer(mode="wrap")
    def _as_before(self, values: Any) -> dict[str, Any]:
        """Statements without absolute paths have no such key."""
        content: dict[str, Any] = values(self)
        return {k: v for k, v in content.items() if k != "without_folders" or v is not None}


class CodeUsed(ChainLink):
    """Forge, as the checkpoint says."""

    link: Literal["code"] = "code"
    forge: Code


class EnvironmentUsed(ChainLink):
    """With what rank 0 has written the checkpoint; all but `launch` None for another program."""

    link: Literal["environment"] = "environment"
    versions: Versions | None
    """Of Python and of the packages on which the last bits of a result may depend."""
    packages: dict[str, str] | None
    """All that were installed, with `forge export --full`; None also where the checkpoint does not
    tell."""
    cpu: str | None
    numerics: Numerics | None
    launch: LaunchEnvironment | None
    """Variables, modules and container that machine.yaml adds, with `forge export --full`."""


class ParentsUsed(ChainLink):
    """Parents: the checkpoint or the weights that the run began with."""

    link: Literal["parents"] = "parents"
    checkpoint: ParentCheckpoint | None
    weights: Artifact | None


class SavedStep(RecordPart):
    """A committed checkpoint."""

    step: int
    blake3: str | None
    """Digest that its manifest, or its seal, has of it; None for a pruned one of which an older Forge has
    not recorded it."""
    is_kept: bool
    """Whether the run had it when the statement was written."""


class CheckpointsSaved(ChainLink):
    """All checkpoints that the run has committed, in order of time: a step that was retrained after a
    failure can be there twice."""

    link: Literal["checkpoints"] = "checkpoints"
    saved: list[SavedStep]


class LaunchMade(RecordPart):
    """A start of the ranks, and how it ended. Times are seconds since the first launch began; with
    `forge export --full`, and before there was this option, since the epoch."""

    started: float
    ended: float
    world_size: int
    nodes: int
    resumed_from: int
    """The step; 0 for a fresh start."""
    last_step: int
    outcome: str


class LaunchesMade(ChainLink):
    """All launches, in order of time."""

    link: Literal["launches"] = "launches"
    launches: list[LaunchMade]


class MergeMade(ChainLink):
    """The merge that is exported, in a statement of its own type: no training has made these weights."""

    link: Literal["merge"] = "merge"
    form: str
    """docs/plugins/merge.md has their formulas."""
    parents: list[MergedParent]
    """Checkpoints of the run, oldest first; `digest` is the blake3 that `checkpoints` has."""
    forge: Code
    """Forge that merged them."""
    loss: float
    """Validation loss of the merge, in nats per token."""
    newest_loss: float
    """That of its newest parent, on the same windows."""


class ExportMade(ChainLink):
    """The export: checkpoint, type and weights."""

    link: Literal["export"] = "export"
    run: str
    step: int
    checkpoint: str
    """blake3 of the checkpoint."""
    dtype: str | None
    weights: str | None
    """blake3 of the fp32 weights, as trained.json and validation name them; None for other programs."""


class CheckResult(RecordPart):
    name: str
    status: Literal["ok", "warn", "fail"]


class ValidationMade(ChainLink):
    """The result of `forge validate` for the exported checkpoint; all None where it was not validated."""

    link: Literal["validation"] = "validation"
    status: Literal["valid", "invalid"] | None = None
    loss: float | None = None
    """Nats per token."""
    bpb: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """The loss in bits per byte of text; absent where bytes are not known."""
    bpb_estimated: bool | None = Field(default=None, exclude_if=lambda value: value is None)
    """Present where the bytes were estimated by the vocabulary."""
    depth: str | None = None
    checks: list[CheckResult] | None = None


class ScoresMade(ChainLink):
    """Scores of the exported checkpoint by lm-eval; [] where it was not evaluated."""

    link: Literal["scores"] = "scores"
    harness: str
    scores: list[Score]


AnyLink = Annotated[
    Texts
    | TokenizerMade
    | TokensMade
    | ProgramUsed
    | ConfigUsed
    | CodeUsed
    | EnvironmentUsed
    | ParentsUsed
    | CheckpointsSaved
    | LaunchesMade
    | MergeMade
    | ExportMade
    | ValidationMade
    | ScoresMade,
    Field(discriminator="link"),
]


class Predicate(RecordPart):
    """The predicate of the in-toto statement."""

    FORMAT: ClassVar[int] = 1

    format: Literal[1] = 1
    forge: str
    """Version of Forge that wrote the statement."""
    chain: list[AnyLink]
    sha256: str = ""
    """Of the canonical JSON of the statement without this key: what a paper may print."""
