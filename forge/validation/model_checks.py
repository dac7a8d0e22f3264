"""Checks of the tensors of one checkpoint: names, shapes, finite values, recomputed losses, samples.

The weights are in memory once; the optimizer state, twice their size, is read in groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import blake3
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge.checkpoint import directory, storage
from forge.checkpoint.manifest import Numerics
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, UnfitError
from forge.core.files import grouped
from forge.core.records import Sample, Trained
from forge.data import text_bytes
from forge.hosts.network import available_cores
from forge.launch.rank_records import LossesResult, LossesTask
from forge.trainer import optim
from forge.trainer.models.decoder import make_decoder
from forge.trainer.numerics import REFERENCE_SAMPLES, prepare
from forge.trainer.source_mix import MixAtStart
from forge.trainer.validation_loss import Measured
from forge.validation.estimates import MAX_RECOMPUTED, affordable, recomputed_ranks
from forge.validation.rank_losses import LossEvaluator
from forge.validation.replay import (
    load_on_two_ranks,
    run_here,
    same_arithmetic,
    shards_folder,
    tolerance_for,
    visible_gpus,
)
from forge.validation.run_data import Data

# Optimizer state read at a time, or one larger tensor. A read costs some milliseconds.
GROUP_BYTES = 2**25

# For a load and its forward passes; a collective that hangs fails sooner.
GPU_DEADLINE_SEC = 3600.0

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
        self._gpus = visible_gpus(checkpoint)  # that are used; 0 after they have failed
        self._where = self._first_where()
        self.measured: Measured | None = None
        self.weights_digest: str | None = None
        self.samples: list[Sample] = []

    def _first_where(self) -> str:
        """The device that computes losses, for messages; empty for a checkpoint that CPUs trained."""
        if self._gpus:
            return f", on {self._gpus} GPUs"
        by_cpus = self._manifest.lineage.numerics.device == "cpu"
        return "" if by_cpus else ", on the CPU (faster on GPUs: profiles/README.md)"

    # --- state -----------------------------------------------------------------------------------

    def tensors(self) -> str:
        """Compare names, shapes and types in the index with a model built from the config."""
        self._model = make_decoder(self._config.model, self._data.shards.vocab_size)
        index = storage.SafeReader(self._checkpoint.folder).read_metadata()
        stored = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        weights = self._model.state_dict()
        wanted = {f"model.{n}": (tuple(t.shape), t.dtype) for n, t in weights.items()}
        wanted |= {name: (shape, torch.float32) for name, shape in self._optimizer_shapes()}
        wrong = [
            f"{name} is {stored.get(name, 'missing')}, the config says {wanted.get(name, 'nothing')}"
            for name in sorted(stored.keys() | wanted.keys())
            if stored.get(name) != wanted.get(name)
        ]
        if wrong:
            raise DataError("; ".join(wrong[:5]))
        self._model.to_empty(device="cpu")  # the next check fills all of it
        return f"{len(wanted)} tensors with the names and shapes expected"

    def finite(self) -> str:
        """Read every number. The weights stay in the model, optimizer state is not kept."""
        bad, num_tensors = self.read_weights(), 0
        for group in self._optimizer_groups():
            num_tensors += len(group)
            bad += self._not_finite(group)
            del group  # frees its memory before the next one is allocated
        if bad:
            raise DataError(f"not finite: {', '.join(bad[:5])} ({len(bad)} tensors)")
        return f"all weights, and {num_tensors} tensors of optimizer state"

    def read_weights(self) -> list[str]:
        """Fill the model; names of the weights that are not finite. After `tensors`."""
        weights = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        return [name.removeprefix("model.") for name in self._not_finite(weights)]

    def _optimizer_groups(self) -> Iterator[dict[str, torch.Tensor]]:
        """Empty tensors for the optimizer state by name in the checkpoint, in groups of GROUP_BYTES."""
        for group in grouped(
            self._optimizer_shapes(), lambda entry: 4 * math.prod(entry[1]), GROUP_BYTES
        ):
            yield {name: torch.empty(shape) for name, shape in group}

    def _optimizer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names in the checkpoint and shapes of the optimizer state, which a merge does not have."""
        if self._manifest.merged:
            return
        for name, weight in self._model.state_dict().items():
            shapes = optim.state_shapes(self._model, name, weight, self._config.train)
            for key, shape in shapes.items():
                yield f"optimizer.{name}.{key}", shape

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
        return [name for name, tensor in tensors.items() if not storage.is_finite({name: tensor})]

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

    def probe(self) -> str:
        """Recompute reference losses that ranks recorded, on the same samples."""
        recorded, then = self._manifest.reference.losses, self._manifest.lineage.numerics
        if len(recorded) != self._manifest.world_size:
            raise DataError(
                f"{len(recorded)} losses are recorded of {self._manifest.world_size} ranks",
                cause="checkpoint.json was not written by Forge",
            )
        ranks = recomputed_ranks(len(recorded))
        result = self._on_gpus(ranks=ranks)
        if result is None:
            ranks = recomputed_ranks(
                len(recorded), self._at_most(MAX_RECOMPUTED, REFERENCE_SAMPLES)
            )
            result = self._here(ranks=ranks)
        now = Numerics(**result.numerics)
        # FSDP2 casts the weights to bf16, autocast casts the inputs of single operations. The config may
        # shard in another way by now.
        shard = self._manifest.lineage.config.train.shard
        cast = then.precision == "bf16" and shard != "none"
        # Losses of a merge were computed where that was made; the lineage is of its newest parent.
        of_lineage = not cast and not self._manifest.merged
        exact = of_lineage and same_arithmetic(self._manifest.lineage, now)
        tolerance, bound = tolerance_for(then.precision, exact)
        wrong = [
            f"{loss} of rank {rank}, recorded {recorded[rank]}"
            for rank, loss in zip(ranks, result.reference, strict=True)
            if loss is None or not abs(loss - recorded[rank]) <= tolerance  # also true for NaN
        ]
        if wrong:
            raise DataError(f"losses {'; '.join(wrong)}; must be {bound}{self._where}")
        return f"{len(ranks)} of {len(recorded)} recorded losses recomputed, {bound}{self._where}"

    def reference_loss(self) -> float:
        """The loss of rank 0 on its reference batch, for the manifest of a merge."""
        result = self._on_gpus(ranks=[0]) or self._here(ranks=[0])
        [loss] = result.reference
        if loss is None:
            raise DataError("the loss on the reference batch is not finite")
        return loss

    def _on_gpus(self, **wanted: Any) -> LossesResult | None:
        """Result that fresh ranks compute on the GPUs of this host, which share the weights; None where
        it has none, or they fail. wanted: of LossesTask."""
        if not self._gpus:
            return None
        record = run_here(
            self._task(**wanted),
            self._config,
            self._checkpoint,
            self._gpus,
            "cuda",
            deadline_sec=GPU_DEADLINE_SEC,
        )
        if record.status == "completed":
            assert isinstance(record.result, LossesResult)
            return record.result
        reason = record.message.splitlines()[0]
        self._gpus, self._where = 0, f", on the CPU, since it failed on {self._gpus} GPUs: {reason}"
        return None

    def _here(self, **wanted: Any) -> LossesResult:
        """Result that this process computes with the weights that it has read. wanted: of LossesTask."""
        evaluation = LossEvaluator(self._model, self._data.shards, self._config)
        return evaluation.compute(self._task(**wanted))

    def _task(self, **wanted: Any) -> LossesTask:
        then = self._manifest.lineage.numerics
        return LossesTask(
            checkpoint=str(self._checkpoint.folder.resolve()),
            shards=shards_folder(self._config),
            precision=then.precision,
            # The order of sums in a product depends on it.
            threads=then.cpu_threads,
            **wanted,
        )

    def _at_most(self, wanted: int, num_samples: int) -> int:
        """Number of forward passes of so many samples: `wanted`, but for a model that GPUs trained at
        most as many as this CPU makes in minutes."""
        if self._manifest.lineage.numerics.device == "cpu":
            return wanted
        parameters = self._config.model.num_parameters(self._data.shards.vocab_size)
        tokens = num_samples * self._config.train.seq_len
        return min(wanted, affordable(parameters, tokens, available_cores()))

    # --- for the report --------------------------------------------------------------------------

    def validation_loss(self) -> str:
        report, num_samples = self._config.report, self._config.train.eval_samples
        prompts = [self._data.tokenizer.encode(prompt) for prompt in report.prompts]
        wanted = {"prompts": prompts, "sample_tokens": report.sample_tokens}
        result = self._on_gpus(eval_samples=num_samples, **wanted)
        if result is None:
            sources = max(1, len(self._config.ids.sources))
            num_samples = max(1, self._at_most(num_samples * sources, 1) // sources)
            result = self._here(eval_samples=num_samples, **wanted)
        losses = {name: loss for name, (loss, _) in result.validation.items() if loss is not None}
        if bad := [name for name in result.validation if name not in losses]:
            raise DataError(f"not finite {', '.join(bad)}".strip())
        mix = MixAtStart.recorded(self._checkpoint) if self._manifest.mix else None
        config = self._config
        sizes = text_bytes.by_source(
            self._data.shards, config.data, config.train.seq_len, num_samples
        )
        self.measured = Measured.of(losses, sizes, mix, self._manifest.step)
        self._continued = zip(report.prompts, prompts, result.samples, strict=True)
        tokens = sum(tokens for _, tokens in result.validation.values())
        return f"{self.measured} over {tokens:,} tokens{self._where}"

    def sample(self) -> str:
        """The continuations of report.prompts, computed with the validation loss."""
        report, context, longest = self._config.report, self._config.train.seq_len, 0
        for prompt, prompt_ids, ids in self._continued:
            longest = max(longest, len(prompt_ids) + report.sample_tokens)
            self.samples.append(Sample(prompt=prompt, text=self._data.tokenizer.decode(ids)))
        # The last token of a sample is not an input.
        beyond = f", each token from the last {context} (seq_len)" if longest - 1 > context else ""
        return f"{len(self.samples)} prompts continued{beyond}"
