"""The tables and the pictures of docs/measured/storm.md, made from the raw files.

python -m bench.storm.table [--results FOLDER] [--write]    prints them, or renews the page
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path

from bench.storm import model, raw, score, trace
from bench.storm.picture import forecast, picture
from bench.storm.raw import Raw
from bench.storm.score import Gap, Wrong

PAGE = Path(__file__).parents[2] / "docs/measured/storm.md"
PICTURES = {
    PAGE.with_suffix(".svg"): (picture, "Useful training over wall time, by contender"),
    PAGE.with_name("storm-forecast.svg"): (forecast, "ETTR by the mean time between events"),
}
PICTURE_AGAIN = PAGE.with_name("storm-again.svg")
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
# Subfolders of the raw files, whose storms have a table of their own, and what differs there.
BESIDE = {
    "bursts": "events in bursts (Weibull, shape 0.6)",
    "alone": "nothing else on the machine",
    "stopped": "the storm at which the new series was stopped: a healthy node was excluded",
    "core-each": "two nodes, so a core for each rank, and nothing else on the machine",
}
# Subfolder of the later storms of a few contenders, all of a seed in one sitting.
AGAIN = "again"
FORECAST_SEC = 300.0  # between two events, for which the model is asked
NONE = "–"
FORGE = "forge"  # whose ETTR is compared with that of the others


def pictures(folder: Path) -> dict[Path, str]:
    """The pictures of the page, as SVG, by file."""
    raws, later = raw.read_all(folder), raw.read_all(folder / AGAIN)
    drawn = {path: draw(raws) for path, (draw, _) in PICTURES.items()} if raws else {}
    return drawn | ({PICTURE_AGAIN: picture(later)} if later else {})


def again(raws: Sequence[Raw]) -> str:
    """The storms that were measured again, as Markdown: each seed, and Forge's paired difference."""
    of = _by_contender(raws)
    parts = [_conditions(raws), _by_seed(of), _goodput(of), _wrong(of), _by_kind(of)]
    return "\n".join("\n".join(part) + "\n" for part in parts)


def _by_seed(of: Mapping[str, Sequence[Raw]]) -> Iterator[str]:
    """ETTR of each storm, and by how much Forge trains more in the same storms."""
    seeds = sorted({one.seed for own in of.values() for one in own})
    rows = []
    for own in of.values():
        by_seed = {one.seed: f"{score.ettr(score.cycles(one)):.3f}" for one in own}
        cells = [by_seed.get(seed, NONE) for seed in seeds]
        rows.append([own[0].contender, *cells, _paired(of.get(FORGE, ()), own)])
    seed_heads = [f"seed {seed}" for seed in seeds]
    yield from _rows(["ETTR", *seed_heads, "forge − this one, 95 %"], rows)


def _paired(forge: Sequence[Raw], own: Sequence[Raw]) -> str:
    found = score.paired(forge, own)
    if own[0].contender == FORGE or found is None:
        return NONE
    middle, low, high = found
    return f"{middle:+.3f} ({low:+.3f} to {high:+.3f}): {_verdict(low, high)}"


def _verdict(low: float, high: float) -> str:
    """Only an interval on one side of 0 says who is ahead."""
    if low > 0:
        return "ahead"
    return "behind" if high < 0 else "equal"


def page(folder: Path) -> str:
    """What the page shows of the raw files in a folder and its subfolders, as Markdown."""
    raws = raw.read_all(folder)
    if not raws:
        return tables(raws)
    parts = [f"![{title}]({path.name})\n" for path, (_, title) in PICTURES.items()]
    if later := raw.read_all(folder / AGAIN):
        title = "Useful training over wall time, measured again"
        head = ["### Four ways, measured again\n", f"![{title}]({PICTURE_AGAIN.name})\n"]
        parts = [*head, again(later), "### All ways, before\n", *parts]
    beside = {title: raw.read_all(folder / name) for name, title in BESIDE.items()}
    parts += [tables(raws), "\n".join(_beside(beside)) + "\n"]
    return "\n".join(parts)


