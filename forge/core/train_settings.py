"""Section `train`: optimization, evaluation and checkpoints, and what it asks of the ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from forge.core.errors import ConfigError
from forge.core.mix import Mix, check_mix
from forge.core.models.base import Model
from forge.core.optimizers import OptimizerName
from forge.core.section import FREE, Retired, Section

# Values of train.shard.
Shard = Literal["none", "node", "all"] | Annotated[int, Field(ge=2)]
Recompute = Literal["none", "selective", "full"]
# Rows and columns of a matrix that GPUs multiply in float8 (torch._scaled_mm).
FP8_MULTIPLE = 16
# Values of train.micro_batch_size.
MicroBatch = Literal["auto"] | Annotated[int, Field(ge=1)] | None
# Values of train.checkpoint_minutes.
Minutes = Literal["auto"] | Annotated[float, Field(gt=0)] | None


class Train(Section):
    """Optimization, evaluation and checkpoints."""

    RETIRED: ClassVar = {
        "keep_pairs": Retired(
            False, "a smaller keep_every keeps more checkpoints, or checkpoint_every"
        )
    }

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights, the order of the samples and dropout."""
    mix: Mix | None = None
    """Weight of each of tokenize.sources in the samples: `{web: 0.7, code: 0.3}`, in any unit, or a list
    of stages by step: `[{step: 0, web: 0.7, code: 0.3}, {step: 8000, web: 0.3, code: 0.7}]`. null: in
    proportion to their tokens."""
    seq_len: int = Field(256, ge=8)
    """Tokens per sample."""
    document_mask: bool = False
    """Attention and positions stay inside the documents of a sample, as if each were trained alone; also
    in evaluation and validation."""
    batch_size: int = Field(16, ge=1)
    """Global batch size: samples per step, over all ranks."""
    micro_batch_size: MicroBatch = Field("auto", json_schema_extra=FREE)
    """Samples per forward pass of a rank; less than its share of the batch accumulates gradients. `auto`:
    on GPUs the most that fit by the estimate of `forge plan`, on CPUs the whole share; null: the whole
    share."""
    max_steps: int = Field(200, ge=1, json_schema_extra=FREE)
    """Train up to this step; may be raised later, which leaves the learning rate schedule as it is."""
    decay_steps: int | None = Field(None, ge=1)
    """Step at which the schedule reaches its minimum; null: the max_steps of the run's first start, but
    at least warmup_steps."""
    warmup_steps: int = Field(20, ge=0)
    """Steps of linear learning rate warm-up."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: `cosine` decay, or constant, then linear decay (`wsd`)."""
    wsd_decay_fraction: float = Field(0.2, gt=0, le=1)
    """Fraction of decay_steps in which `wsd` decays."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate, as a fraction of the peak."""
    optimizer: OptimizerName = "adamw"
    """`muon` updates the matrices of the blocks, with updates as large as AdamW's, so that lr and
    weight_decay keep their meaning; embeddings, output layer and norms stay with AdamW. It multiplies in
    bf16, which is slow on CPUs without instructions for it."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Nesterov momentum of Muon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta1."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW beta2."""
    grad_clip: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm over all parameters."""
    on_nonfinite: Literal["stop", "skip"] = Field("stop", json_schema_extra=FREE)
    """When the loss or the gradient norm of a step is NaN or infinite on any rank: `stop` ends the run
    (exit 70); `skip` continues with the next batch, without an update of weights and optimizer state."""
    max_skipped_steps: int = Field(10, ge=1, json_schema_extra=FREE)
    """With `skip`, here or of spikes, the run ends (exit 70) after this many skipped steps in a row."""
    spike: Literal["stop", "skip"] | None = Field(None, json_schema_extra=FREE)
    """A step is a spike if its loss or gradient norm is more than spike_factor standard deviations above
    the mean of the steps before: `stop` ends the run (exit 70); `skip` continues with the next batch,
    without an update of weights and optimizer state; null: no rule."""
    spike_factor: float = Field(6.0, gt=0, json_schema_extra=FREE)
    """Standard deviations above the mean from which on a step is a spike."""
    spike_window: int = Field(128, ge=8, le=10_000, json_schema_extra=FREE)
    """Number of steps that mean and deviation are of: the last ones that updated the weights. The rule
    begins when half as many are known."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of forward and backward (weights are stored in fp32); null: fp32 on CPU, bf16 on GPU."""
    fp8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Matrix products of the blocks in float8, in training steps only, by this recipe of torchao:
    `tensorwise` is the fastest, `rowwise_with_gw_hp` the most accurate. For H100 and newer; CPUs emulate
    them, slowly. Needs `make setup EXTRAS=fp8`. null: none."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which FSDP2 averages gradients over ranks: with `shard`, and on GPUs in bf16. `bf16`
    halves the traffic and rounds to 8 bits what is sent; with several copies of the model also their
    sums over micro-batches."""
    deterministic: bool = Field(False, json_schema_extra=FREE)
    """On GPUs, only algorithms that give the same bits each time, so that a resumed run is bitwise equal
    to an uninterrupted one; slower. On CPUs it always is."""
    shard: Shard = Field("none", json_schema_extra=FREE)
    """Ranks that hold one copy of weights and optimizer state together (FSDP2): `none`: each rank has a
    copy of its own; `node`: the ranks of a node; `all`; or a number of ranks. Copies are kept alike."""
    recompute: Recompute = Field("none", json_schema_extra=FREE)
    """Activation checkpointing, block by block: the backward pass recomputes norms, rotary positions and
    the wide half of the feed-forward (`selective`), or the whole block (`full`), for less memory."""
    compile: bool | None = Field(None, json_schema_extra=FREE)
    """Use torch.compile; null: on GPUs. Without a compiler, warn and train uncompiled. The first launch
    of a run decides for all, until this key is changed: a later one that cannot compile as it did is
    refused (exit 69)."""
    log_every: int = Field(5, ge=1, json_schema_extra=FREE)
    """Steps between two lines of metrics."""
    eval_every: int = Field(50, ge=1, json_schema_extra=FREE)
    """Steps between two evaluations; there is also one before the first step and after the last."""
    eval_samples: int = Field(64, ge=1, json_schema_extra=FREE)
    """Samples of the validation split in an evaluation, the same ones each time; of each source."""
    checkpoint_every: int = Field(50, ge=1, json_schema_extra=FREE)
    """Steps between two checkpoints."""
    checkpoint_minutes: Minutes = Field(None, json_schema_extra=FREE)
    """Also write a checkpoint when this many minutes have passed since the last. `auto`: as often as is
    best by how long a save stalls training, and how often runs are interrupted here, an hour at most
    (docs/measured/recovery.md); null: by steps only."""
    keep_last: int = Field(2, ge=1, json_schema_extra=FREE)
    """Number of newest committed checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1, json_schema_extra=FREE)
    """Also keep every checkpoint whose step is a multiple of this; null: none."""

    @field_validator("mix", mode="before")
    @classmethod
    def _is_mix(cls, value: Any) -> Any:
        return check_mix(value)

    @field_validator("shard", mode="before")
    @classmethod
    def _is_shard(cls, value: Any) -> Any:
        is_number = str(value).isdecimal() and int(value) >= 2
        if value not in ("none", "node", "all") and not is_number:
            raise ValueError("must be none, node, all, or a number of ranks, 2 or more")
        return value

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _is_micro_batch(cls, value: Any) -> Any:
        is_number = str(value).isdecimal() and int(value) >= 1
        if value not in ("auto", None) and not is_number:
            raise ValueError("must be auto, null, or a number of samples, 1 or more")
        return value

    @field_validator("checkpoint_minutes", mode="before")
    @classmethod
    def _are_minutes(cls, value: Any) -> Any:
        with suppress(TypeError, ValueError):  # neither text nor a list is one
            if not isinstance(value, bool) and 0 < float(value) < math.inf:
                return value
        if value not in ("auto", None):
            raise ValueError("must be auto, null, or a number of minutes above 0")
        return value

    @field_validator("spike", mode="before")
    @classmethod
    def _does_not_rewind(cls, value: Any) -> Any:
        if value == "rewind":
            raise ValueError(
                "Forge does not rewind any more: use stop or skip. To leave out the batches of a spike,"
                " start a new run from a checkpoint before it, with another seed: parent: RUN@STEP and"
                " another train.seed"
            )
        return value

    def decay_begin(self, decay_steps: int) -> int:
        """Step from which on the learning rate decays, in a schedule that ends at `decay_steps`."""
        if self.schedule == "wsd":
            return max(self.warmup_steps, round(decay_steps * (1 - self.wsd_decay_fraction)))
        return self.warmup_steps

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.decay_steps is not None and self.warmup_steps > self.decay_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is larger than decay_steps {self.decay_steps}"
            )
        return self


