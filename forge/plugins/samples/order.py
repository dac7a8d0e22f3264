"""Order of the samples of a run: the windows that each step has read, through the run's parents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from forge.checkpoint import compatibility, resume
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import ParentCheckpoint
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.paths import RunPaths, checkpoint_name, tokens_folder
from forge.core.terminal import say
from forge.data.sample_order import in_epochs
from forge.data.shards import Shard, ShardSet
from forge.data.sources import Tokens, open_tokens
from forge.data.windows import Windows, joined_windows
from forge.reporting.history import kept_steps, read_history
from forge.trainer import metrics
from forge.trainer.source_mix import SourceMix

TAIL_BYTES = 2**16  # of metrics.jsonl, which end with its newest step


@dataclass(frozen=True)
class Stretch:
    """Steps of one run: those after `after` up to `last`.

    name: of the run, for people. paths: None where there is an export alone. ranks: number of ranks that
    have trained a step, 0 where that is not known.
    """

    name: str
    after: int
    last: int
    config: ResolvedConfig
    tokens: Tokens
    mix: SourceMix | None
    ranks: Callable[[int], int]
    paths: RunPaths | None = None

    @cached_property
    def windows(self) -> Windows:
        return joined_windows(self.tokens, self.config.train.seq_len)

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows of the samples of `count` steps from `first` on, and of which epoch of their source
        each is: int64 [count, train.batch_size]. Steps count from 1."""
        batch = self.config.train.batch_size
        numbers = np.arange((first - 1) * batch, (first - 1 + count) * batch).reshape(count, batch)
        if self.mix is None:
            size, seed = self.windows.num_samples, self.config.train.seed
            return in_epochs(numbers.astype(np.uint64), size=size, seed=seed), numbers // size
        order = self.mix.order
        sources, draws = order.locate(numbers)
        return order.windows(numbers.astype(np.uint64)), draws // np.array(order.sizes)[sources]

    @cached_property
    def first_windows(self) -> dict[str, int]:
        """The number of the first window of each source."""
        counts = [
            sum(shard.num_windows(self.config.train.seq_len) for shard in shards.train)
            for shards in self.tokens.by_source.values()
        ]
        return dict(zip(self.tokens.by_source, accumulate(counts, initial=0), strict=False))

    def numbered_as(self, other: Stretch, windows: np.ndarray) -> np.ndarray:
        """Windows of this stretch by their numbers in another one, which has the same sources or more."""
        firsts = self.first_windows
        shifts = np.array([other.first_windows[name] - first for name, first in firsts.items()])
        return windows + shifts[np.searchsorted([*firsts.values()], windows, side="right") - 1]

    def place(self, window: int) -> tuple[str, ShardSet, Shard, int]:
        """Source, its tokens, shard and first token of a window."""
        shard, first = self.windows.place(window)
        for name, shards in self.tokens.by_source.items():
            if shard in shards.train:
                return name, shards, shard, first
        raise AssertionError(shard)


def stretches(run: RunPaths, data: str) -> list[Stretch]:
    """The steps of a run and of the runs that it starts from, oldest first. data: with their tokens.

    Raises DataError where the tokens are not there or others, or a parent is not there any more, and for
    a run without a checkpoint.
    """
    found: list[Stretch] = []
    paths, checkpoint, last = run, resume.required(run), None
    while True:
        made_from = checkpoint.manifest.lineage.parent
        after = made_from.step if made_from else 0
        config = checkpoint.config({"data": data})
        last = _last_step(run, checkpoint) if last is None else last
        tokens = _tokens(checkpoint, config)
        if found and not tokens.by_source.keys() <= found[-1].tokens.by_source.keys():
            raise DataError(
                f"the samples before {found[-1].name} are not known: {paths.root} has other sources now",
                cause="it was trained again since, and the checkpoint that was the parent is gone",
                fix="restore the directory of the parent as it was",
            )
        mix = SourceMix.recorded(tokens, config.train, checkpoint)
        ranks = partial(_ranks_of, paths)
        name = str(paths.root)
        found.append(Stretch(name, after, last, config, tokens, mix, ranks, paths))
        if made_from is None:
            return found[::-1]
        paths, last = RunPaths(run.root.absolute().parent / made_from.run), after
        checkpoint = _parent(paths, made_from)


def _ranks_of(run: RunPaths, step: int) -> int:
    """Number of ranks that have trained a step; 0 where the log does not tell."""
    try:
        launches = read_history(run).launches
    except DataError:
        return 0
    kept = kept_steps(launches)
    for launch in reversed(launches):
        begun, started = launch.resumed_step, launch.first(events.Launch)
        if started and begun is not None and begun < step <= min(kept[launch.id], launch.last_step):
            return int(started.world_size)
    return 0


def _last_step(run: RunPaths, checkpoint: Checkpoint) -> int:
    """The newest step that is known to be trained, which may be after the last checkpoint."""
    lines = metrics.read_last(run.metrics, TAIL_BYTES) if run.metrics.exists() else []
    return max([checkpoint.step, *(line.step for line in lines)])


def _tokens(checkpoint: Checkpoint, config: ResolvedConfig) -> Tokens:
    tokens = open_tokens(tokens_folder(config.data, config.ids.tokens))
    compatibility.check_same_tokens(checkpoint, tokens)
    return tokens


def _parent(paths: RunPaths, made_from: ParentCheckpoint) -> Checkpoint:
    """The checkpoint, or the merge, that a run starts from; where it was pruned, the newest one of its
    run, which is said. DataError where there is none, or another."""
    step_name, name = checkpoint_name(made_from.step), f"{made_from.run}@{made_from.step}"
    there = [
        path for path in (paths.checkpoints / step_name, paths.merged / step_name) if path.is_dir()
    ]
    for folder in there:
        checkpoint = Checkpoint.open(folder)
        if checkpoint.manifest.digest == made_from.digest:
            return checkpoint
    if not there:
        newest = resume.required(paths)
        say(
            f"note: {name} is pruned: the samples before it are those of {paths.root} as it is now, which"
            " are the same if it was not retrained with another config"
        )
        return newest
    raise DataError(
        f"the samples before {name} are not known: {folder} has digest"
        f" {checkpoint.manifest.digest[:12]}, the run started from {made_from.digest[:12]}",
        cause="the parent was retrained, or merged again, since",
        fix="restore the parent's directory",
    )
