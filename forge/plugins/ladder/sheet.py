"""Rows of a ladder: sizes by depth, lengths by tokens per parameter, and the sample sheet with them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from forge.core.config import Config, apply_overrides, checked
from forge.core.errors import ConfigError
from forge.core.sample_sheet import GRID
from forge.core.values import as_cell
from forge.plugins.ladder.settings import (
    MIN_BUDGETS,
    MIN_SIZES,
    MIN_TRUNKS,
    Ladder,
    parameters_of,
    tokens_per_step,
)

TOKENS_PER_PARAMETER = 20  # of a compute-optimal model (Hoffmann et al. 2022)
SHORTEST = 8  # checkpoints of a trunk up to its first rung; each rung starts at one of the trunk's
FIXED = ("ffn_dim", "head_dim", "kv_heads", "init")  # keys of `model` that would not grow with it
FORMULAS = """\
N: parameters of the blocks. Tokens: k x 20 x N, rounded to checkpoints; the fit takes those read.
model.dim: depth x {plan.width_per_depth}. model.heads: model.dim / {plan.head}.
train.lr: {train.lr:g} x {model.dim} / model.dim. train.warmup_steps: N tokens.
The learning rate decays in the last {train.wsd_decay_fraction:.0%} of the steps, where a rung leaves its
trunk."""


class LadderRow(NamedTuple):
    """A new row. cells: key -> value. begin: step of the checkpoint that it starts from."""

    run: str
    cells: dict[str, Any]
    config: Config
    begin: int


def rows_of(values: dict[str, Any], base: Config, plan: argparse.Namespace) -> list[LadderRow]:
    """The rows of a ladder. values: of config.yaml, whose config is `base`. plan: options of
    `forge ladder`. Raises ConfigError for rows that cannot be fitted, and sizes that are not allowed."""
    _check(base, plan)
    sizes = {depth: _size(values, base, plan, depth) for depth in (*plan.depths, *plan.forecast)}
    rows = []
    for run, own, begin in _named(base, plan, sizes):
        cells = {**own, "train.decay_steps": own.get("train.decay_steps", own["train.max_steps"])}
        if "train.keep_every" in own and (values.get("evaluate") or {}).get("every"):
            cells["evaluate.every"] = None  # of a trunk other checkpoints are kept
        given = apply_overrides(values, {"run": run, **cells})
        rows.append(LadderRow(run, cells, checked(Config, given, f"row {run}"), begin))
    return rows


def _check(base: Config, plan: argparse.Namespace) -> None:
    if len(plan.depths) < MIN_SIZES or len(plan.budgets) < MIN_BUDGETS:
        raise ConfigError(
            f"--depths names {len(plan.depths)} sizes and --budgets {len(plan.budgets)} lengths: a fit"
            f" needs {MIN_SIZES} sizes with {MIN_BUDGETS} lengths each",
            cause="along one number of tokens per parameter its two terms cannot be told apart",
            fix="name more, such as --depths 2,3,4,6 --budgets 0.5,1,2",
        )
    trunks = len(plan.depths) * len(plan.seeds)
    if trunks < (needed := MIN_TRUNKS - bool(base.of(Ladder).floor)):
        raise ConfigError(
            f"--depths and --seeds give {trunks} trunks, and an interval needs {needed}",
            cause="they must be more than the constants of the curve",
            fix="name more seeds, such as --seeds 1,2,3",
        )
    if min(plan.forecast) <= max(plan.depths):
        raise ConfigError(
            f"--forecast is {min(plan.forecast)}, and the rungs reach depth {max(plan.depths)}",
            fix="forecast a size that is larger than all rungs",
        )
    fixed = [f"model.{key}" for key in FIXED if getattr(base.model, key, None) is not None]
    if fixed or base.program:
        raise ConfigError(
            f"the config sets {', '.join(fixed) or 'program'}: the rows of a ladder are new models of"
            " Forge's own trainer that grow in all widths",
            fix="remove it from config.yaml",
        )
    if wrong := [d for d in (*plan.depths, *plan.forecast) if d * plan.width_per_depth % plan.head]:
        raise ConfigError(
            f"depth {wrong[0]} has width {wrong[0] * plan.width_per_depth}, no multiple of --head"
            f" {plan.head}",
            fix="choose --width-per-depth and --head so that all widths are",
        )


def _size(
    values: dict[str, Any], base: Config, plan: argparse.Namespace, depth: int
) -> tuple[dict[str, Any], float]:
    """Cells of all rows of a depth, and the steps that read as many tokens as it has parameters."""
    dim = depth * plan.width_per_depth
    cells = {
        "model.layers": depth,
        "model.dim": dim,
        "model.heads": dim // plan.head,
        "train.lr": float(f"{base.train.lr * base.model.dim / dim:.4g}"),
        "train.schedule": "wsd",
        "train.wsd_decay_fraction": base.train.wsd_decay_fraction,
    }
    config = checked(Config, apply_overrides(values, cells), f"depth {depth}")
    unit = parameters_of(config) / tokens_per_step(config)
    return {**cells, "train.warmup_steps": max(1, round(unit))}, unit


def _named(
    base: Config, plan: argparse.Namespace, sizes: dict[int, tuple[dict[str, Any], float]]
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, cells and step of the start of each row; decay_steps only where it is not max_steps."""
    constant = 1 - base.train.wsd_decay_fraction
    for depth in plan.depths:
        cells, unit = sizes[depth]
        lengths = [constant * k * TOKENS_PER_PARAMETER * unit for k in plan.budgets]
        every = max(1, round(lengths[0] / SHORTEST))
        begins = [every * round(length / every) for length in lengths]
        ends = [round(begin / constant) if constant else 0 for begin in begins]
        _refuse_short(base, depth, cells, begins[0], ends[0])
        kept = {"train.checkpoint_every": every, "train.keep_every": every}
        ends_at = {"train.max_steps": begins[-1], "train.decay_steps": ends[-1]}
        for seed in plan.seeds:
            trunk, own = f"{plan.name}-d{depth}-s{seed}", {**cells, "train.seed": seed}
            yield trunk, {"ladder.role": "trunk", **own, **kept, **ends_at}, 0
            for k, begin, end in zip(plan.budgets, begins, ends, strict=True):
                of_trunk = {"parent": f"{trunk}@{begin}", "ladder.role": "rung"}
                yield _with_k(trunk, k), {**of_trunk, **own, "train.max_steps": end}, begin
    for depth in plan.forecast:
        cells, unit = sizes[depth]
        for k in plan.at:
            steps = round(k * TOKENS_PER_PARAMETER * unit)
            _refuse_short(base, depth, cells, int(constant * steps), steps)
            own = {"ladder.role": "forecast", **cells, "train.max_steps": steps}
            yield _with_k(f"{plan.name}-d{depth}", k), own, 0


