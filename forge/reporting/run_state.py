"""Summary of a run from its files: status, checkpoint, lineage and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from forge.checkpoint import resume
from forge.checkpoint.manifest import Artifact, Manifest, ParentCheckpoint, Part
from forge.core.checks import Check
from forge.core.errors import ConfigError, DataError
from forge.core.paths import RunPaths
from forge.core.records import PreflightResult, Sample, Trained, Validation
from forge.reporting.history import Launch, read_launches

Tone = Literal["good", "bad", "open"]
Standing = tuple[str, Tone, list[str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """What people ask first about a run. tone: whether the status is good news."""

    run: str
    status: str
    tone: Tone
    reasons: list[str]  # why the status is bad: cause, fix, what validation found
    checkpoint: Path | None
    manifest: Manifest | None  # of the checkpoint
    trained: Trained | None
    validation: Validation | None
    preflight: PreflightResult | None

    @property
    def step(self) -> int | None:
        """The step of the committed checkpoint."""
        return self.manifest.step if self.manifest else None

    @property
    def samples(self) -> list[str]:
        """Prompt and continuation, each as one printable line."""
        return [_sample(sample) for sample in self.validation.samples] if self.validation else []

    @property
    def lineage(self) -> list[tuple[str, str]]:
        """(what, value) of everything that made the checkpoint; empty without one."""
        if self.manifest is None:
            return []
        lineage = self.manifest.lineage
        dirty = " with uncommitted changes" if lineage.code.dirty else ""
        rows = [
            ("forge", lineage.code.version),
            ("code commit", f"{lineage.code.commit}{dirty}" if lineage.code.commit else ""),
            ("config digest", lineage.config_digest),
            ("tokenizer", _id_and_digest(lineage.tokenizer)),
            ("tokens", _id_and_digest(lineage.tokens)),
            ("parent", _parent(lineage.parent)),
            ("weights digest", self._weights_digest()),
            ("world size", str(self.manifest.world_size)),
            ("skipped steps", str(self.manifest.skipped.steps or "")),
            ("numerics", _flat(lineage.numerics)),
            ("versions", _flat(lineage.versions)),
            ("hardware", _flat(lineage.hardware)),
        ]
        return [(name, value) for name, value in rows if value]

    def _weights_digest(self) -> str:
        """From the completion record or the validation, whichever is of the checkpoint's step."""
        same_step = (r for r in (self.trained, self.validation) if r and r.step == self.step)
        return next((r.weights_digest for r in same_step if r.weights_digest), "")


def summarise(paths: RunPaths) -> Summary:
    """The run's standing. Raises ConfigError where there is no such run."""
    if not paths.root.is_dir():
        there = sorted(p.parent.name for p in paths.root.parent.glob("*/config.json"))
        raise ConfigError(
            f"no run in {paths.root}",
            fix=f"runs there: {', '.join(there)}" if there else "train one first: make train",
        )
    troubles: list[str] = []
    trained = _readable(lambda: Trained.read_if_there(paths.trained), troubles)
    validation = _readable(lambda: Validation.read_if_there(paths.validation), troubles)
    preflight = _readable(lambda: PreflightResult.read_if_there(paths.preflight), troubles)
    checkpoint = _readable(lambda: resume.latest(paths), troubles)
    launches = _readable(lambda: read_launches(paths), troubles) or []
    folder, manifest = (checkpoint.folder, checkpoint.manifest) if checkpoint else (None, None)
    status, tone, reasons = _standing(launches, preflight, _verdict(validation, manifest))
    tone, reasons = ("bad" if troubles else tone), [*reasons, *troubles]
    standing = status, tone, reasons
    return Summary(paths.root.name, *standing, folder, manifest, trained, validation, preflight)


def _readable(read: Callable[[], T | None], troubles: list[str]) -> T | None:
    """What a file holds; None, and the reason among the troubles, where it cannot be read: a page for
    people must not fail because of it."""
    try:
        return read()
    except DataError as err:
        troubles.append(err.what)
        return None


