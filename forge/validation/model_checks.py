"""Checks of the tensors of one checkpoint: names, shapes, finite values, recomputed losses, samples.

The weights are in memory once; the optimizer state, twice their size, is read in groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import blake3
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge.checkpoint import directory, storage
from forge.checkpoint.manifest import Numerics
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, UnfitError
from forge.core.grouping import grouped
from forge.core.records import Sample, Trained
from forge.data.loader import Windows, eval_batches, split
from forge.trainer import llama
from forge.trainer.numerics import numerics, prepare, reference_samples
from forge.validation.checkpoint_checks import Data
from forge.validation.estimates import VALIDATION_BATCH, recomputed_ranks
from forge.validation.replay import load_on_two_ranks, same_arithmetic, tolerance_for

# Optimizer state read at a time, or one larger tensor. A read costs some milliseconds.
GROUP_BYTES = 2**25
OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter

_prepare = functools.cache(prepare)  # settings of this process, once for all checkpoints


class ModelChecks:
    """The checks that need the model, to be called in this order: each relies on those before it.

    A check returns its message, and raises DataError where it fails, UnfitError where the disk or this
    host does.
    """

    def __init__(
        self,
        checkpoint: directory.Checkpoint,
        config: ResolvedConfig,
        data: Data,
        goal: Trained | None,
    ) -> None:
        """goal: the run's trained.json; its weights must be those of the checkpoint."""
        _prepare(torch.device("cpu"))
        self._checkpoint, self._config, self._data, self._goal = checkpoint, config, data, goal
        self._manifest = checkpoint.manifest
        self.loss: float | None = None
        self.weights_digest: str | None = None
        self.samples: list[Sample] = []

    # --- state -----------------------------------------------------------------------------------

    def tensors(self) -> str:
        """Compare names, shapes and types in the index with a model built from the config."""
        self._model = llama.Decoder(self._config.model, self._data.shards.vocab_size)
        index = storage.SafeReader(self._checkpoint.folder).read_metadata()
        found = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        weights = self._model.state_dict()
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
        self._model.to_empty(device="cpu")  # the next check fills all of it
        return f"{len(wanted)} tensors with the names and shapes expected"

    def finite(self) -> str:
        """Read every number. The weights stay in the model, optimizer state is not kept."""
        weights = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
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
            for name, weight in self._model.state_dict().items()
            for key in OPTIMIZER_KEYS
        )
        for group in grouped(shapes, lambda one: 4 * math.prod(one[1]), GROUP_BYTES):
            yield {name: torch.empty(shape) for name, shape in group}

    def _not_finite(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Fill the tensors from the checkpoint; names of those with a number that is not finite."""
        try:
            storage.read_tensors(tensors, self._checkpoint.folder, no_dist=True)
        except DataError as err:
            # The digests were right a moment ago, so the disk fails, and the content is unknown.
            failures = getattr(err.__context__, "failures", {})
            if any(isinstance(failure[0], OSError) for failure in failures.values()):
                raise UnfitError(err.what, fix="use another disk, then validate again") from None
            raise
        return [name for name, one in tensors.items() if not storage.is_finite({name: one})]

    def weights(self) -> str:
        hasher = blake3.blake3()
        for name, tensor in sorted(self._model.state_dict().items()):
            storage.update_digest(hasher, name, tensor)
        self.weights_digest = digest = hasher.hexdigest()
        if self._goal and self._goal.weights_digest != digest:
            raise DataError(
                f"digest {digest[:12]}, trained.json has {self._goal.weights_digest[:12]}"
            )
        return f"digest {digest[:12]}"

    def world_size(self) -> str:
        """Load on another number of ranks. This process is one; a checkpoint of one is loaded on two."""
        written = self._manifest.world_size
        if written > 1:
            return f"written by {written} ranks, loaded by 1"
        digest = load_on_two_ranks(self._config, self._checkpoint)
        if digest != self.weights_digest:
            raise DataError(f"other weights when loaded by 2 ranks ({digest})")
        return "written by 1 rank, loaded by 2"

    # --- losses ----------------------------------------------------------------------------------

    @torch.no_grad()
    def probe(self) -> str:
        """Recompute reference losses that ranks recorded, on the same samples."""
        recorded, then = self._manifest.reference.losses, self._manifest.lineage.numerics
        self._model.eval()
        self._windows = Windows(self._data.shards.val, self._config.train.seq_len, split="val")
        before = torch.get_num_threads()
        torch.set_num_threads(then.threads)  # the order of sums in a product depends on it
        ranks = recomputed_ranks(len(recorded))
        losses = [self._reference_loss(rank, then.precision) for rank in ranks]
        now = Numerics(**numerics(torch.device("cpu"), then.precision))
        torch.set_num_threads(before)
        # FSDP2 casts the weights to bf16, autocast casts the inputs of single operations.
        cast = then.precision == "bf16" and self._config.train.shard != "none"
        exact = same_arithmetic(self._manifest.lineage, now) and not cast
        tolerance, bound = tolerance_for(then.precision, exact)
        wrong = [
            f"{loss} of rank {rank}, recorded {recorded[rank]}"
            for rank, loss in zip(ranks, losses, strict=True)
            if not abs(loss - recorded[rank]) <= tolerance  # also true for NaN
        ]
        if wrong:
            raise DataError(f"losses {'; '.join(wrong)}; must be {bound}")
        return f"{len(ranks)} of {len(recorded)} recorded losses recomputed, {bound}"

    def _reference_loss(self, rank: int, precision: str) -> float:
        samples = reference_samples(self._windows.num_samples, rank)
        inputs, targets = split(self._windows.gather(samples))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return float(self._model(inputs, targets))

    # --- for the report --------------------------------------------------------------------------

    @torch.no_grad()
    def validation_loss(self) -> str:
        total, tokens = 0.0, 0
        settings = self._config.train
        batches = eval_batches(
            self._windows, settings.eval_samples, rank=0, world_size=1, micro=VALIDATION_BATCH
        )
        for inputs, targets, counted in batches:
            total += float(self._model(inputs, targets)) * counted
            tokens += counted
        self.loss = total / tokens
        if not math.isfinite(self.loss):
            raise DataError(f"{self.loss}")
        return f"{self.loss:.4f} over {tokens:,} tokens"

    def sample(self) -> str:
        """Continue each of report.prompts with the model."""
        report, context, longest = self._config.report, self._config.train.seq_len, 0
        for number, prompt in enumerate(report.prompts):
            prompt_ids = self._data.tokenizer.encode(prompt)
            longest = max(longest, len(prompt_ids) + report.sample_tokens)
            ids = llama.sample(
                self._model,
                prompt_ids,
                report.sample_tokens,
                context=context,
                seed=number,
            )
            self.samples.append(Sample(prompt=prompt, text=self._data.tokenizer.decode(ids)))
        # The last token of a sample is not an input.
        beyond = f", each token from the last {context} (seq_len)" if longest - 1 > context else ""
        return f"{len(self.samples)} prompts continued{beyond}"
