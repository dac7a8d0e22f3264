"""How fast is a training step on a GPU, beside those of nanoGPT, transformers and torchtitan?

python -m bench.gpu [--quick]    made for 4 minutes at most on one H100; --quick also runs on a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

# As torchtitan's launch script; before torch is imported. Models of many sizes follow each other.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

from bench.contenders import hf_llama, nanogpt, ours, titan
from bench.contenders.sizes import FULL, QUICK, Contender, Sizes
from bench.contest import Contest, Result, world_of
from bench.roofline import Rates, clocks, floor_seconds, measure
from forge.core import memory
from forge.core.memory import GIB
from forge.trainer.metrics import flop_utilization, peak_flops
from forge.trainer.numerics import device_name, prepare

OURS, REFERENCE, FP8 = "forge", "torchtitan-like", "forge-fp8"
CONTENDERS: dict[str, Contender] = {
    "nanoGPT": nanogpt.nanogpt_step,
    "transformers": hf_llama.llama_step,
    REFERENCE: titan.titan_step,
    OURS: ours.forge_step,
    FP8: ours.forge_fp8_step,
}
# The others take 4 minutes: these by --only.
BY_NAME_ONLY = {FP8}
FEATURES = {
    "nanoGPT": nanogpt.FEATURES,
    "transformers": hf_llama.FEATURES,
    REFERENCE: titan.FEATURES,
    OURS: ours.FEATURES,
    FP8: ours.FP8_FEATURES,
}
GOALS = {"1.1B": 0.50, "7B/8": 0.58}  # MFU; besides, REFERENCE's speed at every size
# Guesses, to share out the time: seconds to build and compile a contender, and MFU.
BUILD_SEC, GUESSED_MFU = 12.0, 0.4
TURN_SEC, MAX_ROUNDS = 1.0, 10


class Bench(NamedTuple):
    """How to measure, and on what."""

    device: torch.device
    rates: Rates
    peak: float | None  # FLOP/s of the data sheet
    quick: bool
    only: Sequence[str]  # names of contenders
    end: float  # by time.perf_counter
    file: Path | None  # to which each turn is appended, as a line of JSON


def main() -> int:
    """1 where a contender failed for another reason than memory, time or a missing package."""
    options, began = parsed(), time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        # All but the code of the kernels, which takes the C++ compiler minutes.
        torch.compiler.set_stance("default", force_backend="aot_eager")
    prepare(device)
    rates, peak = measure(device, quick=options.quick), peak_flops(device_name(device))
    end = began + options.seconds
    bench = Bench(device, rates, peak, options.quick, options.only, end, options.json)
    introduce(bench)
    chosen = [one for one in (QUICK if options.quick else FULL) if one.name in options.sizes]
    if how := options.recompute:
        chosen = [replace(one, recompute=how, others_recompute=how) for one in chosen]
    results: list[Result] = []
    for number, sizes in enumerate(chosen):
        results += compete(sizes, share(chosen[number:], bench), bench)
    print(f"\n{time.perf_counter() - began:.0f} s")
    return int(any(result.is_fault for result in results))


def parsed() -> argparse.Namespace:
    """Options, checked; `sizes` and `only` in their order here, all where none is named."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0]
    )
    known = ",".join(one.name for one in FULL)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--sizes", metavar="A,B", help=f"of {known}")
    parser.add_argument("--only", metavar="A,B", help=f"contenders, of {','.join(CONTENDERS)}")
    parser.add_argument("--seconds", type=float, default=220, help="time to measure (%(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="append a line of JSON after each turn"
    )
    ways = ["none", "selective", "full"]
    parser.add_argument("--recompute", choices=ways, help="of all contenders, at all sizes")
    options = parser.parse_args()
    if not (options.quick or torch.cuda.is_available()):
        parser.error("there is no GPU; --quick runs on a CPU")
    sizes = [one.name for one in (QUICK if options.quick else FULL)]
    for option, names in (("sizes", sizes), ("only", list(CONTENDERS))):
        default = [name for name in names if name not in BY_NAME_ONLY]
        chosen = (getattr(options, option) or ",".join(default)).split(",")
        if unknown := [name for name in chosen if name not in names]:
            parser.error(f"--{option} has no {unknown[0]!r}; choose from {','.join(names)}")
        setattr(options, option, [name for name in names if name in chosen])
    return options


# --- one size -------------------------------------------------------------------------------------


def entrants(sizes: Sizes, bench: Bench) -> dict[str, Contender]:
    """Who trains these sizes: nanoGPT's model is GPT-2, and transformers does not shard."""
    can = {"nanoGPT": sizes.model.tie_embeddings, "transformers": sizes.ranks == 1}
    return {name: CONTENDERS[name] for name in bench.only if can.get(name, True)}


def guessed_seconds(sizes: Sizes, bench: Bench) -> float:
    """About what a step takes."""
    return sizes.flops / (GUESSED_MFU * (bench.peak or bench.rates.flops))


def share(left: Sequence[Sizes], bench: Bench) -> float:
    """When the first of these sizes is to end: each has a part of the time that is left, by what it
    should take. What a size does not use is for those after it."""
    now = time.perf_counter()
    weights = [
        len(entrants(one, bench)) * (BUILD_SEC + 2 * TURN_SEC + 4 * guessed_seconds(one, bench))
        for one in left
    ]
    return now + (bench.end - now) * weights[0] / max(sum(weights), 1e-9)