def _refuse_short(base: Config, depth: int, cells: dict[str, Any], begin: int, end: int) -> None:
    warmup = cells["train.warmup_steps"]
    if not warmup < begin < end:
        raise ConfigError(
            f"the shortest run of depth {depth} would have {end} steps: warm-up to step {warmup}, decay"
            f" from step {begin} on",
            cause=f"a step has {tokens_per_step(base):,} tokens",
            fix="a smaller train.batch_size, larger --budgets and --at, or another"
            " train.wsd_decay_fraction",
        )


def _with_k(name: str, k: float) -> str:
    """The name of a run with its budget: a name has no dots."""
    return f"{name}-k{k:g}".replace(".", "_")


def with_rows(text: str, rows: Sequence[LadderRow]) -> str:
    """The text of a sheet with these rows at its end, and columns for them; what it has stays. Raises
    ConfigError where such a column is a grid. text: "" for a new sheet."""
    lines = text.removesuffix("\n").split("\n") if text.strip() else ["run"]
    told = [n for n, line in enumerate(lines) if line.strip() and not line.startswith("#")]
    heads = [head.strip() for head in lines[told[0]].split("\t")]
    needed = dict.fromkeys(key for row in rows for key in ("run", "parent", *row.cells))
    marked = [head.removeprefix(GRID).strip() for head in heads if head.startswith(GRID)]
    if grids := [key for key in needed if key in marked]:
        raise ConfigError(
            f"the column {grids[0]} of the sample sheet is a grid ({GRID}), whose cells are in the names",
            fix="write the ladder into a sheet of its own, such as --sheet config/ladder.tsv",
        )
    added = [key for key in needed if key not in heads]
    for number in told:
        lines[number] += "".join(f"\t{key}" if number == told[0] else "\t" for key in added)
    for row in rows:
        cells = {"run": row.run, **row.cells}
        columns = (*heads, *added)
        lines.append("\t".join(as_cell(cells[key]) if key in cells else "" for key in columns))
    return "\n".join(lines) + "\n"
