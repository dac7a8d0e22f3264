"""The certificate of `forge reproduce`: an in-toto statement of which steps were retrained, and how
they ended, with the statement of the export as its subject. docs/plugins/attestation.md
explains the keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

import forge
from forge.attestation import verify
from forge.checkpoint.manifest import Code, Numerics, Versions
from forge.core.files import disk_trouble, write_json
from forge.core.records import RecordPart
from forge.plugins.attestation.intervals import Interval

Outcome = Literal["bitwise", "within tolerance", "other", "unchecked"]


class Retrained(RecordPart):
    """Steps first + 1 to last of the run, retrained; `unchecked` where that was drawn, and did not
    happen."""

    first: int
    last: int
    began_with: str | None
    """blake3 of the checkpoint; None where the run begins at `first`."""
    stated: str | None
    """blake3 of the checkpoint at the end, as the statement lists it; None where that was not at hand, so
    that the digest of the weights was compared."""
    outcome: Outcome
    weights: float | None
    """Norm of the difference of all weights, as a share of how far they went in these steps; None where
    tensors differ in shape, or were not at hand."""
    loss: float | None
    """Largest difference of a reference-batch loss, in nats per token; None as above."""
    why: list[str]
    """Of unchecked steps why they were not retrained; of another program the files that differ, and
    whose tensors are not read; else []."""

    @property
    def is_other(self) -> bool:
        return self.outcome == "other"

    @property
    def is_unchecked(self) -> bool:
        return self.outcome == "unchecked"

    @classmethod
    def of(
        cls,
        interval: Interval[Any],
        outcome: Outcome,
        why: list[str],
        *,
        weights: float | None = None,
        loss: float | None = None,
    ) -> Retrained:
        """weights, loss: as the fields, inf where they cannot be compared."""
        return cls(
            first=interval.first,
            last=interval.last,
            began_with=interval.begin.digest if interval.begin else None,
            stated=interval.end.digest if interval.end else None,
            outcome=outcome,
            weights=_finite(weights),
            loss=_finite(loss),
            why=why,
        )

    @classmethod
    def unchecked(cls, interval: Interval[Any], why: str) -> Retrained:
        return cls.of(interval, "unchecked", [why])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class MadeBy(RecordPart):
    """With what the steps were retrained."""

    code: Code
    versions: Versions | None
    """None for another program, whose packages are not recorded."""
    cpu: str
    numerics: Numerics | None
    """None as above."""
    machine: Literal["another", "the same", "unknown"]
    """Beside those that have trained the run, by its event log; of the same one a fault that comes again
    is not found."""


class Reproduction(RecordPart):
    """The predicate of a certificate. Keys that it does not name are ignored: `chance` in certificates of
    older versions."""

    model_config = ConfigDict(extra="ignore")

    FORMAT: ClassVar[int] = 1

    format: Literal[1] = 1
    forge: str = forge.__version__
    """Version of Forge that wrote the certificate."""
    statement: str
    """SHA-256 that the statement has of itself."""
    result: Literal["reproduced", "not reproduced", "incomplete"]
    """incomplete: an interval that was drawn could not be retrained, or not yet."""
    seed: int | None
    """By which the intervals were drawn; None where none was drawn: the whole run was retrained, or
    the one interval that ends with the exported checkpoint."""
    steps: int
    """Of the run, up to the exported checkpoint."""
    steps_coverable: int
    """Those between checkpoints that the verifier had, or after the first step of the run, in intervals
    short enough for the time that there was."""
    steps_checked: int
    parts: int
    """Of the run, from one checkpoint that it has saved to the next."""
    parts_coverable: int
    texts: Literal["made again", "by digest"]
    """Whether the tokens were made from the texts, or those of the statement's digests were used."""
    export: Literal["same", "other", "unchecked"]
    """Whether the files of the export are those of the exported checkpoint. Where a checkpoint was
    named, it was exported for the certificate."""
    tolerance: dict[str, float]
    """Largest difference of weights and of losses, as in `intervals`, where bits may differ."""
    differences: list[str]
    """What differs from the statement's code and environment, and from how the intervals were trained."""
    by: MadeBy
    intervals: list[Retrained]
    sha256: str = ""
    """Of the canonical JSON of the certificate without this key."""


def write_certificate(path: Path, made: Reproduction, statement: bytes, key: Any) -> str:
    """Write a certificate about the statement with these bytes, with a key also its signed envelope
    beside it; the digest of the certificate. Raises UnfitError when the disk cannot be written."""
    content = made.model_dump(mode="json")
    certificate = {
        "_type": verify.IN_TOTO,
        "predicateType": verify.REPRODUCTION,
        "subject": [{"name": verify.STATEMENT, "digest": {"sha256": verify.sha256(statement)}}],
        "predicate": content,
    }
    content["sha256"] = digest = verify.statement_digest(certificate)
    envelope = envelope_path(path)
    with disk_trouble(path):
        envelope.unlink(missing_ok=True)  # of an older certificate
        write_json(path, certificate)
    if key:
        from forge.plugins.attestation.signing import signed_envelope

        write_json(envelope, signed_envelope(path.read_bytes(), key))
    return digest


def envelope_path(certificate: Path) -> Path:
    """Return the path of the signature of a certificate."""
    return certificate.with_name(verify.envelope_name(certificate.name))