def tables(raws: Sequence[Raw]) -> str:
    """All tables, as Markdown."""
    if not raws:
        return "No storm has been measured yet.\n"
    of = _by_contender(raws)
    parts = [_conditions(raws), _goodput(of), _wrong(of), _by_kind(of), _model(of)]
    return "\n".join("\n".join(part) + "\n" for part in parts)


def _by_contender(raws: Sequence[Raw]) -> dict[str, list[Raw]]:
    return {name: [one for one in raws if one.contender == name] for name in _order(raws)}


def _order(raws: Sequence[Raw]) -> list[str]:
    """Ranked contenders from the best to the worst, then the others."""
    names = {one.contender for one in raws}

    def rank(name: str) -> tuple[bool, float]:
        own = [one for one in raws if one.contender == name]
        return not own[0].is_ranked, -score.ettr(_cycles(own))

    return sorted(names, key=rank)


def _conditions(raws: Sequence[Raw]) -> Iterator[str]:
    """What the tables below are true of."""
    loads = [load for one in raws for load in one.loads]
    first = next((one for one in raws if one.is_ranked), raws[0])
    sources = sorted({one.trace.source for one in raws if one.trace.events})
    versions = sorted({f"{k} {v}" for one in raws for k, v in one.versions.items()})
    yield (
        f"{len(raws)} storm{'s' * (len(raws) > 1)} of {first.minutes:g} minutes;"
        f" {first.num_nodes} nodes, one rank each;"
        f" a step lasts {first.step_sec:g} s, a checkpoint every {first.save_every_sec:g} s;"
        f" {first.cores} cores, load {min(loads, default=0):.1f} to {max(loads, default=0):.1f}."
    )
    yield f"Events: {'; '.join(sources) or 'none'}. Assumed shares: {trace.shares_text()}."
    yield f"Versions: {', '.join(versions)}."


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _name(own: Sequence[Raw]) -> str:
    return f"{own[0].contender}: {own[0].what}" + ("" if own[0].is_ranked else " (not ranked)")


def _loses_samples(own: Sequence[Raw]) -> bool:
    """Whether it is scored by distinct samples: its steps are no chain, and one that lacks samples is no
    gap, so that what other figures count cannot be counted of it."""
    return any(one.samples for one in own)


def _goodput(of: Mapping[str, Sequence[Raw]]) -> Iterator[str]:
    """ETTR of each contender, with 95 % by bootstrap over the times between events, and how many times as
    much Forge trains around the same program in the same storms."""
    rows = [[*_figures(own), _ratio(of.get(FORGE, ()), own)] for own in of.values()]
    yield from _rows(["contender", *FIGURES, "forge / this one, same seeds"], rows)


def _beside(storms: Mapping[str, Sequence[Raw]]) -> Iterator[str]:
    """The same figures of the storms beside, by what differs there."""
    rows = [
        [title, *_figures(own)]
        for title, raws in storms.items()
        for own in _by_contender(raws).values()
    ]
    yield from _rows(["other storms", "contender", *FIGURES], rows)


FIGURES = (
    *("seeds", "events: landed, missed", "ETTR", "ETTR without Slurm's queue"),
    *("useful share of allocated node-hours", "steps again"),
)


def _figures(own: Sequence[Raw]) -> list[str]:
    """Cells of one contender: its name, and FIGURES."""
    cycles = _cycles(own)
    landed = sum(len(score.landed(one)) for one in own)
    missed = sum(len(one.strikes) for one in own) - landed
    again = sum(gap.steps_again for one in own for gap in score.gaps(one))
    seeds = ", ".join(str(one.seed) for one in own)
    cells = [_name(own), seeds if landed + missed else NONE, f"{landed}, {missed}"]
    for without_queue in (False, True):
        low, high = score.interval(cycles, without_queue=without_queue)
        middle = score.ettr(cycles, without_queue=without_queue)
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f}, n={len(cycles)})")
    repeated = NONE if _loses_samples(own) else str(again)
    return [*cells, f"{score.per_node_hour(own):.3f}", repeated]


def _cycles(own: Sequence[Raw]) -> list[score.Cycle]:
    return [cycle for one in own for cycle in score.cycles(one)]


