"""Checks of one checkpoint: files, names, shapes, values and losses, all read again from disk.

Nothing that training held in memory is trusted. The weights are in memory once; the optimizer
state, twice their size, is read piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property

import blake3
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge.checkpoint import compatibility, directory, storage
from forge.checkpoint.manifest import MANIFEST, Numerics
from forge.core.checks import Check
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, ForgeError, UnfitError
from forge.core.paths import RunPaths, tokenizer_folder, tokens_folder
from forge.core.records import Sample, Trained, Validation
from forge.data.loader import Windows, eval_batches
from forge.data.shards import ShardSet
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer
from forge.trainer.llama import Decoder, sample
from forge.trainer.numerics import PROBE_SAMPLES, numerics, probe_samples
from forge.validation.replay import (
    TOLERANCE,
    check_next_losses,
    load_on_two_ranks,
    same_arithmetic,
)

HELD_OUT_SAMPLES = 8  # in one forward pass
SAMPLING_TEMPERATURE = 0.8
SAMPLING_TOP_K = 50
# Moments read at a time; one tensor where that is larger. A read costs some milliseconds.
MOMENTS_BYTES = 2**25
MOMENTS = ("step", "exp_avg", "exp_avg_sq")

# What speaks against the checkpoint itself. The other checks are of what lies around it: a `latest`
# or a config that was edited, other data.
OF_THE_CHECKPOINT = {
    *("manifest", "digests", "tensors", "finite", "weights", "world size"),
    *("probe", "next loss", "held-out loss"),
}


class Data:
    """Shards and tokenizer of a config, every byte of them checked when first asked for: once, however
    many checkpoints are examined. Raises DataError."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._tokens = tokens_folder(config.data, config.ids.tokens)
        self._tokenizer = tokenizer_folder(config.data, config.ids.tokenizer)

    @cached_property
    def shards(self) -> ShardSet:
        found = ShardSet.open(self._tokens)
        found.verify()
        return found

    @cached_property
    def tokenizer(self) -> LoadedTokenizer:
        return load_tokenizer(self._tokenizer)


