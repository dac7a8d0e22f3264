"""How fast is one training step, against nanoGPT's, and what does a document mask cost? Side by side in
one run, medians and ratios.

python -m bench.train_step [--quick]    at most 90 s, most of it nanoGPT's steps and the compiler
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.contenders import nanogpt
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.trainer.documents import find_documents
from forge.trainer.initialize import initialized
from forge.trainer.models.decoder import Decoder
from forge.trainer.numerics import keep_freed_memory, product_error, use_fast_fp32
from forge.trainer.optim import make_optimizers

Step = Callable[[Tensor, Tensor], float]
EOS, DOCUMENT = 0, 64  # tokens of a document


def nanogpt_step(model: nn.Module, train: Train) -> Step:
    """One step as nanoGPT's train.py does it on a CPU: eager, AdamW not fused, true fp32."""
    optimizer = nanogpt.make_optimizer(model, train, fused=False)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def forge_step(
    model: Decoder,
    train: Train,
    *,
    bf16: bool = False,
    compiled: bool = False,
    masked: bool = False,
) -> Step:
    """The same with Forge's model and optimizer."""
    (optimizer,) = make_optimizers(model, train)
    for block in model.blocks if compiled else ():  # as ParallelModel does
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)

    def step(inputs: Tensor, targets: Tensor) -> float:
        dtype = torch.bfloat16 if bf16 else torch.float32
        documents = (
            find_documents(inputs, EOS, inputs.device, varlen=False, dtype=dtype)
            if masked
            else None
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs, targets, documents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


# --- the bench ----------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What both sides train on."""

    seq_len: int
    vocab_size: int
    batch_size: int = 8
    model: Llama = Llama(dim=256, layers=4, heads=4)


GOALS = {
    "nanoGPT, eager fp32": None,
    "forge, eager fp32": 1.45,
    "forge, document mask": None,
    "forge, bf16 + compile": 2.5,
}
REFERENCE, FP32, MASKED, BF16 = GOALS


def build(name: str, sizes: Sizes) -> tuple[Step, int]:
    """A contender's step and its number of parameters."""
    train = Train(seq_len=sizes.seq_len, lr=1e-3)
    if name == REFERENCE:
        shape = sizes.model
        gpt = nanogpt.GPT(shape.dim, shape.layers, shape.heads, sizes.seq_len, sizes.vocab_size)
        return nanogpt_step(gpt, train), sum(p.numel() for p in gpt.parameters())
    use_fast_fp32()
    keep_freed_memory()
    decoder = initialized(sizes.model, sizes.vocab_size)
    fast = name == BF16
    step = forge_step(decoder, train, bf16=fast, compiled=fast, masked=name == MASKED)
    return step, decoder.num_parameters()


def contend(name: str, sizes: Sizes, threads: int, pipe: Connection) -> None:
    """One contender in a process of its own, since it sets up its process: a step on request."""
    torch.set_num_threads(threads)
    step, num_parameters = build(name, sizes)
    tokens = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.seq_len + 1))
    tokens[:, DOCUMENT::DOCUMENT] = EOS
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(2):  # compile and warm up
        step(inputs, targets)
    pipe.send((num_parameters, product_error()))
    while pipe.recv() == "step":
        start = time.perf_counter()
        step(inputs, targets)
        pipe.send(time.perf_counter() - start)


def measure(names: list[str], sizes: Sizes, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step of each contender; they take turns, so that all see the same machine."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in names:
        pipes[name], theirs = spawn.Pipe()
        process = spawn.Process(target=contend, args=(name, sizes, options.threads, theirs))
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        processes.append(process)
        num_parameters, error = pipes[name].recv()
        print(f"{name}: {num_parameters:,} parameters, fp32 product off by {error:.1e}")
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for round_number in range(options.rounds):
        if round_number and time.perf_counter() - began > options.seconds:
            break
        for name, pipe in pipes.items():
            pipe.send("step")
            times[name].append(pipe.recv())
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send("end")
        process.join()
    return times


def print_table(times: dict[str, list[float]], num_tokens: int) -> None:
    """Medians, and the median over rounds of the ratio to nanoGPT."""
    import pandas as pd

    rows = []
    for name, seconds in times.items():
        median, goal = statistics.median(seconds), GOALS[name]
        ratios = [a / b for a, b in zip(times[REFERENCE], seconds, strict=True)]
        rows.append(
            {
                "step": name,
                "ms": median * 1e3,
                "tokens/s": num_tokens / median,
                "ratio": statistics.median(ratios),
                "goal": f">= {goal}" if goal else "",
            }
        )
    print(f"medians of {len(times[REFERENCE])} rounds")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))
    costs = [masked / plain for masked, plain in zip(times[MASKED], times[FP32], strict=True)]
    print(f"a step with the document mask takes {statistics.median(costs):.2f} of one without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--vocab", type=int, default=50304, help="for both (nanoGPT's default)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each, taking turns")
    parser.add_argument("--seconds", type=float, default=45, help="no new round after this time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    sizes = Sizes(seq_len=256, vocab_size=options.vocab)
    if options.quick:
        sizes, options.rounds = Sizes(seq_len=32, vocab_size=512), 2
    names = [REFERENCE, FP32, MASKED]
    if torch.cpu.get_capabilities().get("avx512_bf16") and shutil.which("c++"):
        names.append(BF16)
    else:
        print("no bf16 + compile: it needs a CPU with avx512_bf16 and a C++ compiler")
    print(f"dim 256, 4 layers, 4 heads, T {sizes.seq_len}, B {sizes.batch_size},", end=" ")
    print(f"vocabulary {sizes.vocab_size}, {options.threads} threads")
    print_table(measure(names, sizes, options), sizes.batch_size * sizes.seq_len)


if __name__ == "__main__":
    main()
