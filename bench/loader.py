"""How fast are batches made, against random reads of a memmap and a bare cast? Mtok/s, medians.

python -m bench.loader [--quick]    about 20 s
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from forge.core.mix import MixStage
from forge.data.loader import Loader
from forge.data.sample_order import MixedOrder
from forge.data.windows import Windows

NUM_TOKENS = 50_000_000


class Shard:
    """A file of random token ids."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        self.path, self.num_tokens = path, num_tokens
        ids = np.random.default_rng(0).integers(0, 50_000, num_tokens, dtype=np.uint16)
        ids.tofile(path)

    def read(self) -> np.ndarray:
        return np.memmap(self.path, np.uint16, "r")


Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def nanogpt_batch(shard: Shard, seq_len: int, batch_size: int) -> Batch:
    """get_batch of nanoGPT's train.py on a CPU: opens the memmap each time, random offsets."""

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(shard.path, np.uint16, "r")
        ix = torch.randint(len(data) - seq_len, (batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + seq_len].astype(np.int64)) for i in ix])
        y = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in ix]
        )
        return x, y

    return batch


def sequential_batch(shard: Shard, seq_len: int, batch_size: int) -> Batch:
    """The limit: read on from where the last batch ended, cast, and nothing else."""
    data = np.asarray(shard.read())
    size = seq_len * batch_size
    num_batches = (len(data) - 1) // size

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = step % num_batches * size
        tokens = torch.from_numpy(data[start : start + size + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]

    return batch


def mixed_loader(shard: Shard, seq_len: int, batch_size: int) -> Loader:
    """Three sources of equal size, with unequal weights."""
    windows = Windows([shard] * 3, seq_len)
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}
    order = MixedOrder(
        [MixStage(0, weights)],
        dict.fromkeys(weights, windows.num_samples // 3),
        drawn_before={},
        seed=0,
        batch_size=batch_size,
    )
    return Loader(windows, seed=0, batch_size=batch_size, rank=0, world_size=1, mixed=order)


def interleaved_rates(
    makers: dict[str, Batch], batch_tokens: int, rounds: int, round_tokens: int
) -> Iterator[tuple[str, float]]:
    """(name, tokens/s as the median over rounds); the makers take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    num_steps = max(1, round_tokens // batch_tokens)
    for round_number in range(rounds + 1):
        for name, batch in makers.items():
            start = time.perf_counter()
            for step in range(round_number * num_steps, (round_number + 1) * num_steps):
                batch(step)
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
        yield name, num_steps * batch_tokens / statistics.median(values)


def main() -> None:
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little data, to see that it runs")
    parser.add_argument(
        "--step-tokens-per-sec",
        type=float,
        default=2_000,
        help="speed of training, for the loader's share of a step (see bench/train_step.py)",
    )
    options = parser.parse_args()
    num_tokens = 200_000 if options.quick else NUM_TOKENS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shard = Shard(Path(folder) / "train.bin", num_tokens)
        for seq_len, batch_size in ((256, 8), (256, 64), (1024, 8), (1024, 64)):
            loader = Loader(
                Windows([shard], seq_len), seed=0, batch_size=batch_size, rank=0, world_size=1
            )
            makers = {
                "forge": loader.batch,
                "forge, 3 sources": mixed_loader(shard, seq_len, batch_size).batch,
                "random memmap (nanoGPT)": nanogpt_batch(shard, seq_len, batch_size),
                "sequential cast (limit)": sequential_batch(shard, seq_len, batch_size),
            }
            rates = dict(
                interleaved_rates(
                    makers, seq_len * batch_size, 2 if options.quick else 7, num_tokens // 20
                )
            )
            rows += [
                {
                    "T": seq_len,
                    "B": batch_size,
                    "batches": name,
                    "Mtok/s": rate / 1e6,
                    "ratio": rate / rates["random memmap (nanoGPT)"],
                    "of limit": rate / rates["sequential cast (limit)"],
                    "share of step": f"{options.step_tokens_per_sec / rate:.1e}",
                }
                for name, rate in rates.items()
            ]
    print(f"share of a step that trains {options.step_tokens_per_sec:,.0f} tokens/s")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))


if __name__ == "__main__":
    main()
