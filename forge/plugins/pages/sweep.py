"""Sweep: many runs as rows, sorted by validation loss, with means over seeds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, stdev
from typing import Any

from forge.core.terminal import Table, print_plain
from forge.plugins.pages.comparison import (
    FACTS,
    NONE,
    ComparedRow,
    ComparedRun,
    Comparison,
    notes_on_scores,
)
from forge.reporting.run_rows import MEASURED_BY
from forge.reporting.run_state import COLORS

SEED = "train.seed"
LOSS, BITS = FACTS["validation_loss"].label, FACTS["bits_per_byte"].label
# Digests of tokenizer and tokens, which follow from keys and files; a note is in place of their columns.
IDS = ("ids.tokenizer", "ids.tokens", "ids.sources", "ids.inputs")
# Keys of a config that make the tokens, by which a loss per token is measured.
OF_TOKENS = ("tokenizer.", "tokenize.", *IDS)


@dataclass(frozen=True)
class Column:
    """A column of a table of runs: its head, all that it stands for, and a text for each row."""

    head: str
    label: str
    texts: list[str]
    is_key: bool = False

    @property
    def is_number(self) -> bool:
        """Return whether the texts are numbers, which are aligned right."""
        return all(text == NONE or text[:1].isdecimal() or text[:1] == "-" for text in self.texts)


@dataclass(frozen=True)
class SweepSetting:
    """Runs that differ in the seed alone, or one run."""

    name: str
    runs: list[ComparedRun]

    @property
    def losses(self) -> list[float]:
        """The validation losses that are known."""
        return self.values(loss_of)

    def values(self, of: Callable[[ComparedRun], float | None]) -> list[float]:
        """The numbers that are known of the runs."""
        return [value for run in self.runs if (value := of(run)) is not None]


@dataclass(frozen=True)
class Sweep:
    """The tables of a sweep. settings: best first; as many as runs where no two differ in the seed alone.

    sorted_by: the label of the number by which runs and settings are sorted.
    means: columns with a text for each setting, [] where settings are runs. columns: with a text for each
    of `runs`, which are sorted. shared: label and text of what is equal for all. notes: what to know
    before losses are compared.
    """

    runs: list[ComparedRun]
    settings: list[SweepSetting]
    sorted_by: str
    means: list[Column]
    columns: list[Column]
    shared: list[tuple[str, str]]
    notes: list[str]

    @property
    def states(self) -> str:
        """`58 validated, 2 failed`."""
        counted = Counter(run.state.state for run in self.runs).most_common()
        return ", ".join(f"{number} {state}" for state, number in counted)


def loss_of(run: ComparedRun) -> float | None:
    """The last validation loss in nats per token; None without one, or where it is no number."""
    loss = run.facts["validation_loss"]
    return float(loss) if loss is not None and isfinite(loss) else None


def bits_of(run: ComparedRun) -> float | None:
    """The last validation loss in bits per byte of text; None where it is not known."""
    bits = run.facts["bits_per_byte"]
    return bits.value if bits is not None and isfinite(bits.value) else None


def sweep_of(compared: Comparison) -> Sweep:
    """The runs of a comparison as a sweep."""
    by = _order_of(compared.runs)
    order = sorted(range(len(compared.runs)), key=lambda n: _rank(by(compared.runs[n])))
    runs = [compared.runs[number] for number in order]
    keys = _in_order(compared.keys, order)
    shown_keys = [row for row in keys if not row.label.startswith(IDS)]
    heads = _heads(row.label for row in shown_keys)
    key_columns = [Column(heads[row.label], row.label, row.texts, True) for row in shown_keys]
    settings = _settings(runs, keys, heads, by)
    results = [_column(row) for row in _in_order(compared.results, order) if row.head]
    scores = [_column(row) for row in _in_order(compared.scores, order)]
    measured = (LOSS, BITS) if by is loss_of else (BITS, LOSS)
    first = [c for label in (*measured, "state") for c in results if c.label == label]
    others = [column for column in results if column not in first]
    columns = [*first, *key_columns, *scores, *others]
    equal = [c for c in columns if len(set(c.texts)) == 1 and c.label not in measured]
    return Sweep(
        runs,
        settings,
        measured[0],
        _means(settings, key_columns, runs) if len(settings) < len(runs) else [],
        [column for column in columns if column not in equal],
        [(column.label, column.texts[0]) for column in equal if column.texts[0] != NONE],
        notes_on(runs, keys),
    )


def _order_of(runs: Sequence[ComparedRun]) -> Callable[[ComparedRun], float | None]:
    """The number that sorts runs: bits per byte where all have them, of the same text, but with different
    tokens; else the loss."""
    texts = {run.validation_text for run in runs}
    tokens = {str([v for k, v in run.config.items() if k.startswith(IDS)]) for run in runs}
    has_bits = all(bits_of(run) is not None for run in runs)
    return (
        bits_of if len(tokens) > 1 and len(texts) == 1 and "" not in texts and has_bits else loss_of
    )


def _rank(loss: float | None) -> float:
    return inf if loss is None else loss


def _in_order(rows: Sequence[ComparedRow], order: Sequence[int]) -> list[ComparedRow]:
    return [
        ComparedRow(row.label, [row.texts[number] for number in order], row.head) for row in rows
    ]


def _column(row: ComparedRow) -> Column:
    return Column(row.head, row.label, row.texts)


def _heads(keys: Iterable[str]) -> dict[str, str]:
    """Key -> its last word, where no other column has the same head; else the whole key."""
    taken = {"run", "runs", *(fact.head for fact in FACTS.values())}
    last = {key: key.rpartition(".")[2] for key in keys}
    times = Counter(last.values())
    return {
        key: word if times[word] == 1 and word not in taken else key for key, word in last.items()
    }


def _settings(
    runs: Sequence[ComparedRun],
    keys: Sequence[ComparedRow],
    heads: dict[str, str],
    by: Callable[[ComparedRun], float | None],
) -> list[SweepSetting]:
    """Runs with equal texts in all keys but the seed, best first."""
    others = [row for row in keys if row.label != SEED]
    members: dict[tuple[str, ...], list[ComparedRun]] = defaultdict(list)
    for number, run in enumerate(runs):
        members[tuple(row.texts[number] for row in others)].append(run)
    settings = [
        SweepSetting(_name(texts, others, heads) if len(members) < len(runs) else own[0].name, own)
        for texts, own in members.items()
    ]
    means = {id(setting): fmean(setting.values(by) or [inf]) for setting in settings}
    return sorted(settings, key=lambda setting: means[id(setting)])


def _name(texts: Sequence[str], keys: Sequence[ComparedRow], heads: dict[str, str]) -> str:
    named = zip(keys, texts, strict=True)
    said = [f"{heads[row.label]} {text}" for row, text in named if row.label in heads]
    return ", ".join(said) or "all seeds"


def _means(
    settings: Sequence[SweepSetting], keys: Sequence[Column], runs: Sequence[ComparedRun]
) -> list[Column]:
    """Mean and sample standard deviation (n - 1) of each setting."""
    places = {id(run): number for number, run in enumerate(runs)}
    first = [places[id(setting.runs[0])] for setting in settings]
    of_setting = [
        Column(key.head, key.label, [key.texts[number] for number in first], True)
        for key in keys
        if key.label != SEED
    ]
    loss = [_mean_text(setting.losses) for setting in settings]
    bits = [_mean_text(setting.values(bits_of)) for setting in settings]
    measured = [f"{len(setting.losses)} of {len(setting.runs)}" for setting in settings]
    count = [m if m.split()[0] != m.split()[-1] else m.split()[0] for m in measured]
    steps = [_between({run.facts["step"] for run in setting.runs}) for setting in settings]
    columns = [
        *of_setting,
        Column(LOSS, LOSS, loss),
        *(
            [Column(FACTS["bits_per_byte"].head, BITS, bits)]
            if any(b != NONE for b in bits)
            else []
        ),
        Column("runs", "runs with a loss", count),
        Column("step", "step", steps),
    ]
    scores = dict.fromkeys(row.label for run in runs for row in run.scores)
    for label in scores:
        values = [
            [
                row.last.value
                for run in setting.runs
                for row in run.scores
                if row.label == label and row.last.value is not None
            ]
            for setting in settings
        ]
        columns.append(Column(label, label, [_mean_text(own) for own in values]))
    return columns


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return NONE
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _between(steps: set[Any]) -> str:
    known = sorted(step for step in steps if step is not None)
    if not known:
        return NONE
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,}–{known[-1]:,}"


def notes_on(runs: Sequence[ComparedRun], keys: Sequence[ComparedRow]) -> list[str]:
    """Warnings about losses and scores that do not compare. keys: in which the runs differ."""
    return [*_of_tokens(runs, keys), *_of_measuring(keys), *notes_on_scores(runs)]


def _of_measuring(keys: Sequence[ComparedRow]) -> list[str]:
    of_train = {
        row.label: row.label.split(".")[1] for row in keys if row.label.startswith("train.")
    }
    differ = [label for label, key in of_train.items() if key in MEASURED_BY]
    if not differ:
        return []
    mixed = ", and a run on several sources has the mean by its own mix" * any(
        key == "mix" for key in of_train.values()
    )
    return [
        f"these runs were not measured alike ({', '.join(differ)}): their validation losses do not"
        f" compare{mixed}"
    ]


def _of_tokens(runs: Sequence[ComparedRun], keys: Sequence[ComparedRow]) -> list[str]:
    differ = [row.label for row in keys if row.label.startswith(OF_TOKENS)]
    if not differ:
        return []
    named = [key for key in differ if not key.startswith(IDS)]
    cause = f" ({', '.join(named)})" if named else ": text of another kind, or changed files"
    tokens = f"these runs do not all have the same tokens{cause}"
    texts = {run.validation_text for run in runs}
    if "" in texts:
        text = "and it is not known of all of them whether they have the same validation text"
    elif len(texts) > 1:
        text = "and have different validation text: neither losses nor bits per byte compare"
    elif any(bits_of(run) is None for run in runs):
        text = "and not all have a loss in bits per byte, as runs of earlier versions"
    else:
        text = "but the same validation text: compare bits per byte, not losses per token"
    return [f"{tokens}, {text}"]


# --- on a terminal --------------------------------------------------------------------------------


def print_sweep(sweep: Sweep) -> None:
    """Print means, runs and what they share to standard output."""
    if sweep.means:
        _table(sweep.means, [{}] * len(sweep.settings)).print()
        print()
    names = Column("run", "run", [run.name for run in sweep.runs])
    tones = [{"state": COLORS[run.state.tone]} for run in sweep.runs]
    _table([names, *sweep.columns], tones).print()
    if sweep.shared:
        shared = ", ".join(f"{label} {text}" for label, text in sweep.shared)
        print_plain(f"\nall runs: {shared}")
    for note in sweep.notes:
        print_plain(f"note: {note}")


def _table(columns: Sequence[Column], tones: Sequence[dict[str, str]]) -> Table:
    heads = [column.head for column in columns]
    numbers = [column.head for column in columns if column.is_number]
    table = Table(heads, numbers=numbers, left_out=True)
    for number, styles in enumerate(tones):
        table.add([column.texts[number] for column in columns], styles)
    return table
