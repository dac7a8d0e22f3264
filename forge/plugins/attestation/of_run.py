"""Links of the chain, read from the files of a run and of `data/`, for the checkpoint that is
exported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from forge.checkpoint.checkpoints import RunCheckpoints, SavedCheckpoint
from forge.checkpoint.manifest import Artifact, Lineage, Merged, Seal, SealLineage
from forge.checkpoint.resume import CommittedCheckpoints
from forge.core import events
from forge.core.config import ResolvedConfig, as_recorded, checked
from forge.core.errors import DataError, ForgeError
from forge.core.files import canonical, digest_bytes, digest_file, read_object, read_object_or_empty
from forge.core.paths import MANIFEST, RunPaths, inputs_folder, tokenizer_folder, tokens_folder
from forge.core.provenance import trained_values
from forge.core.records import Evaluation, Record, Validation
from forge.core.terminal import say
from forge.data.inputs import InputManifest
from forge.data.shards import InputEntry, ShardManifest
from forge.plugins.attestation.chain import (
    ChainLink,
    CheckpointsSaved,
    CheckResult,
    CodeUsed,
    ConfigUsed,
    EnvironmentUsed,
    ExportMade,
    LaunchesMade,
    LaunchMade,
    MergeMade,
    ParentsUsed,
    ProgramUsed,
    SavedStep,
    ScoresMade,
    TextFile,
    Texts,
    TokenizerMade,
    TokensMade,
    TokensOfSource,
    ValidationMade,
)
from forge.reporting.history import read_history
from forge.run.launches import LaunchHistory
from forge.validation.checkpoint_checks import SavedRun

SomeRecord = TypeVar("SomeRecord", bound=Record)


def links_of_run(
    saved: SavedRun, checkpoint: SavedCheckpoint, export: ExportMade
) -> Iterator[ChainLink]:
    """The links in the order of the chain, not chained yet."""
    folder, manifest = checkpoint.folder, checkpoint.manifest
    run = RunPaths.of_checkpoint(folder) or RunPaths.of_merged(folder) or saved.paths
    checkpoints = saved.checkpoints
    if isinstance(manifest, Seal):
        yield from _of_program(manifest.lineage, saved)
    else:
        yield from _of_trainer(manifest.lineage, saved.data)
        checkpoints = CommittedCheckpoints(run)  # its directory may have been named itself
    yield _checkpoints(run, checkpoints, checkpoint)
    yield _launches(run)
    if merged := _merged(checkpoint):
        yield MergeMade(**{**merged.model_dump(exclude={"code"}), "forge": merged.code})
    yield export
    yield _validation(run, checkpoint)
    yield _scores(run, checkpoint)


# --- Forge's own trainer ----------------------------------------------------------------------------


def _of_trainer(lineage: Lineage, data: Path) -> Iterator[ChainLink]:
    manifests = _token_manifests(lineage, data)
    yield Texts(files=manifests and {name: _texts(m.inputs) for name, m in manifests.items()})
    yield _tokenizer(lineage.tokenizer, data)
    artifacts = lineage.sources or {"": lineage.tokens}
    yield TokensMade(
        id=lineage.tokens.id,
        blake3=lineage.tokens.digest,
        sources=manifests and {name: _tokens(m, artifacts[name]) for name, m in manifests.items()},
    )
    values = trained_values(lineage.config.to_json())
    yield ConfigUsed(blake3=lineage.config_digest, values=values)
    yield CodeUsed(forge=lineage.code)
    yield EnvironmentUsed(
        versions=lineage.versions,
        packages=lineage.packages,
        cpu=lineage.hardware.cpu,
        numerics=lineage.numerics,
        launch=lineage.environment,
    )
    yield ParentsUsed(checkpoint=lineage.parent, weights=lineage.model)


def _token_manifests(lineage: Lineage, data: Path) -> dict[str, ShardManifest] | None:
    """The manifest of each source's tokens; None unless all are as the checkpoint says."""
    # With sources each of them is opened: their list may have been written again, for other ones.
    artifacts = lineage.sources or {"": lineage.tokens}
    found = {
        name: _manifest(tokens_folder(data, artifact.id), artifact, ShardManifest)
        for name, artifact in artifacts.items()
    }
    manifests = {name: manifest for name, manifest in found.items() if manifest}
    return manifests if len(manifests) == len(found) else None


def _manifest(folder: Path, of: Artifact, record: type[SomeRecord]) -> SomeRecord | None:
    """The manifest of an artifact; None, with a note, where it is missing or another one now."""
    path = folder / MANIFEST
    if not path.is_file():
        say(f"note: the statement cannot list what is in {folder}: it is no longer there")
    elif digest_file(path) != of.digest:
        say(
            f"note: the statement does not list what is in {folder}: it was made again, differently"
        )
    else:
        return record.read(path)
    return None


def _texts(entries: Sequence[InputEntry]) -> list[TextFile]:
    return [TextFile(name=e.name, bytes=e.size, blake3=e.digest) for e in entries]


def _tokenizer(tokenizer: Artifact, data: Path) -> TokenizerMade:
    manifest = read_object_or_empty(tokenizer_folder(data, tokenizer.id) / MANIFEST)
    is_same = manifest.get("digest") == tokenizer.digest
    return TokenizerMade(
        id=tokenizer.id, blake3=tokenizer.digest, origin=manifest if is_same else None
    )


