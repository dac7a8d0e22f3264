"""Checks of one checkpoint, read from disk: digests, names, shapes, finite values, losses.

The weights are in memory once; the optimizer state, twice their size, is read in groups.
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
from forge.core.grouping import grouped
from forge.core.paths import RunPaths, tokenizer_folder, tokens_folder
from forge.core.records import Sample, Trained, Validation
from forge.data.loader import Windows, eval_batches, split
from forge.data.shards import ShardSet
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer
from forge.trainer.llama import Decoder, sample
from forge.trainer.numerics import numerics, reference_samples
from forge.validation.replay import (
    check_next_losses,
    load_on_two_ranks,
    same_arithmetic,
    tolerance_for,
)

VALIDATION_BATCH = 8  # samples in one forward pass
# Optimizer state read at a time, or one larger tensor. A read costs some milliseconds.
GROUP_BYTES = 2**25
OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter

# Checks that fail only for a corrupt checkpoint. The others may fail because `latest`, the config or
# the data was changed.
OF_THE_CHECKPOINT = {
    *("manifest", "digests", "tensors", "finite", "weights", "world size"),
    *("probe", "next loss", "validation loss"),
}


class Data:
    """Shards and tokenizer of a config. Digests are verified on first access, once for all checkpoints
    of a run. Raises DataError."""

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


class CheckpointChecks:
    """Runs the checks of one checkpoint in groups, from cheap to expensive.

    Each group raises UnfitError where the disk or this host fails, which says nothing about the
    checkpoint. After a failed check no other one runs, since each relies on those before it.
    """

    def __init__(
        self,
        checkpoint: directory.Checkpoint,
        config: ResolvedConfig,
        data: Data,
        *,
        goal: Trained | None = None,
        paths: RunPaths | None = None,
    ) -> None:
        """goal: the run's trained.json; its step and weights must be those of the checkpoint. paths: the
        run whose metrics have the next losses; None for a checkpoint outside of a run."""
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
        """The check that failed, if any."""
        return self.checks[-1] if self.checks and self.checks[-1].status == "fail" else None

    def check_files(self) -> None:
        self._run({"goal": self._goal, "digests": self._digests})

    def check_state(self) -> None:
        """Every tensor, from validate.depth `load` on."""
        if self.config.validation.depth != "digests":
            self._run(
                {
                    "config": self._config,
                    "data": self._data,
                    "tensors": self._tensors,
                    "finite": self._finite,
                    "weights": self._weights,
                    "world size": self._world_size,
                }
            )

    def check_losses(self) -> None:
        """Recorded losses against recomputed ones, at validate.depth `probe`."""
        if self.config.validation.depth == "probe":
            self._run({"probe": self._probe, "next loss": self._next_losses})

    def check_outputs(self) -> None:
        """Validation loss and samples for the report, at validate.depth `probe`."""
        if self.config.validation.depth == "probe":
            self._run({"validation loss": self._validation_loss, "samples": self._samples})

    def _run(self, checks: dict[str, Callable[[], str | Check]]) -> None:
        """A check returns its message, or a whole Check, and raises ForgeError where it fails."""
        for name, check in checks.items():
            if self.failed:
                return
            try:
                found = check()
            except UnfitError:
                raise
            except ForgeError as err:
                found = Check(name, "fail", err.what, err.fix)
            self.checks.append(found if isinstance(found, Check) else Check(name, "ok", found))

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

    def _goal(self) -> str:
        step = self.checkpoint.step
        if self.goal and self.goal.step != step:
            raise DataError(f"trained.json says step {self.goal.step}, latest is step {step}")
        return f"step {step}"

    def _digests(self) -> str:
        if bad := list(self.checkpoint.bad_files()):
            raise DataError("; ".join(bad))
        files = self.manifest.files
        size = sum(file.bytes for file in files.values())
        return f"{len(files)} files, {size / 2**20:.1f} MiB"

    # --- state -----------------------------------------------------------------------------------

    def _config(self) -> str:
        compatibility.check_compatible(self.config, self.checkpoint)
        return "fits the checkpoint"

    def _data(self) -> str:
        """The shards must be those that the checkpoint was trained on, and there must be a tokenizer."""
        now, then = self.data.shards.digest, self.manifest.lineage.tokens.digest
        if now != then:
            raise DataError(f"shards have digest {now[:12]}, trained on {then[:12]}")
        return f"digests right, a tokenizer of {self.data.tokenizer.vocab_size:,} tokens"

    def _tensors(self) -> str:
        """Compare names, shapes and types in the index with a model built from the config."""
        # Another seed than training's: a weight that the checkpoint lacks must not be right by chance.
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
            for key in OPTIMIZER_KEYS:
                shape = () if key == "step" else tuple(tensor.shape)
                wanted[f"optimizer.{name}.{key}"] = (shape, torch.float32)
        wrong = [
            f"{name} is {found.get(name, 'missing')}, the config says {wanted.get(name, 'nothing')}"
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if wrong:
            raise DataError("; ".join(wrong[:5]))
        return f"{len(wanted)} tensors with the names and shapes expected"

    def _finite(self) -> str:
        """Read every number. The weights stay in the model, optimizer state is not kept."""
        weights = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        bad = [name.removeprefix("model.") for name in self._not_finite(weights)]
        num_tensors = 0
        for group in self._optimizer_groups():
            num_tensors += len(group)
            bad += self._not_finite(group)
            del group  # frees its memory before the next one is allocated
        if bad:
            raise DataError(f"not finite: {', '.join(bad[:5])} ({len(bad)} tensors)")
        return f"all weights, and {num_tensors} tensors of optimizer state"

    def _optimizer_groups(self) -> Iterator[dict[str, torch.Tensor]]:
        """Empty tensors for the optimizer state by name in the checkpoint, in groups of GROUP_BYTES."""
        shapes = (
            (f"optimizer.{name}.{key}", () if key == "step" else weight.shape)
            for name, weight in self.model.state_dict().items()
            for key in OPTIMIZER_KEYS
        )
        for group in grouped(shapes, lambda one: 4 * math.prod(one[1]), GROUP_BYTES):
            yield {name: torch.empty(shape) for name, shape in group}

    def _not_finite(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Fill the tensors from the checkpoint; names of those with a number that is not finite."""
        try:
            storage.read_tensors(tensors, self.checkpoint.folder, no_dist=True)
        except DataError as err:
            # The digests were right a moment ago, so the disk fails, and the content is unknown.
            failures = getattr(err.__context__, "failures", {})
            if any(isinstance(failure[0], OSError) for failure in failures.values()):
                raise UnfitError(err.what, fix="use another disk, then validate again") from None
            raise
        return [name for name, one in tensors.items() if not storage.is_finite({name: one})]

    def _weights(self) -> str:
        hasher = blake3.blake3()
        for name, tensor in sorted(self.model.state_dict().items()):
            storage.update_digest(hasher, name, tensor)
        self.weights_digest = digest = hasher.hexdigest()
        if self.goal and self.goal.weights_digest != digest:
            raise DataError(
                f"digest {digest[:12]}, trained.json has {self.goal.weights_digest[:12]}"
            )
        return f"digest {digest[:12]}"

    def _world_size(self) -> str:
        """Load on another number of ranks. This process is one; a checkpoint of one is loaded on two."""
        written = self.manifest.world_size
        if written > 1:
            return f"written by {written} ranks, loaded by 1"
        digest = load_on_two_ranks(self.config, self.checkpoint)
        if digest != self.weights_digest:
            raise DataError(f"other weights when loaded by 2 ranks ({digest})")
        return "written by 1 rank, loaded by 2"

    # --- losses ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _probe(self) -> str:
        """Recompute the reference losses that the ranks recorded, on the same samples."""
        recorded, then = self.manifest.reference.losses, self.manifest.lineage.numerics
        self.model.eval()
        self.windows = Windows(self.data.shards.val, self.config.train.seq_len, split="val")
        before = torch.get_num_threads()
        torch.set_num_threads(then.threads)  # the order of sums in a product depends on it
        losses = [self._reference_loss(rank, then.precision) for rank in range(len(recorded))]
        now = Numerics(**numerics(torch.device("cpu"), then.precision))
        torch.set_num_threads(before)
        # FSDP2 casts the weights to bf16, autocast casts the inputs of single operations.
        cast = then.precision == "bf16" and self.config.train.parallel == "fsdp2"
        exact = same_arithmetic(self.manifest.lineage, now) and not cast
        tolerance, bound = tolerance_for(then.precision, exact)
        apart = max(abs(a - b) for a, b in zip(losses, recorded, strict=True))
        if not apart <= tolerance:  # also false for NaN
            raise DataError(f"losses {losses}, recorded {recorded}; must be {bound}")
        return f"{len(losses)} recorded losses recomputed, {bound}"

    def _reference_loss(self, rank: int, precision: str) -> float:
        samples = reference_samples(self.windows.num_samples, rank)
        inputs, targets = split(self.windows.gather(samples))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return float(self.model(inputs, targets))

    def _next_losses(self) -> Check:
        return check_next_losses(self.config, self.checkpoint, self.paths)

    # --- for the report --------------------------------------------------------------------------

    @torch.no_grad()
    def _validation_loss(self) -> str:
        total, tokens = 0.0, 0
        settings = self.config.train
        batches = eval_batches(
            self.windows, settings.eval_samples, rank=0, world_size=1, micro=VALIDATION_BATCH
        )
        for inputs, targets, counted in batches:
            total += float(self.model(inputs, targets)) * counted
            tokens += counted
        self.loss = total / tokens
        if not math.isfinite(self.loss):
            raise DataError(f"{self.loss}")
        return f"{self.loss:.4f} over {tokens:,} tokens"

    def _samples(self) -> str:
        """Continue each of report.prompts with the model."""
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
            )
            self.samples.append(Sample(prompt=prompt, text=self.data.tokenizer.decode(ids)))
        # The last token of a sample is not an input.
        beyond = f", each token from the last {context} (seq_len)" if longest - 1 > context else ""
        return f"{len(self.samples)} prompts continued{beyond}"
