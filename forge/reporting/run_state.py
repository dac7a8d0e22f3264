"""Summary of a run from its files: status, checkpoint, lineage and samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge.checkpoint import directory, resume
from forge.checkpoint.manifest import Artifact, Manifest, ParentCheckpoint, Part
from forge.core.errors import ConfigError, DataError
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.reporting.history import Launch, read_launches

Tone = Literal["good", "bad", "open"]
Standing = tuple[str, Tone, list[str]]


@dataclass(frozen=True)
class Summary:
    """What people ask first about a run. tone: whether the status is good news."""

    run: str
    status: str
    tone: Tone
    reasons: list[str]  # why the status is bad: cause, fix, what validation found
    checkpoint: Path | None
    manifest: Manifest | None  # of the checkpoint
    fit: dict[str, Any]
    validation: dict[str, Any]
    preflight: dict[str, Any]

    @property
    def step(self) -> int | None:
        """The step of the committed checkpoint."""
        return self.manifest.step if self.manifest else None

    @property
    def samples(self) -> list[str]:
        """Prompt and continuation, each as one printable line."""
        return [_sample(sample) for sample in self.validation.get("samples") or []]

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
        same_step = (r for r in (self.fit, self.validation) if r.get("step") == self.step)
        return next((str(r["weights_digest"]) for r in same_step if r.get("weights_digest")), "")


def summarise(paths: RunPaths) -> Summary:
    """The run's standing. Raises ConfigError where there is no such run."""
    if not paths.root.is_dir():
        there = sorted(p.parent.name for p in paths.root.parent.glob("*/config.json"))
        raise ConfigError(
            f"no run in {paths.root}",
            fix=f"runs there: {', '.join(there)}" if there else "train one first: make train",
        )
    fit, validation, preflight = map(
        read_object_or_empty, (paths.fit, paths.validation, paths.preflight)
    )
    checkpoint, troubles = _checkpoint(paths)
    folder, manifest = (checkpoint.folder, checkpoint.manifest) if checkpoint else (None, None)
    status, tone, reasons = _standing(
        read_launches(paths), preflight, _verdict(validation, manifest)
    )
    tone, reasons = ("bad" if troubles else tone), [*reasons, *troubles]
    standing = status, tone, reasons
    return Summary(paths.root.name, *standing, folder, manifest, fit, validation, preflight)


def _checkpoint(paths: RunPaths) -> tuple[directory.Checkpoint | None, list[str]]:
    """The checkpoint behind `latest`, and why it cannot be shown where it is none."""
    try:
        return resume.latest(paths), []
    except DataError as err:
        return None, [err.what]


# --- status -------------------------------------------------------------------------------------


def _standing(
    launches: list[Launch], preflight: dict[str, Any], verdict: Standing | None
) -> Standing:
    """The newest thing known; an earlier verdict on the checkpoint still counts beside it."""
    if launches and launches[-1].has_completed:
        return verdict or (f"trained to step {launches[-1].last_step}, not validated", "open", [])
    if preflight.get("status") == "failed":
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


def _verdict(validation: dict[str, Any], manifest: Manifest | None) -> Standing | None:
    """What validation said; only for its own step, because training may have gone on since."""
    step, verdict = validation.get("step"), validation.get("status")
    if verdict not in ("valid", "invalid") or (manifest and step != manifest.step):
        return None
    reasons = [str(reason) for reason in validation.get("reasons") or []]
    return f"{verdict} at step {step}", "good" if verdict == "valid" else "bad", reasons


def _launched(launch: Launch) -> Standing:
    outcome, *more = launch.outcome.splitlines()
    reasons = [" ".join(line.split()) for line in more]
    return f"step {launch.last_step}: {outcome}", "bad" if launch.has_failed else "open", reasons


def _preflight_failed(preflight: dict[str, Any]) -> Standing:
    failed = [check for check in preflight_checks(preflight) if check["status"] == "fail"]
    reasons = [f"{c['where']}, {c['name']}: {c['message']}. Fix: {c['fix']}" for c in failed]
    return "preflight failed, training did not start", "bad", reasons


# --- checks ---------------------------------------------------------------------------------------


def preflight_checks(preflight: dict[str, Any]) -> list[dict[str, str]]:
    """Checks of all nodes and of the ranks, worst first: where, name, status, message, fix."""
    checks = [
        _check(check, str(node.get("node", "?")))
        for node in _objects(preflight.get("nodes"))
        for check in _objects(node.get("checks"))
    ]
    (ranks,) = _objects([preflight.get("ranks")]) or [{}]
    found = [_check(check, "ranks") for check in _objects(ranks.get("checks"))]
    return _worst_first(checks + found)


def validation_checks(validation: dict[str, Any]) -> list[dict[str, str]]:
    """Validation's checks, worst first: name, status, message, fix."""
    return _worst_first([_check(check, "") for check in _objects(validation.get("checks"))])


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; none of what is neither: a report must not fail."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _check(check: dict[str, Any], where: str) -> dict[str, str]:
    keys = ("name", "status", "message", "fix")
    return {"where": where} | {key: str(check.get(key) or "") for key in keys}


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


def _sample(sample: dict[str, Any]) -> str:
    """Prompt and continuation; a text that begins with its prompt has both already."""
    prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
    return one_line(text if text.startswith(prompt) else prompt + text)


def one_line(text: str) -> str:
    """Model text as one printable line: breaks shown as ⏎, other control characters escaped.

    Unescaped, sampled bytes could drive the reader's terminal.
    """
    shown = (c if c.isprintable() else "⏎" if c == "\n" else repr(c)[1:-1] for c in text)
    return "".join(shown)
