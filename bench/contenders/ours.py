"""Forge's training step, as `forge train` takes it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from bench.contenders.sizes import TRAIN, Sizes, Step, fill
from forge.core.memory import Shape
from forge.core.train_settings import Train
from forge.launch.process_group import World
from forge.trainer.models.decoder import make_decoder
from forge.trainer.optim import make_optimizers
from forge.trainer.parallel import ParallelModel
from forge.trainer.step import LaunchedStep, TrainStep

FEATURES = (
    "train.compile (each block), train.shard all where there are ranks, train.recompute as said for the"
    " size, fused AdamW, loss computed with the output layer; each step's loss and gradient norm are"
    " checked one step later"
)


FP8 = "tensorwise"  # the fastest of torchao's recipes
FP8_FEATURES = f"as forge, with train.fp8 {FP8}: the products of the blocks are in float8"


def settings(sizes: Sizes) -> Train:
    """The `train` section of these sizes."""
    changes = {
        "seq_len": sizes.seq_len,
        "batch_size": sizes.samples * sizes.ranks,
        "micro_batch_size": sizes.samples,
        "shard": "all" if sizes.ranks > 1 else "none",
        "recompute": sizes.recompute,
        "compile": True,
    }
    return TRAIN.model_copy(update=changes)


def shape(sizes: Sizes) -> Shape:
    """What forge.core.memory estimates the memory of."""
    return Shape(
        *(sizes.model, sizes.vocab_size, settings(sizes)),
        world_size=sizes.ranks,
        ranks_per_node=min(8, sizes.ranks),
    )


@dataclass(frozen=True)
class Taken:
    """A step whose numbers may not be there yet; float() waits for them."""

    launched: LaunchedStep

    def __float__(self) -> float:
        result = self.launched.read()
        if result.trouble:
            raise RuntimeError(f"the update was left out: {result.trouble}")
        return result.loss


class Batches:
    """The same batch for every step, in the place of a Loader."""

    def __init__(self, sizes: Sizes, world: World) -> None:
        self._batch = sizes.batch(world.device)

    def batch(self, _step: int) -> Any:
        """Inputs and targets of this rank, on the CPU."""
        return self._batch


def forge_fp8_step(sizes: Sizes, world: World) -> Step:
    """The step with the products of the blocks in float8. ImportError without torchao."""
    import torchao  # noqa: F401  # a contender without its package is left out

    return forge_step(sizes, world, fp8=FP8)


def forge_step(sizes: Sizes, world: World, *, fp8: str | None = None) -> Step:
    """The step of `forge train`: the numbers of one are read while the next one runs."""
    train = settings(sizes).model_copy(update={"fp8": fp8})
    decoder = make_decoder(sizes.model, sizes.vocab_size)
    parallel = ParallelModel(decoder, train, world, "bf16")
    fill(decoder)
    optimizers = make_optimizers(decoder, train)
    parallel.wrap()
    if not parallel.is_compiled:  # Forge trains on, the bench would compare nothing
        raise RuntimeError(f"torch.compile has failed: {parallel.why_not_compiled}")
    loader: Any = Batches(sizes, world)
    train_step = TrainStep(parallel, optimizers, loader, train.max_steps)
    steps, last = itertools.count(), list[Taken]()

    def take() -> Taken:
        taken = Taken(train_step(next(steps)))
        if last:
            float(last.pop())
        last.append(taken)
        return taken

    (optimizer,) = optimizers
    return Step(decoder, optimizer, take)
