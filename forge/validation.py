"""The verb `validate`: an independent look at a checkpoint, in a fresh process on its own.

Trusts nothing that training held in memory: files, names, shapes, numbers and losses are read anew.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge import checkpoints, ledger, store
from forge.artefacts import freeze
from forge.config import Config, apply_overrides, checked
from forge.errors import DataError, ForgeError
from forge.geometry import Geometry
from forge.launcher import run_ranks
from forge.lease import lease
from forge.loader import Windows, eval_batches
from forge.machine import Machine
from forge.manifest import read_json, write_json
from forge.model import Decoder, sample
from forge.numerics import PROBE_SAMPLES, numerics, prepare, probe_samples
from forge.paths import RunPaths, tokenizer_folder, tokens_folder
from forge.preflight import Check
from forge.progress import say
from forge.shards import ShardSet
from forge.tokenizer import load_tokenizer

# How far a recomputed probe loss may be from the recorded one on another device, number of threads
# or in another arithmetic. Equal conditions must give equal bits.
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
HELD_OUT_SAMPLES = 8  # in one forward pass
SAMPLING_TEMPERATURE = 0.8
SAMPLING_TOP_K = 50


def validate(config: Config) -> Path:
    """Validate the checkpoint behind a run's `latest`; the path of validated.json.

    Writes validation.json either way. Raises DataError that lists the reasons when it is invalid.
    """
    started = time.time()
    config = freeze(config)
    paths = RunPaths.of(config)
    with lease(paths.root, "validate"):
        checkpoint = store.latest(paths)
        if checkpoint is None:
            raise DataError(f"{paths.root} has no checkpoint", fix="train the run first")
        goal = read_json(paths.fit) if paths.fit.exists() else None
        result = examine(checkpoint, config, goal)
        write_json(paths.validation, result)
        seconds = round(time.time() - started, 3)
        status, step = result["status"], result["step"]
        ledger.record(paths.events, "validate", seconds=seconds, status=status, step=step)
        _tell(checkpoint.folder, result)
        kept = ("status", "step", "loss", "weights_digest", "checkpoint_digest")
        write_json(paths.validated, {key: result[key] for key in kept})
    return paths.validated


def validate_folder(folder: Path, overrides: dict[str, Any]) -> None:
    """Validate any checkpoint folder, or the latest one of a run's folder; writes nothing.

    The config is the one in the checkpoint; overrides may say where `data` lies now.
    """
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints" / "latest"
    checkpoint = store.Checkpoint.open(folder.resolve())
    values = apply_overrides(checkpoint.manifest["lineage"]["config"], overrides)
    config: Config = checked(Config, values, str(folder))
    _tell(folder, examine(checkpoint, config, None))


def _tell(folder: Path, result: dict[str, Any]) -> None:
    for check in result["checks"]:
        say(f"  {check['status']:4} {check['name']}: {check['message']}")
    say(f"{folder}: {result['status']}, step {result['step']}")
    if result["reasons"]:
        raise DataError(
            f"checkpoint {folder} is invalid: " + "; ".join(result["reasons"]),
            cause="a damaged file, or a checkpoint of another run",
            fix="go on from an older checkpoint, or train again",
        )


def examine(
    checkpoint: store.Checkpoint, config: Config, goal: dict[str, Any] | None
) -> dict[str, Any]:
    """All checks of config.validation.depth on a checkpoint, as the content of validation.json.

    goal: the run's fit.json, whose step and weights must be these; None for a lone checkpoint.
    """
    prepare(torch.device("cpu"))
    examination = _Examination(checkpoint, config, goal)
    checks: list[Check] = []
    try:
        for check in examination.checks():
            checks.append(check)
            if check.status == "fail":
                break  # what follows reads what this one has refused
    except ForgeError as err:
        checks.append(Check("read", "fail", err.what, err.fix))
    reasons = [f"{check.name}: {check.message}" for check in checks if check.status == "fail"]
    return {
        "status": "invalid" if reasons else "valid",
        "step": checkpoint.step,
        "depth": config.validation.depth,
        "reasons": reasons,
        "checks": [vars(check) for check in checks],
        "loss": examination.loss,
        "weights_digest": examination.weights_digest,
        "checkpoint_digest": examination.manifest_digest,
        "samples": examination.samples,
    }


class _Examination:
    """One checkpoint under examination; `checks` goes from cheap to dear."""

    def __init__(
        self, checkpoint: store.Checkpoint, config: Config, goal: dict[str, Any] | None
    ) -> None:
        self.checkpoint, self.config, self.goal = checkpoint, config, goal
        self.manifest = checkpoint.manifest
        self.loss: float | None = None
        self.weights_digest: str | None = None
        self.samples: list[dict[str, str]] = []
        self.manifest_digest = blake3.blake3(
            (checkpoint.folder / store.MANIFEST).read_bytes()
        ).hexdigest()

    def checks(self) -> Iterator[Check]:
        depth = self.config.validation.depth
        yield self._goal()
        yield self._digests()
        if depth == "digests":
            return
        yield self._config()
        yield self._tensors()
        yield self._finite()
        yield self._weights()
        yield self._data()
        yield from self._loads()
        if depth == "load":
            return
        yield self._probe()
        yield self._held_out()
        yield self._sampled()

    def _goal(self) -> Check:
        step = self.checkpoint.step
        if self.goal and self.goal["step"] != step:
            return _fail("goal", f"fit.json says step {self.goal['step']}, latest is step {step}")
        return Check("goal", "ok", f"step {step}")

    def _digests(self) -> Check:
        bad = list(self.checkpoint.bad_files())
        if bad:
            return _fail("digests", "; ".join(bad))
        size = sum(facts["bytes"] for facts in self.manifest["files"].values())
        return Check(
            "digests", "ok", f"{len(self.manifest['files'])} files, {size / 2**20:.1f} MiB"
        )

    def _config(self) -> Check:
        try:
            store.check_compatible(self.config, self.checkpoint)
        except ForgeError as err:
            return _fail("config", err.what)
        return Check("config", "ok", "fits the checkpoint")

    def _tensors(self) -> Check:
        """Names, shapes and types in the checkpoint's index against a model built from the config."""
        assert self.config.ids
        self.shards = ShardSet.open(tokens_folder(self.config.data, self.config.ids.tokens))
        # Another seed than training's: what the checkpoint does not fill must not look right.
        self.model = Decoder(self.config.model, self.shards.vocab_size, seed=2**32)
        index = checkpoints.SafeReader(self.checkpoint.folder).read_metadata()
        found = {
            name.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
            for name, entry in index.state_dict_metadata.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
        wanted = {n: (tuple(t.shape), t.dtype) for n, t in self.model.state_dict().items()}
        wrong = [
            f"{name} is {found.get(name, 'missing')}, the config says {wanted.get(name, 'nothing')}"
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if wrong:
            return _fail("tensors", "; ".join(wrong[:5]))
        return Check("tensors", "ok", f"{len(wanted)} weights with the names and shapes expected")

    def _finite(self) -> Check:
        """Every number of the state, moments included, read one tensor after another."""
        self.state = {"model": self.model.state_dict(), "optimizer": self._empty_moments()}
        checkpoints.read_tensors(self.state, self.checkpoint.folder, no_dist=True)
        moments = {
            f"optimizer.{name}.{key}": tensor
            for name, values in self.state["optimizer"].items()
            for key, tensor in values.items()
        }
        bad = [
            name
            for name, tensor in {**self.state["model"], **moments}.items()
            if not bool(torch.isfinite(tensor).all())
        ]
        if bad:
            return _fail("finite", f"not finite: {', '.join(bad[:5])} ({len(bad)} tensors)")
        return Check("finite", "ok", f"all numbers of {len(moments)} moments and all weights")

    def _empty_moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: {
                "step": torch.zeros(()),
                "exp_avg": torch.empty_like(weight),
                "exp_avg_sq": torch.empty_like(weight),
            }
            for name, weight in self.model.state_dict().items()
        }

    def _weights(self) -> Check:
        hasher = blake3.blake3()
        for name, tensor in sorted(self.model.state_dict().items()):
            checkpoints.update_digest(hasher, name, tensor)
        self.weights_digest = hasher.hexdigest()
        if self.goal and self.goal["weights_digest"] != self.weights_digest:
            return _fail(
                "weights",
                f"digest {self.weights_digest[:12]}, fit.json has {self.goal['weights_digest'][:12]}",
            )
        return Check("weights", "ok", f"digest {self.weights_digest[:12]}")

    def _data(self) -> Check:
        """The shards and the tokenizer must be those that the checkpoint names."""
        assert self.config.ids
        self.tokenizer = load_tokenizer(
            tokenizer_folder(self.config.data, self.config.ids.tokenizer)
        )
        self.shards.verify()
        then = self.manifest["lineage"]["tokens"]["digest"]
        if self.shards.digest != then:
            return _fail(
                "data", f"shards have digest {self.shards.digest[:12]}, trained on {then[:12]}"
            )
        return Check("data", "ok", f"tokens {self.config.ids.tokens}, digests right")

    def _loads(self) -> Iterator[Check]:
        """This process is a world of one; a checkpoint of one rank is also loaded on two."""
        written = self.manifest["world_size"]
        if written > 1:
            yield Check("world size", "ok", f"written by {written} ranks, loaded by 1")
            return
        digest = reload_on_two_ranks(self.config, self.checkpoint.folder)
        if digest != self.weights_digest:
            yield _fail("world size", f"other weights when loaded by 2 ranks ({digest})")
        else:
            yield Check("world size", "ok", "written by 1 rank, loaded by 2")

    @torch.no_grad()
    def _probe(self) -> Check:
        """Recompute the loss that each rank recorded, on the same samples."""
        recorded, then = self.manifest["probe"]["losses"], self.manifest["lineage"]["numerics"]
        self.model.eval()
        self.windows = Windows(self.shards.val, self.config.train.seq_len, split="val")
        before = torch.get_num_threads()
        torch.set_num_threads(then["threads"])  # the sums in a product depend on it
        losses = [self._probe_loss(rank, then["precision"]) for rank in range(len(recorded))]
        now = numerics(torch.device("cpu"), then["precision"])
        torch.set_num_threads(before)
        # FSDP2 casts weights to bf16 where autocast casts inputs of single operations.
        cast = then["precision"] == "bf16" and self.config.train.parallel == "fsdp2"
        exact = now == then and not cast
        tolerance = 0.0 if exact else TOLERANCE[then["precision"]]
        apart = max(abs(a - b) for a, b in zip(losses, recorded, strict=True))
        bound = "equal to the last bit" if exact else f"within {tolerance:g}"
        if not apart <= tolerance:  # also false for NaN
            return _fail("probe", f"losses {losses}, recorded {recorded}; must be {bound}")
        return Check("probe", "ok", f"{len(losses)} recorded losses recomputed, {bound}")

    def _probe_loss(self, rank: int, precision: str) -> float:
        samples = probe_samples(self.windows.num_samples, rank)
        assert len(samples) == PROBE_SAMPLES
        window = torch.from_numpy(self.windows.gather(samples))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return float(self.model(window[:, :-1], window[:, 1:]))

    @torch.no_grad()
    def _held_out(self) -> Check:
        total, tokens = 0.0, 0
        settings = self.config.train
        batches = eval_batches(
            self.windows, settings.eval_samples, rank=0, world_size=1, micro=HELD_OUT_SAMPLES
        )
        for inputs, targets, counted in batches:
            total += float(self.model(inputs, targets)) * counted
            tokens += counted
        self.loss = total / tokens
        if not math.isfinite(self.loss):
            return _fail("held-out loss", f"{self.loss}")
        return Check("held-out loss", "ok", f"{self.loss:.4f} over {tokens:,} tokens")

    def _sampled(self) -> Check:
        """A few lines of the model's own, for people."""
        report = self.config.report
        for number, prompt in enumerate(report.prompts):
            ids = sample(
                self.model,
                self.tokenizer.encode(prompt),
                report.sample_tokens,
                seed=number,
                temperature=SAMPLING_TEMPERATURE,
                top_k=SAMPLING_TOP_K,
            )
            self.samples.append({"prompt": prompt, "text": self.tokenizer.decode(ids)})
        return Check("samples", "ok", f"{len(self.samples)} prompts continued")


def _fail(name: str, message: str) -> Check:
    return Check(name, "fail", message)


def reload_on_two_ranks(config: Config, folder: Path) -> str | None:
    """Weights digest of a checkpoint as two Gloo ranks load it, each its half; None if they fail."""
    assert config.ids
    shards = tokens_folder(config.data, config.ids.tokens).resolve()
    options = {"checkpoint": str(folder.resolve()), "shards": str(shards)}
    with tempfile.TemporaryDirectory(prefix="forge-reload-") as scratch:
        # A run's folder of its own: the checkpoint may lie anywhere, and may be read-only.
        paths = RunPaths(Path(scratch))
        write_json(paths.config, config.to_json())
        machine, geometry = Machine(launcher="torchrun"), Geometry(1, 2)
        record = run_ranks("reload", paths, machine, geometry, options=options)
    return record.result.get("weights_digest")
