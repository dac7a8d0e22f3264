"""`forge verify`: an export by its statement, and checkpoints of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from forge.attestation import verify
from forge.attestation.verify import VerificationError, part
from forge.checkpoint.checkpoints import RunCheckpoints
from forge.checkpoint.export_folder import atomic_directory
from forge.core import hooks
from forge.core.errors import ConfigError, DataError
from forge.core.paths import RunPaths
from forge.reporting.run_files import RunFiles


def verify_export(
    folder: Path,
    key: Path | None,
    digest: str | None,
    *,
    texts: str | None = None,
    keep: Path | None = None,
    checkpoints: Path | None = None,
    certificate: Path | None = None,
    certifier: Path | None = None,
) -> None:
    """Say what is verified. key: of the author. digest: that the statement must have. texts, keep: as
    for `verify_texts`. checkpoints: the directory of the run, whose checkpoints are compared as well.
    certificate, certifier: as for `verify.verify`. Raises DataError at the first check that fails,
    ConfigError for a path that is not there."""
    if keep and (not texts or keep.exists()):
        raise ConfigError(
            f"--keep {keep} {'is there already' if keep.exists() else 'needs --data TEXTS'}",
            fix="name a directory that is not there yet, beside --data TEXTS",
        )
    for path in filter(None, (folder, key, checkpoints, certificate, certifier)):
        if not path.exists():
            raise ConfigError(f"{path} does not exist")
    try:
        links = verify.verify(folder, key, digest, certificate=certificate, certifier=certifier)
        if texts:
            from forge.plugins.attestation.retokenize import verify_texts  # imports what tokenizes

            with atomic_directory(keep) if keep else nullcontext() as kept:
                verify_texts(texts, links, folder, kept)
        if checkpoints:
            _verify_checkpoints(RunPaths(checkpoints), links)
            more = hooks.verify_by_run(folder, RunPaths(checkpoints), links)
            if "merge" in links and not more:
                raise VerificationError(
                    "this Forge is without the plugin merge, which computes it again"
                )
            for sentence in more:
                print(f"  ok    {sentence}")
    except VerificationError as err:
        raise DataError(f"{folder}: {err}") from None


def _verify_checkpoints(run: RunPaths, links: verify.Links) -> None:
    """Refused where a checkpoint of the run is not one that the statement lists, or is corrupt. Those of
    later steps do not count: the run may have gone on."""
    checkpoints = RunFiles(run).checkpoints
    saved = part(links["checkpoints"], "saved", list)
    stated = {(part(one, "step", int), one.get("blake3")) for one in saved}
    last = max(step for step, _ in stated)
    there = {step: path for step, path in checkpoints.by_step().items() if step <= last}
    if not there:
        raise VerificationError(f"{run.root} has no checkpoint of step {last} or before")
    wrong = [line for path in there.values() for line in _bad(checkpoints, path, stated)]
    if wrong:
        raise VerificationError("; ".join(wrong))
    print(f"  ok    checkpoints: {len(there)} of {len(stated)} are there, as the statement says")


def _bad(checkpoints: RunCheckpoints, folder: Path, stated: set[tuple[int, Any]]) -> Iterator[str]:
    """A sentence for each thing that is wrong with a checkpoint."""
    try:
        checkpoint = checkpoints.open_complete(folder)
    except DataError as err:
        yield err.what
        return
    if (checkpoint.step, checkpoint.digest) not in stated:
        yield f"{folder.name} has digest {checkpoint.digest[:12]}, which the statement does not list"
    yield from (f"{folder.name}: {line}" for line in checkpoint.bad_files())