def _tokens(manifest: ShardManifest, tokens: Artifact) -> TokensOfSource:
    return TokensOfSource(
        id=tokens.id,
        blake3=tokens.digest,
        tokenizer=manifest.tokenizer_digest,
        settings=manifest.settings,
        splits=manifest.splits,
        totals=manifest.totals,
    )


# --- another program --------------------------------------------------------------------------------


def _of_program(lineage: SealLineage, saved: SavedRun) -> Iterator[ChainLink]:
    yield Texts(files=_inputs(lineage.inputs, saved.data))
    yield ProgramUsed(command=lineage.command, source=lineage.source, inputs=lineage.inputs)
    yield _config(saved.paths.config, lineage.config_digest)
    yield CodeUsed(forge=lineage.code)
    yield EnvironmentUsed(
        versions=None, packages=None, cpu=None, numerics=None, launch=lineage.environment
    )
    yield ParentsUsed(checkpoint=None, weights=None)


def _config(file: Path, digest: str) -> ConfigUsed:
    """The config of a program, of which a seal has only the digest."""
    try:
        values = trained_values(
            checked(ResolvedConfig, as_recorded(read_object(file)), str(file)).to_json()
        )
    except ForgeError as err:
        say(f"note: the statement has no values of the config: {err.what}")
        return ConfigUsed(blake3=digest, values=None)
    is_same = digest_bytes(canonical(values)) == digest
    return ConfigUsed(blake3=digest, values=values if is_same else None)


def _inputs(inputs: Artifact | None, data: Path) -> dict[str, list[TextFile]] | None:
    if inputs is None:
        return {}
    path = inputs_folder(data, inputs.id) / MANIFEST
    manifest = InputManifest.read(path) if path.is_file() else None
    if manifest is None or manifest.digest != inputs.digest:
        return None
    return {"": _texts([*manifest.files, *manifest.downloads])}


# --- the run ----------------------------------------------------------------------------------------


def _checkpoints(
    run: RunPaths, checkpoints: RunCheckpoints, exported: SavedCheckpoint
) -> CheckpointsSaved:
    kept = {} if _merged(exported) else {exported.digest: exported.step}
    kept |= _kept(checkpoints)
    saves = [event for event in _log(run) if isinstance(event, events.Save)]
    saved = [
        SavedStep(step=s.step, blake3=s.digest, is_kept=s.digest in kept) for s in saves if s.digest
    ]
    known = {save.digest for save in saves}
    # Those of before saves had a digest in the log, and of a checkpoint far from its run.
    others = sorted((step, digest) for digest, step in kept.items() if digest not in known)
    saved += [SavedStep(step=step, blake3=digest, is_kept=True) for step, digest in others]
    unknown = {save.step for save in saves if not save.digest} - {step for step, _ in others}
    saved += [SavedStep(step=step, blake3=None, is_kept=False) for step in sorted(unknown)]
    return CheckpointsSaved(saved=saved)


def _merged(checkpoint: SavedCheckpoint) -> Merged | None:
    manifest = checkpoint.manifest
    return None if isinstance(manifest, Seal) else manifest.merged


def _kept(checkpoints: RunCheckpoints) -> dict[str, int]:
    """Digest and step of each complete checkpoint that the run has now."""
    kept = {}
    for step, folder in checkpoints.by_step().items():
        with suppress(DataError, FileNotFoundError):  # incomplete, or pruned meanwhile
            kept[checkpoints.open_complete(folder).digest] = step
    return kept


def _log(run: RunPaths) -> list[events.Event]:
    return events.read(run.events) if run.events.exists() else []


def _launches(run: RunPaths) -> LaunchesMade:
    launches = read_history(run).launches if run.events.exists() else []
    return LaunchesMade(launches=[_launch(launch) for launch in launches])


def _launch(launch: LaunchHistory) -> LaunchMade:
    """Without names of nodes and jobs, which say nothing to a stranger; a reason may have some."""
    begun = launch.begun
    return LaunchMade(
        started=launch.start,
        ended=launch.end,
        world_size=begun.world_size if begun else 0,
        nodes=len(begun.nodes) if begun else 0,
        resumed_from=begun.step if begun else 0,
        last_step=launch.last_step,
        outcome=launch.outcome,
    )


def _validation(run: RunPaths, checkpoint: SavedCheckpoint) -> ValidationMade:
    result = Validation.read_if_there(run.validation)
    if result is None or result.checkpoint_digest != checkpoint.digest:
        return ValidationMade()
    return ValidationMade(
        status=result.status,
        loss=result.loss,
        bpb=result.bpb,
        bpb_estimated=result.bpb_estimated,
        depth=result.depth,
        checks=[CheckResult(name=check.name, status=check.status) for check in result.checks],
    )


def _scores(run: RunPaths, checkpoint: SavedCheckpoint) -> ScoresMade:
    result = Evaluation.read_if_there(run.evaluation_of(checkpoint.folder))
    if result is None or result.of.checkpoint_digest != checkpoint.digest:
        return ScoresMade(harness="", scores=[])
    return ScoresMade(harness=result.of.harness, scores=result.scores)
