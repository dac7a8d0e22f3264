"""How fast is one training step on a GPU, against transformers' Llama? Medians, utilization and memory.

python -m bench.gpu [--quick]    some minutes on one GPU; --quick also runs on a CPU
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from forge.core.config import Model, Train
from forge.core.machine import Machine
from forge.launch.process_group import World, joined
from forge.launch.rank import Rank
from forge.trainer.initialize import initialize
from forge.trainer.llama import Decoder
from forge.trainer.metrics import flop_utilization, peak_flops
from forge.trainer.numerics import device_name, prepare
from forge.trainer.optim import make_optimizer
from forge.trainer.parallel import ParallelModel
from forge.trainer.step import TrainStep

Step = Callable[[], object]
WARM_UP = 5


class Sizes(NamedTuple):
    """What all contenders train on; about 150 million parameters."""

    model: Model = Model(dim=768, layers=12, heads=12, ffn_dim=2048)
    vocab_size: int = 50304
    seq_len: int = 1024
    batch_size: int = 16

    def batch(self, _step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of every step, in the place of a loader."""
        generator = torch.Generator().manual_seed(0)
        size = (self.batch_size, self.seq_len + 1)
        tokens = torch.randint(self.vocab_size, size, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


QUICK = Sizes(Model(dim=64, layers=2, heads=2), vocab_size=512, seq_len=32, batch_size=4)


def llama_step(sizes: Sizes, world: World) -> Step:
    """As in a script for one GPU: autocast to bf16, torch's SDPA, fused AdamW, eager."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, train = sizes.model, Train()
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.inner_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=sizes.seq_len,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(world.device)
    optimizer = make_optimizer(model, train)

    def step() -> None:
        inputs, targets = (tokens.to(world.device) for tokens in sizes.batch())
        with torch.autocast(world.device.type, torch.bfloat16):
            logits = model(input_ids=inputs).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def forge_step(sizes: Sizes, world: World, *, compiled: bool) -> Step:
    """The step of `forge train`."""
    train = Train(seq_len=sizes.seq_len, batch_size=sizes.batch_size, compile=compiled)
    decoder = Decoder(sizes.model, sizes.vocab_size)
    parallel = ParallelModel(decoder, train, world, "bf16")
    initialize(decoder, seed=0)
    optimizer = make_optimizer(decoder, train)
    parallel.wrap()
    loader: Any = sizes
    step = TrainStep(parallel, optimizer, loader, train.max_steps)
    return lambda: step(1).read()


CONTENDERS: dict[str, Callable[[Sizes, World], Step]] = {
    "transformers, eager": llama_step,
    "forge, eager": lambda sizes, world: forge_step(sizes, world, compiled=False),
    "forge, compiled": lambda sizes, world: forge_step(sizes, world, compiled=True),
}


def measure(
    make: Callable[[Sizes, World], Step], sizes: Sizes, world: World, rounds: int
) -> tuple[float, float]:
    """Median seconds of a step, and GiB of GPU memory at most. Each contender has the GPU for itself."""
    on_gpu = world.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step, seconds = make(sizes, world), []
    for _ in range(WARM_UP + rounds):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return statistics.median(seconds[WARM_UP:]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if not (options.quick or torch.cuda.is_available()):
        parser.error("there is no GPU; --quick runs on a CPU")
    sizes = QUICK if options.quick else Sizes()
    shape = Decoder(sizes.model, sizes.vocab_size)
    flops, tokens = shape.flops_per_token(sizes.seq_len), sizes.batch_size * sizes.seq_len
    with joined(Rank(0, 0, 1, 1), Machine()) as world:
        prepare(world.device)
        name = device_name(world.device)
        print(f"{name}, torch {torch.__version__}, {shape.num_parameters():,} parameters,", end=" ")
        print(f"T {sizes.seq_len}, B {sizes.batch_size}, vocabulary {sizes.vocab_size}, bf16")
        print(f"{'step':22}{'ms':>9}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}{'ratio':>7}")
        reference = None
        for contender, make in CONTENDERS.items():
            seconds, peak = measure(make, sizes, world, 3 if options.quick else 30)
            reference = reference or seconds
            mfu = flop_utilization(tokens / seconds, flops, 1, peak_flops(name)) or 0  # unknown: 0
            print(
                f"{contender:22}{1e3 * seconds:9.2f}{tokens / seconds:12,.0f}"
                f"{mfu:7.2f}{peak:7.1f}{reference / seconds:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