# --- status -------------------------------------------------------------------------------------


def _standing(
    launches: list[Launch], preflight: PreflightResult | None, verdict: Standing | None
) -> Standing:
    """The newest thing known; an earlier verdict on the checkpoint still counts beside it."""
    if launches and launches[-1].has_completed:
        return verdict or (f"trained to step {launches[-1].last_step}, not validated", "open", [])
    if preflight and preflight.status == "failed":
        status, tone, reasons = _preflight_failed(preflight)
    elif launches:
        status, tone, reasons = _launched(launches[-1])
    else:
        status, tone, reasons = "training has not started", "open", []
    if verdict:
        status = f"{status}; its checkpoint is {verdict[0]}"
        tone = "bad" if verdict[1] == "bad" else tone
        reasons = [*reasons, *verdict[2]]
    return status, tone, reasons


def _verdict(validation: Validation | None, manifest: Manifest | None) -> Standing | None:
    """What validation said; only for its own step, because training may have gone on since."""
    if validation is None or (manifest and validation.step != manifest.step):
        return None
    tone: Tone = "good" if validation.status == "valid" else "bad"
    return f"{validation.status} at step {validation.step}", tone, validation.reasons


def _launched(launch: Launch) -> Standing:
    outcome, *more = launch.outcome.splitlines()
    reasons = [" ".join(line.split()) for line in more]
    return f"step {launch.last_step}: {outcome}", "bad" if launch.has_failed else "open", reasons


def _preflight_failed(preflight: PreflightResult) -> Standing:
    failed = [check for check in preflight_checks(preflight) if check["status"] == "fail"]
    reasons = [f"{c['where']}, {c['name']}: {c['message']}. Fix: {c['fix']}" for c in failed]
    return "preflight failed, training did not start", "bad", reasons


# --- checks ---------------------------------------------------------------------------------------


def preflight_checks(preflight: PreflightResult | None) -> list[dict[str, str]]:
    """Checks of all nodes and of the ranks, worst first: where, name, status, message, fix."""
    if preflight is None:
        return []
    nodes = [_row(check, node.node) for node in preflight.nodes for check in node.checks]
    return _worst_first(nodes + [_row(check, "ranks") for check in preflight.ranks.checks])


def validation_checks(validation: Validation | None) -> list[dict[str, str]]:
    """Validation's checks, worst first: name, status, message, fix."""
    return _worst_first([_row(check, "") for check in validation.checks] if validation else [])


def _row(check: Check, where: str) -> dict[str, str]:
    return {"where": where, **asdict(check)}


def _worst_first(checks: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(checks, key=lambda check: {"ok": 2, "warn": 1}.get(check["status"], 0))


# --- words --------------------------------------------------------------------------------------


def _id_and_digest(artifact: Artifact) -> str:
    return f"{artifact.id} (digest {artifact.digest})"


def _parent(parent: ParentCheckpoint | None) -> str:
    return f"{parent.run}@{parent.step} (digest {parent.digest})" if parent else ""


def _flat(part: Part) -> str:
    """`{"torch": "2.13"}` as "torch 2.13"; lists joined, empty values left out."""
    shown = [
        f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in part.to_json().items()
        if value not in (None, "", [])
    ]
    return " · ".join(shown)


def _sample(sample: Sample) -> str:
    """Prompt and continuation; a text that begins with its prompt has both already."""
    has_prompt = sample.text.startswith(sample.prompt)
    return one_line(sample.text if has_prompt else sample.prompt + sample.text)


def one_line(text: str) -> str:
    """Model text as one printable line: breaks shown as ⏎, other control characters escaped.

    Unescaped, sampled bytes could drive the reader's terminal.
    """
    shown = (c if c.isprintable() else "⏎" if c == "\n" else repr(c)[1:-1] for c in text)
    return "".join(shown)