def _ratio(forge: Sequence[Raw], own: Sequence[Raw]) -> str:
    """ETTR of Forge over that of another contender, of the seeds that both have; of a contender that no
    event hits, of all."""
    is_struck = any(one.strikes for one in own)
    seeds = {one.seed for one in forge} & {one.seed for one in own if is_struck}
    both = [[one for one in raws if not is_struck or one.seed in seeds] for raws in (forge, own)]
    ours, theirs = (score.ettr(_cycles(raws)) for raws in both)
    return f"{ours / theirs:.2f}" if ours and theirs and own[0].is_ranked else NONE


def _wrong(of: Mapping[str, Sequence[Raw]]) -> Iterator[str]:
    rows = []
    for own in of.values():
        sum_of = reduce(lambda a, b: a + b, map(score.wrong, own), Wrong())
        counts = (sum_of.from_zero, sum_of.wrong_steps, sum_of.corrupt, sum_of.hands)
        cells = [str(count) for count in counts]
        if _loses_samples(own):
            cells[:-1] = [NONE] * len(cells[:-1])
        rows.append([own[0].contender, *cells])
    head = ["wrong outcomes", "started from zero", "steps lost or twice"]
    yield from _rows([*head, "corrupt checkpoint resumed", "a person was needed"], rows)


def _by_kind(of: Mapping[str, Sequence[Raw]]) -> Iterator[str]:
    """Seconds from an event to the next useful step, by kind."""
    rows = []
    for own in of.values():
        gaps = [gap for one in own for gap in score.gaps(one)]
        cells = [own[0].contender]
        for kind in trace.KINDS:
            cells.append(_spread([gap for gap in gaps if gap.kind == kind]))
        rows.append(cells)
    yield from _rows(
        ["seconds without a useful step: median (least to most, n)", *trace.KINDS], rows
    )


def _spread(gaps: Sequence[Gap]) -> str:
    """With the number of those at whose end the storm was over: the true time is longer."""
    if not gaps:
        return NONE
    seconds = [gap.seconds for gap in gaps]
    middle, cut = statistics.median(seconds), sum(not gap.is_over for gap in gaps)
    of = f"{len(gaps)}, {cut} cut by the end" if cut else f"{len(gaps)}"
    return f"{middle:.0f} ({min(seconds):.0f} to {max(seconds):.0f}, {of})"


def _model(of: Mapping[str, Sequence[Raw]]) -> Iterator[str]:
    """The model, fitted on all seeds but the last, beside the last one."""
    rows = []
    for own in of.values():
        if _loses_samples(own):
            continue
        *others, last = sorted(own, key=lambda one: one.seed)
        fit = model.fit(others or own)
        if fit is None:
            continue
        numbers = (fit.stall, fit.restart, fit.detection)
        cells = [own[0].contender, *(f"{number:.1f}" for number in numbers)]
        cells.append(f"{fit.saved_share:.2f}")
        if others:
            measured = score.ettr(score.cycles(last))
            forecast = fit.ettr(model.between_events(last))
            cells += [f"{forecast:.3f}", f"{measured:.3f}", f"{100 * (forecast - measured):+.1f}"]
        else:
            cells += [NONE] * 3
        inside = model.fit(others or own, without_queue=True)
        assert inside is not None  # there is an event
        rows.append([*cells, *(f"{one.ettr(FORECAST_SEC):.3f}" for one in (fit, inside))])
    if not rows:
        return
    head = ["model", "S, s", "R, s", "D, s", "p", "last seed: forecast", "measured"]
    yield from _rows(
        [*head, "apart, points", "one event in 5 minutes", "the same without Slurm's queue"], rows
    )


def renewed(text: str, table: str) -> str:
    """The page with these tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=raw.FOLDER, help="folder of raw files")
    parser.add_argument("--write", action="store_true", help="renew docs/measured/storm.md")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(renewed(PAGE.read_text(), page(options.results)))
        for path, drawn in pictures(options.results).items():
            path.write_text(drawn)
    else:
        print(tables(raw.read_all(options.results)), end="")


if __name__ == "__main__":
    main()
