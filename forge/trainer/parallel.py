"""The model distributed over the ranks: sharded or replicated, compiled, in fp32 or bf16."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from forge.core.errors import UnfitError
from forge.core.memory import Shape, with_micro_batch
from forge.core.terminal import say
from forge.core.train_settings import Train, ranks_per_copy, refuse_bf16_of_ddp
from forge.data.loader import num_targets, split
from forge.launch.heartbeat import heartbeat
from forge.launch.kernel_cache import open_kernel_cache
from forge.launch.process_group import World, named
from forge.launch.torch_private import keep_headers_in
from forge.trainer import transforms
from forge.trainer.documents import Documents, find_documents, has_varlen
from forge.trainer.loss import worth_compiling
from forge.trainer.models.decoder import Decoder

NOT_ASKED = "train.compile is false, or null on a CPU"


class ParallelModel:
    """One rank's part of a decoder, with train.shard, train.compile and the precision applied.

    All ranks call every method.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: Train,
        world: World,
        precision: str,
        *,
        eos_id: int | None = None,
        masked: bool = False,
    ) -> None:
        """Takes a decoder on the meta device, and gives it memory on this rank's device, for this rank's
        rows only where it is sharded. Replaces its parameters, so create the optimizer after this.

        eos_id: ends a document; needed with train.document_mask. masked: some tokens are never learned.
        Raises ConfigError where train.shard does not divide the ranks, or the backend cannot shard or
        reduce as the settings say.
        """
        self.decoder, self.settings, self.world, self.precision = (
            decoder,
            settings,
            world,
            precision,
        )
        self._eos_id, self._masked = eos_id, masked
        self._varlen = settings.document_mask and has_varlen(
            decoder.settings, world.device, precision
        )
        rank = world.rank
        ranks = ranks_per_copy(settings.shard, rank.world_size, rank.local_world_size)
        self.uses_fsdp2 = ranks > 1 or transforms.replicates(world, precision)
        transforms.use_float8(decoder, settings, world.device)
        transforms.recompute_activations(decoder, settings.recompute)
        if self.uses_fsdp2:
            transforms.shard_decoder(decoder, world, settings, ranks, precision)
        elif rank.world_size > 1:
            refuse_bf16_of_ddp(settings)
        self.micro_size = choose_micro_batch(decoder, settings, world, precision)
        decoder.to_empty(device=world.device)
        self.forward: torch.nn.Module = decoder
        self.why_not_compiled = NOT_ASKED

    @property
    def is_compiled(self) -> bool:
        """Return whether `wrap` has compiled the blocks."""
        return not self.why_not_compiled

    def wrap(self, why_not_compiled: str | None = None) -> None:
        """Compile the model, and replicate it with DDP unless FSDP2 does. Weights and optimizer do not
        change.

        why_not_compiled: as an earlier launch of the run has decided, "" for a model to compile; None
        where this launch decides, by train.compile. UnfitError where the earlier one has compiled, and
        this one cannot.
        """
        wanted = self._wants_compile() if why_not_compiled is None else not why_not_compiled
        self.why_not_compiled = self._compile() if wanted else why_not_compiled or NOT_ASKED
        if why_not_compiled == "" and not self.is_compiled:
            raise UnfitError(
                "the steps of this run were computed with torch.compile, and this launch cannot compile:"
                f" {self.why_not_compiled}",
                cause="another node or other software than then; without it the run would end with other"
                " weights",
                fix="start it where it can be compiled, or go on without: set train.compile: false",
            )
        if not self.uses_fsdp2 and self.world.rank.world_size > 1:
            with named("replication of the model"):
                self.forward = DistributedDataParallel(self.decoder, gradient_as_bucket_view=True)
            with named("trial all-reduce of gradients"):
                self._settle_buckets()

    def _settle_buckets(self) -> None:
        """One synchronized forward and backward, whose gradients are discarded.

        DDP rebuilds its buckets after the first backward, in the order in which gradients arrived
        (Reducer::rebuild_buckets, called as the next forward begins). Sums over three or more ranks
        depend bitwise on the buckets: without this, the first step of every launch would differ from
        the same step of an uninterrupted run.
        """
        self.backward(*self._blank_batch())
        self.decoder.zero_grad(set_to_none=True)

    def _blank_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch of token 0 with the shapes and strides of a real one, for which torch.compile
        specializes its graph."""
        inputs, targets = split(np.zeros((self.micro_size, self.settings.seq_len + 1), np.int64))
        return inputs, targets

    def _wants_compile(self) -> bool:
        """Return whether train.compile asks for it; if it is not set, whether the device is a GPU."""
        wanted = self.settings.compile
        return self.world.device.type == "cuda" if wanted is None else wanted

    def _compile(self) -> str:
        """Compile each block, and on GPUs the loss, and try one forward and backward on every rank; if
        that fails on one, none uses what was compiled. Why it failed, "" where it did not.

        Blocks are alike, so one graph serves all of them. Their forward methods are compiled, inside of
        FSDP2's hooks. Before DDP wraps the model: its order of buckets must be that of training.
        """
        error, plain = "", []
        missing = self.world.device.type == "cpu" and not (
            shutil.which("c++") or shutil.which("g++")
        )
        # The trial of a model under FSDP2 has collectives, so either all ranks try or none.
        if any(row[0] for row in self.world.gather([float(missing)], "look for a compiler")):
            error = "no C++ compiler on the PATH" if missing else ""
        else:
            keep_headers_in(open_kernel_cache())
            plain = [block.forward for block in self.decoder.blocks]
            for block in self.decoder.blocks:
                # One graph for each shape. With dynamic shapes the graph, and so the bits of a step,
                # would depend on which shape came first in this launch.
                block.forward = torch.compile(block.forward, dynamic=False)
            heartbeat.beat("compilation")
            self.decoder.compiles_loss = worth_compiling(self.world.device)
            try:
                self._trial()
            except torch.OutOfMemoryError:
                raise  # of a GPU: without compilation a step needs more
            except Exception as err:
                # Any error of the compiler stack: training without it is correct, only slower.
                error = f"{type(err).__name__}: {err}".splitlines()[0]
            self.decoder.zero_grad(set_to_none=True)
        if any(row[0] for row in self.world.gather([float(bool(error))], "end of compilation")):
            error = error or "it failed on another rank"
            say(f"warning: training without torch.compile: {error}")
            self.decoder.compiles_loss = False
            for block, forward in zip(self.decoder.blocks, plain, strict=False):
                block.forward = forward
        return error

    def _trial(self) -> None:
        """Forward and backward as in training."""
        batch = self._blank_batch()
        documents = self._documents(batch[0])
        inputs, targets = (tokens.to(self.world.device) for tokens in batch)
        with self._autocast():
            self.decoder(inputs, targets, documents).backward()

    def _documents(self, tokens: torch.Tensor) -> Documents | None:
        """Documents in these inputs, which are on the CPU; None without train.document_mask."""
        if not self.settings.document_mask:
            return None
        assert self._eos_id is not None
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return find_documents(
            tokens, self._eos_id, self.world.device, varlen=self._varlen, dtype=dtype
        )

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute gradients, averaged over ranks; the mean loss of this rank's samples, a scalar on its
        device. Where some tokens are never learned, its sum over the mean number of targets of a rank:
        its mean over ranks is that over all targets.

        inputs, targets: int64 [B / W, seq_len]; accumulated over micro-batches.
        """
        micro, device = self.micro_size, self.world.device
        per_target = self._tokens_per_target(targets)
        parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
        total = torch.zeros((), device=device)
        for number, (tokens, wanted) in enumerate(parts):
            with self._synchronized(number == len(parts) - 1), self._autocast():
                loss = self.forward(
                    tokens.to(device, non_blocking=True),
                    wanted.to(device, non_blocking=True),
                    self._documents(tokens),
                )
                share = per_target * len(tokens) / len(inputs)
                (loss * share).backward()
                total += loss.detach() * share
        return total

    def _tokens_per_target(self, targets: torch.Tensor) -> float:
        """Tokens of all ranks by the targets among them; 1.0 where all tokens are learned."""
        if not self._masked:
            return 1.0
        table = self.world.gather([float(num_targets(targets))], "number of targets")
        return targets.numel() * len(table) / max(1.0, sum(row[0] for row in table))

    def gradient_norm(self) -> torch.Tensor:
        """Norm of the gradients over all parameters, a scalar on the device."""
        gradients = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        full: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return full

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Mean loss, for evaluation. With FSDP2 all ranks gather the weights."""
        heartbeat.beat("evaluation", waits=self.uses_fsdp2)
        # Without torch.compile: validation recomputes this loss without it.
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            loss = self.decoder(
                inputs.to(self.world.device),
                targets.to(self.world.device),
                self._documents(inputs),
            )
        if self.uses_fsdp2:
            transforms.reshard(self.decoder)
        return float(loss)

    @contextmanager
    def _synchronized(self, last: bool) -> Iterator[None]:
        """Gradients are averaged over the copies of the model in the last micro-batch only.

        The ranks of one copy reduce theirs in each: a rank has memory for the gradients of its rows.
        """
        if isinstance(self.forward, DistributedDataParallel):
            with nullcontext() if last else self.forward.no_sync():
                yield
        else:
            if self.uses_fsdp2:
                self.decoder.set_requires_all_reduce(last)  # type: ignore[operator]
            yield

    def _autocast(self) -> AbstractContextManager[Any]:
        # FSDP2 casts by its own policy.
        if self.precision == "bf16" and not self.uses_fsdp2:
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return nullcontext()


def choose_micro_batch(decoder: Decoder, settings: Train, world: World, precision: str) -> int:
    """Samples of one forward pass on a rank, the same on all ranks. All ranks call it.

    Raises ConfigError where the ranks cannot share the batch.
    """
    rank = world.rank
    shape = Shape(
        decoder.settings,
        decoder.num_rows,
        settings,
        rank.world_size,
        rank.local_world_size,
        precision,
    )
    if settings.micro_batch_size == "auto" and world.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(world.device)
        smallest = min(row[0] for row in world.gather([float(total)], "memory of the GPUs"))
        shape = with_micro_batch(shape, smallest)
        if rank.is_main:
            say(f"train.micro_batch_size: auto is {shape.micro_samples} of {shape.share} samples")
    return shape.micro_samples