def samples_per_rank(batch_size: int, world_size: int) -> int:
    """Samples of a global batch on each rank. ConfigError where the ranks cannot share it evenly."""
    if batch_size % world_size == 0:
        return batch_size // world_size
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    below = batch_size - batch_size % world_size
    raise ConfigError(
        f"train.batch_size {batch_size} cannot be shared by a world of {world_size} ranks",
        cause="every rank must have the same number of samples",
        fix=f"use {', '.join(map(str, divisors))} ranks, or set train.batch_size to "
        f"{' or '.join(str(n) for n in (below, below + world_size) if n)}",
    )


def ranks_per_copy(shard: Shard, world_size: int, ranks_per_node: int) -> int:
    """Ranks that hold one copy of the model together (train.shard); 1 where each has its own. ConfigError
    where the ranks are not a multiple of it."""
    named = {"none": 1, "node": ranks_per_node, "all": world_size}
    ranks = shard if isinstance(shard, int) else named[shard]
    if world_size % ranks == 0:
        return ranks
    divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
    raise ConfigError(
        f"train.shard {shard} does not divide a world of {world_size} ranks into copies of the model",
        cause="every copy must be held by the same number of ranks",
        fix=f"set train.shard to none, all{''.join(f', {n}' for n in divisors)}",
    )