class Examination:
    """The checks of one checkpoint, in parts that go from cheap to dear."""

    def __init__(
        self,
        checkpoint: directory.Checkpoint,
        config: ResolvedConfig,
        data: Data,
        *,
        goal: Trained | None = None,
        paths: RunPaths | None = None,
    ) -> None:
        """goal: the run's fit.json, whose step and weights must be these. paths: the run whose records
        tell the next losses; None for a lone checkpoint."""
        self.checkpoint, self.config, self.data = checkpoint, config, data
        self.goal, self.paths = goal, paths
        self.manifest = checkpoint.manifest
        self.checks: list[Check] = []
        self.loss: float | None = None
        self.weights_digest: str | None = None
        self.samples: list[Sample] = []
        self.manifest_digest = blake3.blake3(
            (checkpoint.folder / MANIFEST).read_bytes()
        ).hexdigest()

    @property
    def failed(self) -> Check | None:
        """The check that failed; none is made after it."""
        return self.checks[-1] if self.checks and self.checks[-1].status == "fail" else None

    def look_at_files(self) -> None:
        """Raises UnfitError, as all parts do, where the disk or this host fails and nothing is known."""
        self._make(("goal", self._goal), ("digests", self._digests))

    def look_at_state(self) -> None:
        """Every tensor, from validate.depth `load` on."""
        if self.config.validation.depth != "digests":
            self._make(
                *(("config", self._config), ("data", self._data), ("tensors", self._tensors)),
                *(("finite", self._finite), ("weights", self._weights)),
                ("world size", self._loads),
            )

    def look_at_losses(self) -> None:
        """What the model computes, at validate.depth `probe`."""
        if self.config.validation.depth == "probe":
            self._make(("probe", self._probe), ("next loss", self._next_losses))

    def show_to_people(self) -> None:
        """Held-out loss and samples, at validate.depth `probe`."""
        if self.config.validation.depth == "probe":
            self._make(("held-out loss", self._held_out), ("samples", self._sampled))

    def _make(self, *checks: tuple[str, Callable[[], Check]]) -> None:
        for name, check in checks:
            if self.failed:
                return  # what follows reads what this one has refused
            try:
                self.checks.append(check())
            except UnfitError:
                raise
            except ForgeError as err:
                self.checks.append(Check(name, "fail", err.what, err.fix))

    def result(self) -> Validation:
        """The content of validation.json."""
        failed = self.failed
        return Validation(
            status="invalid" if failed else "valid",
            step=self.checkpoint.step,
            depth=self.config.validation.depth,
            reasons=[f"{failed.name}: {failed.message}"] if failed else [],
            checks=self.checks,
            loss=self.loss,
            weights_digest=self.weights_digest,
            checkpoint_digest=self.manifest_digest,
            samples=self.samples,
        )

    # --- files -----------------------------------------------------------------------------------

    def _goal(self) -> Check:
        step = self.checkpoint.step
        if self.goal and self.goal.step != step:
            return _fail("goal", f"fit.json says step {self.goal.step}, latest is step {step}")
        return Check("goal", "ok", f"step {step}")

    def _digests(self) -> Check:
        bad = list(self.checkpoint.bad_files())
        if bad:
            return _fail("digests", "; ".join(bad))
        files = self.manifest.files
        size = sum(file.bytes for file in files.values())
        return Check("digests", "ok", f"{len(files)} files, {size / 2**20:.1f} MiB")

    # --- state -----------------------------------------------------------------------------------

    def _config(self) -> Check:
        try:
            compatibility.check_compatible(self.config, self.checkpoint)
        except ForgeError as err:
            return _fail("config", err.what)
        return Check("config", "ok", "fits the checkpoint")

    def _data(self) -> Check:
        """The shards must be those that the checkpoint names, and there must be a tokenizer."""
        now, then = self.data.shards.digest, self.manifest.lineage.tokens.digest
        if now != then:
            return _fail("data", f"shards have digest {now[:12]}, trained on {then[:12]}")
        size = self.data.tokenizer.vocab_size
        return Check("data", "ok", f"digests right, a tokenizer of {size:,} tokens")

    def _tensors(self) -> Check:
        """Names, shapes and types in the checkpoint's index against a model built from the config."""
        # Another seed than training's: what the checkpoint does not fill must not look right.
        self.model = Decoder(self.config.model, self.data.shards.vocab_size, seed=2**32)
        index = storage.SafeReader(self.checkpoint.folder).read_metadata()
        found = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        weights = self.model.state_dict()
        wanted = {f"model.{n}": (tuple(t.shape), t.dtype) for n, t in weights.items()}
        for name, tensor in weights.items():
            for key in MOMENTS:
                shape = () if key == "step" else tuple(tensor.shape)
                wanted[f"optimizer.{name}.{key}"] = (shape, torch.float32)
        wrong = [
            f"{name} is {found.get(name, 'missing')}, the config says {wanted.get(name, 'nothing')}"
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if wrong:
            return _fail("tensors", "; ".join(wrong[:5]))
        return Check("tensors", "ok", f"{len(wanted)} tensors with the names and shapes expected")

    def _finite(self) -> Check:
        """Every number of the state. The weights stay in the model, moments are dropped when seen."""
        weights = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        bad = [name.removeprefix("model.") for name in self._not_finite(weights)]
        num_moments = 0
        for moments in self._groups_of_moments():
            num_moments += len(moments)
            bad += self._not_finite(moments)
            del moments  # before the next ones are made
        if bad:
            return _fail("finite", f"not finite: {', '.join(bad[:5])} ({len(bad)} tensors)")
        return Check("finite", "ok", f"all numbers of {num_moments} moments and all weights")

    def _groups_of_moments(self) -> Iterator[dict[str, torch.Tensor]]:
        """Empty tensors for the moments, by name in the checkpoint, as many as are read at a time."""
        group: dict[str, torch.Tensor] = {}
        size = 0
        for name, weight in self.model.state_dict().items():
            for key in MOMENTS:
                moment = torch.empty(() if key == "step" else weight.shape)
                group[f"optimizer.{name}.{key}"] = moment
                size += moment.nbytes
                if size >= MOMENTS_BYTES:
                    yield group
                    group, size = {}, 0
        yield group

    def _not_finite(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Fill the tensors from the checkpoint; names of those that have numbers that are not finite."""
        try:
            storage.read_tensors(tensors, self.checkpoint.folder, no_dist=True)
        except DataError as err:
            # Their digests were right a moment ago: an error of the disk says nothing of the content.
            failures = getattr(err.__context__, "failures", {})
            if any(isinstance(failure[0], OSError) for failure in failures.values()):
                raise UnfitError(err.what, fix="use another disk, then validate again") from None
            raise
        return [name for name, one in tensors.items() if not storage.is_finite({name: one})]

    def _weights(self) -> Check:
        hasher = blake3.blake3()
        for name, tensor in sorted(self.model.state_dict().items()):
            storage.update_digest(hasher, name, tensor)
        self.weights_digest = hasher.hexdigest()
        if self.goal and self.goal.weights_digest != self.weights_digest:
            return _fail(
                "weights",
                f"digest {self.weights_digest[:12]}, fit.json has {self.goal.weights_digest[:12]}",
            )
        return Check("weights", "ok", f"digest {self.weights_digest[:12]}")

    def _loads(self) -> Check:
        """This process is a world of one; a checkpoint of one rank is also loaded on two."""
        written = self.manifest.world_size
        if written > 1:
            return Check("world size", "ok", f"written by {written} ranks, loaded by 1")
        digest = load_on_two_ranks(self.config, self.checkpoint)
        if digest != self.weights_digest:
            return _fail("world size", f"other weights when loaded by 2 ranks ({digest})")
        return Check("world size", "ok", "written by 1 rank, loaded by 2")

    # --- losses ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _probe(self) -> Check:
        """Recompute the loss that each rank recorded, on the same samples."""
        recorded, then = self.manifest.reference.losses, self.manifest.lineage.numerics
        self.model.eval()
        self.windows = Windows(self.data.shards.val, self.config.train.seq_len, split="val")
        before = torch.get_num_threads()
        torch.set_num_threads(then.threads)  # the sums in a product depend on it
        losses = [self._probe_loss(rank, then.precision) for rank in range(len(recorded))]
        now = Numerics(**numerics(torch.device("cpu"), then.precision))
        torch.set_num_threads(before)
        # FSDP2 casts weights to bf16 where autocast casts inputs of single operations.
        cast = then.precision == "bf16" and self.config.train.parallel == "fsdp2"
        exact = same_arithmetic(self.manifest.lineage, now) and not cast
        tolerance = 0.0 if exact else TOLERANCE[then.precision]
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

    def _next_losses(self) -> Check:
        return check_next_losses(self.config, self.checkpoint, self.paths)

    # --- for people ------------------------------------------------------------------------------

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
        report, context, longest = self.config.report, self.config.train.seq_len, 0
        for number, prompt in enumerate(report.prompts):
            prompt_ids = self.data.tokenizer.encode(prompt)
            longest = max(longest, len(prompt_ids) + report.sample_tokens)
            ids = sample(
                self.model,
                prompt_ids,
                report.sample_tokens,
                context=context,
                seed=number,
                temperature=SAMPLING_TEMPERATURE,
                top_k=SAMPLING_TOP_K,
            )
            self.samples.append(Sample(prompt=prompt, text=self.data.tokenizer.decode(ids)))
        # The last token of a sample is not read again.
        beyond = f", each token from the last {context} (seq_len)" if longest - 1 > context else ""
        return Check("samples", "ok", f"{len(self.samples)} prompts continued{beyond}")


def _fail(name: str, message: str) -> Check:
    return Check(name, "fail", message)