def compete(sizes: Sizes, deadline: float, bench: Bench) -> list[Result]:
    """Measure these sizes, and print their table."""
    num_steps = max(2, min(10, round(TURN_SEC / guessed_seconds(sizes, bench))))
    rounds = MAX_ROUNDS
    if bench.quick:
        num_steps, rounds = 2, 2
    before = clocks(bench.device)
    with world_of(sizes) as world:
        record = partial(append_turn, sizes, bench)
        contest = Contest(entrants(sizes, bench), sizes, world, record)
        contest.run(num_steps, rounds, deadline, bench.end)
    describe(sizes, bench)
    if before:
        print(f"clocks, power, temperature: {before} before, {clocks(bench.device)} after")
    print_rows(sizes, contest.results, bench)
    if not bench.quick:
        print_goals(sizes, contest.results, bench)
    return list(contest.results.values())


def append_turn(sizes: Sizes, bench: Bench, name: str, result: Result) -> None:
    """Append what a contender has done so far to the file of --json: the last line of each pair of size
    and contender is its result, also where the process is killed in the next turn."""
    if bench.file is None:
        return
    told = {
        **{"gpu": device_name(bench.device), "torch": torch.__version__, "size": sizes.name},
        **{"step": name, "tokens": sizes.tokens, "peak_flops": bench.peak},
        "floor_sec": floor_seconds(sizes, bench.rates),
        **asdict(result),
    }
    if result.seconds:
        median = statistics.median(result.seconds)
        told |= {"median_sec": median, "mfu": utilization(sizes, median, bench)}
    told["loss"] = result.loss if math.isfinite(result.loss) else None
    with open(bench.file, "a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")


# --- what is printed ------------------------------------------------------------------------------


def introduce(bench: Bench) -> None:
    """The GPU, and what each contender does."""
    allocator = os.environ["PYTORCH_ALLOC_CONF"]
    print(f"{device_name(bench.device)}, torch {torch.__version__}, allocator: {allocator}")
    print(f"measured: {bench.rates.flops / 1e12:.3g} TFLOP/s in bf16, ", end="")
    known = f"{bench.peak / 1e12:.4g} TFLOP/s" if bench.peak else "not known, so no MFU"
    print(f"{bench.rates.bytes / 1e12:.3g} TB/s; peak of the data sheet: {known}")
    if bench.device.type == "cpu":
        print("compiled with the backend aot_eager, so times say nothing")
    print("contenders take turns; each is built once and has the memory for itself in its turn")
    for name in bench.only:
        print(f"{name}: {FEATURES[name]}")


def describe(sizes: Sizes, bench: Bench) -> None:
    parameters = sizes.model.num_parameters(sizes.vocab_size)
    print(f"\n== {sizes.name}: {parameters:,} parameters,", end=" ")
    print(f"vocabulary {sizes.vocab_size:,}, {sizes.samples} x {sizes.seq_len:,} tokens a step")
    if sizes.ranks > 1:
        print(f"rank 0 of {sizes.ranks} of which the others do not exist: without communication")
    print(f"recomputed: {sizes.recompute} in {OURS}, {sizes.others_recompute} in others;", end=" ")
    print(f"floor {1e3 * floor_seconds(sizes, bench.rates):,.1f} ms")


HEADS = ("ms", "p90", "tokens/s", "MFU", "floor", "GiB", "estimate", "ratio", "loss", "steps")


def print_rows(sizes: Sizes, results: dict[str, Result], bench: Bench) -> None:
    """floor: its share of the median. estimate: forge.core.memory's. ratio: to REFERENCE's speed."""
    print(f"{'step':16}" + "".join(f"{head:>10}" for head in HEADS))
    for name, result in results.items():
        cells = row(sizes, results, name, bench) if result.seconds else ()
        print(f"{name:16}" + "".join(f"{cell:>10}" for cell in cells), result.failure, flush=True)


def row(sizes: Sizes, results: dict[str, Result], name: str, bench: Bench) -> tuple[str, ...]:
    """The cells of a contender below HEADS."""
    result = results[name]
    median = statistics.median(result.seconds)
    mfu, ratio = utilization(sizes, median, bench), speed_ratio(results, name)
    estimate = memory.estimate(ours.shape(sizes)).allocated / GIB
    return (
        f"{1e3 * median:.2f}",
        f"{1e3 * np.percentile(result.seconds, 90):.2f}",
        f"{sizes.tokens / median:,.0f}",
        "-" if mfu is None else f"{mfu:.3f}",
        f"{floor_seconds(sizes, bench.rates) / median:.2f}",
        f"{result.peak_bytes / GIB:.1f}" if result.peak_bytes else "-",
        f"{estimate:.1f}" if name == OURS else "",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{result.loss:.3f}",
        f"{result.turns}x{len(result.seconds) // result.turns}",
    )


def print_goals(sizes: Sizes, results: dict[str, Result], bench: Bench) -> None:
    if OURS not in results or not (seconds := results[OURS].seconds):
        return
    mfu = utilization(sizes, statistics.median(seconds), bench)
    for what, value, goal in (
        (f"ratio to {REFERENCE}", speed_ratio(results, OURS), 1.0),
        ("MFU", mfu, GOALS.get(sizes.name)),
    ):
        if value is not None and goal is not None:
            verdict = "met" if value >= goal else "missed"
            print(f"goal: {what} at least {goal:.2f}: {verdict} with {value:.3f}")


def utilization(sizes: Sizes, seconds: float, bench: Bench) -> float | None:
    """MFU of this rank's GPU."""
    per_token = sizes.flops / sizes.tokens
    return flop_utilization(sizes.tokens / seconds, per_token, 1, bench.peak)


def speed_ratio(results: dict[str, Result], name: str) -> float | None:
    """REFERENCE's median time over this one's; None where one of them was not measured."""
    reference = results.get(REFERENCE)
    if reference is None or not (reference.seconds and results[name].seconds):
        return None
    return statistics.median(reference.seconds) / statistics.median(results[name].seconds)


if __name__ == "__main__":
    raise SystemExit(main())