def refuse_bf16_of_ddp(train: Train) -> None:
    """ConfigError for a run whose copies of the model DDP keeps alike, if it is to reduce in bf16."""
    if train.reduce_dtype == "bf16":
        raise ConfigError(
            "train.reduce_dtype is bf16, and the gradients of this run are averaged by DDP, in fp32 only",
            cause="train.shard is none, and the ranks have no GPUs, or train.precision is fp32",
            fix="remove train.reduce_dtype, or set train.shard",
        )


def refuse_fp8(train: Train, model: Model) -> None:
    """ConfigError where train.fp8 is set and cannot be used, whatever the GPU."""
    if train.fp8 is None:
        return
    if find_spec("torchao") is None:
        raise ConfigError(
            f"train.fp8 is {train.fp8}, but Python has no package torchao here",
            fix="make setup EXTRAS=fp8, or remove the key",
        )
    if train.precision == "fp32":
        raise ConfigError(
            f"train.fp8 is {train.fp8} and train.precision is fp32",
            cause="float8 is for training steps that are otherwise in bf16",
            fix="remove one of the two",
        )
    for name, size in {**model.float8_widths(), "train.seq_len": train.seq_len}.items():
        if size % FP8_MULTIPLE:
            raise ConfigError(
                f"train.fp8 is {train.fp8}, and {name} is {size}, which is not a multiple of"
                f" {FP8_MULTIPLE}",
                cause="GPUs multiply matrices in float8 only in such sizes",
                fix=f"use {size // FP8_MULTIPLE * FP8_MULTIPLE + FP8_MULTIPLE}, or remove train.fp8",
            )
