"""Summary of a run for people: its state, checkpoint, lineage, samples and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forge.checkpoint.checkpoints import SavedCheckpoint
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Artifact, ParentCheckpoint, Part, Seal
from forge.core import hooks
from forge.core.errors import ConfigError, DataError
from forge.core.events import Forecast
from forge.core.paths import RunPaths
from forge.core.records import PreflightResult, Sample, Trained, Validation
from forge.core.terminal import one_line
from forge.reporting.run_files import RunFiles
from forge.reporting.run_rows import SourceRow, source_rows, text_lines
from forge.reporting.run_state import RunState, ask_slurm, data_folder, ids_of, judge
from forge.run.forecast import end_at, expected_by

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """The facts of a run that people ask for first."""

    state: RunState
    notes: list[
        str
    ]  # more of the reason, what is known of the checkpoint, records that cannot be read
    checkpoint: SavedCheckpoint | None
    trained: Trained | None
    validation: Validation | None
    preflight: PreflightResult | None
    world_sizes: list[tuple[int, int]]
    """(step, world size) of each launch with another world size than the one before."""
    expected: Forecast | None = None
    """The goodput that is expected; None before two saves."""
    end: str = ""
    """When it will reach its goal; "" while it does not train."""
    of_plugins: dict[str, list[str]] = field(default_factory=dict)
    """Label -> lines of plugins (`hooks.run_lines`)."""
    text: list[str] = field(default_factory=list)
    """Lines on the text of the tokens: characters that the tokenizer loses, equal files."""

    @property
    def step(self) -> int | None:
        """The step of the committed checkpoint."""
        return self.checkpoint.step if self.checkpoint else None

    @property
    def sources(self) -> list[SourceRow]:
        """The sources of the data, as of the checkpoint; none for a run of a single corpus."""
        own = self.checkpoint if isinstance(self.checkpoint, Checkpoint) else None
        return source_rows(own.manifest if own else None)

    @property
    def samples(self) -> list[str]:
        """Prompt and continuation, each as one printable line."""
        return [_sample(sample) for sample in self.validation.samples] if self.validation else []

    @property
    def lineage(self) -> list[tuple[str, str]]:
        """(what, value) of everything that made the checkpoint; empty without one."""
        manifest = self.checkpoint.manifest if self.checkpoint else None
        if isinstance(manifest, Seal):
            return [*_lineage_of_seal(manifest), *self._changes_of_world_size]
        if manifest is None:
            return []
        lineage = manifest.lineage
        dirty = " with uncommitted changes" if lineage.code.dirty else ""
        why_not = manifest.why_not_compiled
        rows = [
            ("forge", lineage.code.version),
            ("code commit", f"{lineage.code.commit}{dirty}" if lineage.code.commit else ""),
            ("config digest", lineage.config_digest),
            ("tokenizer", _id_and_digest(lineage.tokenizer)),
            ("tokens", _id_and_digest(lineage.tokens)),
            *((f"source {n}", _id_and_digest(source)) for n, source in lineage.sources.items()),
            ("parent", _parent(lineage.parent)),
            ("pretrained", _id_and_digest(lineage.model) if lineage.model else ""),
            ("weights digest", self._weights_digest()),
            ("world size", str(manifest.world_size)),
            *self._changes_of_world_size,
            ("skipped steps", str(manifest.skipped.steps or "")),
            ("numerics", _flat(lineage.numerics)),
            ("torch.compile", f"not used: {why_not}" if why_not else "blocks are compiled"),
            ("versions", _flat(lineage.versions)),
            ("hardware", _flat(lineage.hardware)),
        ]
        return [(name, value) for name, value in rows if value]

    @property
    def _changes_of_world_size(self) -> list[tuple[str, str]]:
        if len(self.world_sizes) < 2:
            return []
        return [("ranks", ", ".join(f"{n} from step {step}" for step, n in self.world_sizes))]

    def _weights_digest(self) -> str:
        """Digest of the checkpoint's weights, from the completion record or the validation of its
        step."""
        same_step = (r for r in (self.trained, self.validation) if r and r.step == self.step)
        return next((r.weights_digest for r in same_step if r.weights_digest), "")


def summarize(paths: RunPaths) -> Summary:
    """The summary of a run; Slurm is asked for its job. Raises ConfigError where there is no such run."""
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
    files = RunFiles(paths)
    data = data_folder(files)
    text = _readable(lambda: text_lines(data, ids_of(files.config)) if data else [], troubles)
    checkpoint = _readable(files.checkpoints.latest, troubles)
    of_plugins = _readable(lambda: hooks.run_lines(paths), troubles) or {}
    queue, _ = ask_slurm([paths])
    state = judge(files, queue)
    notes = [*state.details, *_verdict(state, validation, checkpoint)]
    notes += [trouble for trouble in troubles if trouble not in (state.reason, *notes)]
    expected = expected_by(files.log)
    return Summary(
        *(state, notes, checkpoint, trained, validation, preflight, files.world_sizes),
        expected=expected,
        end=_end(files, expected) if state.state == "running" else "",
        of_plugins=of_plugins,
        text=text or [],
    )


def _end(files: RunFiles, expected: Forecast | None) -> str:
    """Time at which the run reaches its goal at the speed of this launch, with the expected
    interruptions; "" where nothing is known of that."""
    if not (files.rate and files.goal and files.step is not None and expected and expected.ettr):
        return ""
    seconds = (files.goal - files.step) / files.rate / expected.ettr_without_stalls
    return end_at(files.last_sign_of_life, seconds)


def _verdict(
    state: RunState, validation: Validation | None, checkpoint: SavedCheckpoint | None
) -> list[str]:
    """Result of validation of the checkpoint, where the state of the run does not already say it."""
    is_of_it = validation and checkpoint and validation.step == checkpoint.step
    if (
        not validation
        or not is_of_it
        or state.state in ("validated", "invalid", "checkpoint missing")
    ):
        return []
    return [f"its checkpoint is {validation.status} at step {validation.step}", *validation.reasons]


def _readable(read: Callable[[], T | None], troubles: list[str]) -> T | None:
    """Content of a file; None, and the reason among the troubles, where it cannot be read: a page for
    people must not fail because of it."""
    try:
        return read()
    except DataError as err:
        troubles.append(err.what)
        return None


# --- words --------------------------------------------------------------------------------------


def _lineage_of_seal(seal: Seal) -> list[tuple[str, str]]:
    made = seal.lineage
    rows = [
        ("forge", made.code.version),
        ("code commit", made.code.commit or ""),
        ("config digest", made.config_digest),
        ("command", " ".join(made.command)),
        ("source", _id_and_digest(made.source) if made.source else ""),
        ("inputs", _id_and_digest(made.inputs) if made.inputs else ""),
        ("checkpoint digest", seal.digest),
        ("world size", str(seal.world_size)),
    ]
    return [(name, value) for name, value in rows if value]


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
