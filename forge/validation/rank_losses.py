"""Losses and samples of a checkpoint, by this process alone or by ranks that share the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from forge.checkpoint import storage
from forge.core.config import ResolvedConfig
from forge.data.loader import eval_batches, split
from forge.data.sources import Tokens, open_tokens
from forge.data.windows import Windows, windows_by_source
from forge.launch.process_group import World
from forge.launch.rank_records import LossesResult, LossesTask, RankRecord
from forge.trainer.documents import find_documents
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.numerics import numerics, prepare, reference_batch
from forge.trainer.parallel import ParallelModel
from forge.validation.estimates import VALIDATION_BATCH

T = TypeVar("T")
R = TypeVar("R")


def check(world: World, config: ResolvedConfig, task: LossesTask) -> RankRecord:
    """Load the weights, sharded over the ranks; the record has what `LossEvaluator.compute` returns. All
    ranks call it."""
    prepare(world.device)
    tokens = open_tokens(Path(task.shards))
    model = sharded_decoder(config, tokens, world)
    state, folder = {"model": model.state_dict()}, Path(task.checkpoint)
    world.patiently(
        lambda: storage.read_tensors(state, folder, no_dist=True), "load of the weights"
    )
    result = LossEvaluator(model, tokens, config, world).compute(task)
    world.barrier()
    return RankRecord("completed", world.rank.rank, result=result)


def sharded_decoder(config: ResolvedConfig, tokens: Tokens, world: World) -> Decoder:
    """A decoder whose weights are sharded over the ranks, and not yet set. All ranks call it."""
    model = make_decoder(config.model, tokens.vocab_size)
    sharded = config.train.model_copy(update={"shard": "all", "recompute": "none", "fp8": None})
    ParallelModel(model, sharded, world, "fp32")
    return model


class LossEvaluator:
    """Computes losses and samples with a decoder. Ranks divide the work; all of them call `compute`."""

    def __init__(
        self,
        model: Decoder,
        tokens: Tokens,
        config: ResolvedConfig,
        world: World | None = None,
    ) -> None:
        """world: the ranks over which the model is sharded; None: the whole model is on the CPU."""
        self._model, self._world, self._seq_len = model.eval(), world, config.train.seq_len
        self._model.context = self._seq_len
        self._windows = windows_by_source(tokens, "val", self._seq_len)
        self._eos_id = tokens.eos_id if config.train.document_mask else None
        self._device = world.device if world else torch.device("cpu")
        self._rank = world.rank.rank if world else 0
        self._world_size = world.rank.world_size if world else 1

    @torch.no_grad()
    def compute(self, task: LossesTask) -> LossesResult:
        """Losses and tokens that the task asks for."""
        result = self._reference(task) if task.ranks else LossesResult()
        if not task.eval_samples:
            return result
        losses = {
            name: self._validation(windows, task.eval_samples)
            for name, windows in self._windows.items()
        }
        samples: list[list[int]] = []
        if all(math.isfinite(loss) for loss, _ in losses.values()):
            prompts = list(enumerate(task.prompts))
            samples = self._divided(prompts, lambda item: self._sample(*item, task), list[int])
        validation = {name: (_finite(loss), tokens) for name, (loss, tokens) in losses.items()}
        return replace(result, validation=validation, samples=samples)

    def _reference(self, task: LossesTask) -> LossesResult:
        before = torch.get_num_threads()
        if task.threads:
            torch.set_num_threads(task.threads)
        try:
            losses = self._divided(task.ranks, lambda rank: self._reference_loss(rank, task), float)
            now = numerics(self._device, task.precision)
        finally:
            torch.set_num_threads(before)
        return LossesResult(reference=[_finite(loss) for loss in losses], numerics=now)

    def _reference_loss(self, rank: int, task: LossesTask) -> float:
        """The reference-batch loss of a rank, computed as the rank did in training."""
        inputs, targets = split(reference_batch(self._windows, rank))
        # Without the cache, which would keep a copy of all weights in bf16.
        is_bf16 = task.precision == "bf16"
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False
        ):
            return self._loss(inputs, targets)

    def _validation(self, windows: Windows, num_samples: int) -> tuple[float, int]:
        """The mean loss over samples of a validation split, and the number of their targets."""
        total, num_targets = 0.0, 0
        # One sample on a GPU, where fp32 attention with grouped heads has no kernel that saves memory.
        batch = VALIDATION_BATCH if self._device.type == "cpu" else 1
        for inputs, targets, tokens, learned in eval_batches(
            windows,
            num_samples,
            rank=self._rank,
            world_size=self._world_size,
            micro=batch,
        ):
            total += self._loss(inputs, targets) * tokens
            num_targets += learned
        table = self._of_all_ranks((total, num_targets), tuple[float, int])
        num_targets = sum(row[1] for row in table)
        return sum(row[0] for row in table) / max(1, num_targets), num_targets

    def _sample(self, number: int, prompt_ids: list[int], task: LossesTask) -> list[int]:
        return self._model.generate(prompt_ids, task.sample_tokens, seed=number)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        documents = None
        if self._eos_id is not None:
            documents = find_documents(inputs, self._eos_id, self._device, varlen=False)
        return float(self._model(inputs.to(self._device), targets.to(self._device), documents))

    def _divided(self, items: Sequence[T], action: Callable[[T], R], kind: Any) -> list[R]:
        """The results of an action on each item, of which every rank takes the same number: a forward
        pass of the sharded model waits for all ranks. Some items may be done twice. kind: the type of a
        result."""
        size = self._world_size
        rounds = range(-(-len(items) // size))
        own = [action(items[(number * size + self._rank) % len(items)]) for number in rounds]
        table = self._of_all_ranks(own, list[kind])
        return [table[number % size][number // size] for number in range(len(items))]

    def _of_all_ranks(self, value: T, kind: Any) -> list[T]:
        if self._world is None:
            return [value]
        return self._world.gather_objects(value, kind, "losses")


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
