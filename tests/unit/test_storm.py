"""Threat: a figure of goodput that nobody earned: steps counted twice, or of a wrong history; time in
Slurm's queue taken for training; a table that is not of the raw files beside it."""

from __future__ import annotations

import json
import lzma
import statistics
import sys
from collections import Counter
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from scipy import stats

from bench import faults
from bench.storm import __main__ as storm
from bench.storm import chain, model, picture, raw, record, score, table, trace
from bench.storm.contender import Layout
from bench.storm.raw import Allocation, Raw, Steps, Strike
from bench.storm.score import Wrong
from forge.core.errors import DataError

pytestmark = pytest.mark.tools

# --- traces ---------------------------------------------------------------------------------------


def test_trace_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    one = trace.drawn(1, 20, 120)
    assert one == trace.drawn(1, 20, 120)
    assert one.events != trace.drawn(2, 20, 120).events


@pytest.mark.parametrize("shape", [1.0, 0.6])
def test_trace_has_the_mean_distance_and_the_shares_that_it_names(shape: float) -> None:
    events = trace.drawn(1, 60 * 1000, 120, shape).events  # 30,000 events
    assert events[-1].at / len(events) == pytest.approx(120, rel=0.05)
    counts = Counter(event.kind for event in events)
    for kind, what in trace.KINDS.items():
        assert counts[kind] / len(events) == pytest.approx(what.share, abs=0.01), kind
    assert sum(kind.share for kind in trace.KINDS.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(1, 6))
def test_short_trace_has_each_kind_as_often_as_its_share_says_up_to_one(seed: int) -> None:
    events = trace.drawn(seed, 20, 120).events
    counts = Counter(event.kind for event in events)
    for kind, what in trace.KINDS.items():
        assert abs(counts[kind] - what.share * len(events)) < 1, kind


def test_trace_of_weibull_has_bursts() -> None:
    """Distances vary more than those of a Poisson process, whose deviation is their mean."""
    times = [event.at for event in trace.drawn(1, 60 * 1000, 120, 0.6).events]
    distances = [after - before for before, after in pairwise(times)]
    assert statistics.stdev(distances) > 1.5 * statistics.mean(distances)


SACCT = """JobIDRaw|Start|End|State
1|2026-11-01T00:00:00|2026-11-01T01:00:00|PREEMPTED
1|2026-11-01T01:10:00|2026-11-01T02:00:00|COMPLETED
2|2026-11-01T00:00:00|2026-11-01T03:00:00|TIMEOUT
3|2026-11-01T00:00:00|2026-11-01T05:00:00|NODE_FAIL
4|2026-11-01T00:00:00|Unknown|RUNNING
5|2026-11-01T00:00:00|2026-11-01T04:00:00|CANCELLED by 0
"""


def test_history_of_a_site_becomes_a_trace_of_the_wanted_density(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text(SACCT)
    found = [(event.at, event.kind) for event in trace.replayed(path, 60).events]
    # Two hours apart each, so one mean distance each.
    assert found == [(60, "preemption"), (120, "time-limit"), (180, "power-cut")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no column Start"),
        ("Start|End|State\n", "has 0 events"),
        (SACCT.replace("2026-11-01T03:00:00", "yesterday"), "End is 'yesterday', which is no time"),
    ],
)
def test_history_that_is_none_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        trace.replayed(path, 60)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "source: Field required"),
        ('{"source": "", "events": [{"at": 1, "kind": "rain"}]}', "unknown kind of event 'rain'"),
        ('{"source": "", "events": [{"at": -1, "kind": "cable"}]}', "greater than or equal to 0"),
    ],
)
def test_trace_file_that_is_none_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        trace.Trace.read(path)


def test_printed_trace_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["storm", "--print-trace"])
    storm.main()
    path = tmp_path / "trace.json"
    path.write_text(capsys.readouterr().out)
    assert trace.Trace.read(path) == trace.drawn(1, 20, 120)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--seeds", "0"], "'0' is not a number of storms; 1 or more"),
        (["--minutes", "-3"], "'-3' is not a number above 0"),
        (["--minutes", "nan"], "'nan' is not a number above 0"),
        (["--trace", "x", "--from-sacct", "y"], "not allowed with argument --trace"),
        (["--nodes", "12"], "'12' is not a number of nodes; 1 to 11"),
        (["--contender", "nayve"], "invalid choice: 'nayve' (choose from 'none', 'naive'"),
    ],
)
def test_storm_refuses_what_cannot_be(
    wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["storm", *wrong])
    with pytest.raises(SystemExit):
        storm.main()
    assert said in capsys.readouterr().err


def test_raw_file_of_another_storm_is_not_taken_for_the_one_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = raw.file_of(tmp_path, "one", 1)
    one = storm_of()
    one.write(path)
    same = (one.trace, one.minutes, one.num_nodes)
    storm.refuse_other(path, *same)
    drawn = trace.drawn(1, 20, 120)
    for other in ((drawn, *same[1:]), (one.trace, 20, one.num_nodes), (*same[:2], 9)):
        with pytest.raises(
            DataError, match=r"is of another storm: 1\.66667 minutes, . nodes, by ha"
        ):
            storm.refuse_other(path, *other)


def test_storm_has_as_many_nodes_as_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def one_storm(kind: object, layout: Layout, *_: object) -> raw.Raw:
        sizes.append(layout.nodes)
        return storm_of(num_nodes=layout.nodes)

    monkeypatch.setattr(storm, "why_not", lambda: None)
    monkeypatch.setattr(storm, "one_storm", one_storm)
    words = ["storm", "--contender=forge", "--seeds=1"]
    for number, more in enumerate(([], ["--nodes=3"], ["--quick"])):
        monkeypatch.setattr(sys, "argv", [*words, *more, f"--results={tmp_path / str(number)}"])
        storm.main()
    assert sizes == [4, 3, 2]


def test_results_that_are_a_file_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(storm, "why_not", lambda: None)
    monkeypatch.setattr(sys, "argv", ["storm", "--results", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match=r"file is a file\n.*name a folder"):
        storm.main()


# --- what is read of a run ------------------------------------------------------------------------

RANKS = 2
RIGHT = list(islice(chain.undisturbed(RANKS), 40))


def written(folder: Path, *launches: tuple[int, list[tuple[int, str]]]) -> list[Steps]:
    """What is read of a log with these launches: (start, [(step, chain)])."""
    path, time = folder / "steps.jsonl", 100.0
    with open(path, "w") as file:
        for number, (start, steps) in enumerate(launches):
            same: dict[str, Any] = {"launch": f"l{number}", "start": start}
            head = {"time": time, **same, "resumed": "", "corrupt": False}
            file.write(json.dumps(head) + "\n")
            for step, value in steps:
                time += 0.5
                line = {"time": time, **same, "step": step, "chain": value}
                file.write(json.dumps(line) + "\n")
    return record.launches(path, RANKS, begin=100.0)


def right(first: int, last: int) -> list[tuple[int, str]]:
    return [(step, RIGHT[step - 1]) for step in range(first, last + 1)]


def test_resumed_launch_continues_the_chain_of_the_undisturbed_run(tmp_path: Path) -> None:
    one, two = written(tmp_path, (0, right(1, 6)), (4, right(5, 8)))
    assert (one.start, len(one.times), one.wrong_from) == (0, 6, None)
    assert (two.start, len(two.times), two.wrong_from) == (4, 4, None)


def test_step_on_other_samples_is_wrong_and_so_are_all_after_it(tmp_path: Path) -> None:
    # Resumed at step 4, but with the samples of step 4 again.
    value, steps = RIGHT[3], []
    for step, position in ((5, 3), (6, 4)):
        samples = [n for rank in range(RANKS) for n in chain.samples_of(8 * position, rank)]
        value = chain.link(value, step, samples)
        steps.append((step, value))
    _, two = written(tmp_path, (0, right(1, 4)), (4, steps))
    assert two.wrong_from == 5


def test_step_that_was_left_out_is_wrong(tmp_path: Path) -> None:
    [one] = written(tmp_path, (0, [*right(1, 3), *right(5, 6)]))
    assert one.wrong_from == 5


# --- scores ---------------------------------------------------------------------------------------


def steps(start: int, begin: float, count: int, **more: Any) -> Steps:
    """A launch that trains a step each second."""
    times = [begin + number for number in range(1, count + 1)]
    return Steps(launch=f"{begin}", start=start, begin=begin, times=times, **more)


def storm_of(*launches: Steps, **more: Any) -> Raw:
    """100 s, steps of 1 s, a checkpoint every 5."""
    values: dict[str, Any] = {
        **{"contender": "one", "what": "a way", "is_ranked": True, "seed": 1},
        **{"minutes": 100 / 60, "step_sec": 1.0, "save_every_sec": 5.0, "num_nodes": 2},
        **{"trace": trace.Trace(source="by hand", events=()), "strikes": [], "allocations": []},
        **{"hands": [], "versions": {}, "cores": 2, "loads": [1.0], "launches": list(launches)},
    }
    return Raw(**(values | more))


def struck(at: float, kind: str = "preemption", **more: Any) -> Strike:
    return Strike(kind=kind, due=at, at=at, **({"landed": at + 1} | more))


def useful(one: Raw) -> float:
    return sum(count for _, count in score.useful_steps(one))


def test_step_that_was_trained_twice_counts_once() -> None:
    one = storm_of(steps(0, 0, 30), steps(20, 50, 30))
    assert useful(one) == 50
    assert score.ettr(score.cycles(one)) == pytest.approx(0.5)


def test_steps_of_a_wrong_history_do_not_count() -> None:
    assert useful(storm_of(steps(0, 0, 30, wrong_from=11))) == 10
    assert useful(storm_of(steps(0, 0, 30), steps(30, 50, 20, corrupt=True))) == 30


def test_steps_before_and_after_the_storm_do_not_count() -> None:
    assert useful(storm_of(steps(0, -10, 120))) == 100


def test_samples_count_where_steps_may_lose_some() -> None:
    one = storm_of(samples=[(1.0, 8), (2.0, 4), (150.0, 8)], samples_per_step=8)
    assert useful(one) == 1.5


def allocation(submit: float, start: float | None, end: float | None) -> Allocation:
    times = {"submit": submit, "eligible": submit, "start": start, "end": end}
    return Allocation(job="1", state="", nodes=2, **times)


def test_time_in_the_queue_is_taken_off_once_and_only_within_the_storm() -> None:
    waits = [allocation(-50, -20, 30), allocation(30, 50, 90), allocation(30, 40, None)]
    one = storm_of(steps(0, 0, 30), steps(30, 50, 30), allocations=waits)
    assert score.queue_times(one) == [(30, 40), (40, 50)]
    assert score.ettr(score.cycles(one), without_queue=True) == pytest.approx(60 / 80)


def test_time_in_which_the_job_trained_is_no_time_in_the_queue() -> None:
    """sacct has said so of a job that lost one of its nodes and kept the others."""
    lost_a_node = allocation(30, 85, 95).model_copy(update={"eligible": 41.0})
    one = storm_of(steps(0, 0, 30), steps(30, 45, 20), allocations=[lost_a_node])
    assert score.queue_times(one) == [(30, 41)]


def test_node_hours_are_those_of_the_allocation() -> None:
    one = storm_of(steps(0, 0, 40), allocations=[allocation(-9, -5, 80)])
    assert score.per_node_hour([one]) == pytest.approx(40 / 80)


def test_gap_after_an_event_ends_with_the_first_step_that_is_new() -> None:
    one = storm_of(steps(0, 0, 30), steps(20, 50, 50), strikes=[struck(29.5)])
    [gap] = score.gaps(one)
    # 10 steps again, until 60; the first new one is done at 61.
    assert (gap.kind, gap.seconds, gap.steps_again, gap.is_over) == ("preemption", 31, 10, True)


def test_gap_belongs_to_the_event_that_began_it() -> None:
    one = storm_of(
        steps(0, 0, 30),
        steps(30, 70, 30),
        strikes=[struck(30), struck(50, "power-cut"), struck(95, "cable", landed=None)],
    )
    assert [(gap.kind, gap.seconds) for gap in score.gaps(one)] == [("preemption", 41)]


def test_event_that_stops_a_run_again_before_its_next_useful_step_has_a_gap_of_its_own() -> None:
    one = storm_of(
        steps(0, 0, 30),
        steps(20, 40, 25),  # useful from 51 to 65: steps 31 to 45
        steps(45, 80, 20),
        strikes=[struck(30, "power-cut"), struck(45, "time-limit")],
    )
    assert [(gap.kind, gap.seconds) for gap in score.gaps(one)] == [
        ("power-cut", 21),
        ("time-limit", 16),
    ]


def test_time_of_a_gap_in_the_queue_is_known_and_left_out_of_the_fit_of_an_allocation() -> None:
    waits = [allocation(-9, -5, 35), allocation(35, 47, None)]
    launches = (steps(0, 0, 30), steps(30, 50, 50))
    one = storm_of(*launches, strikes=[struck(30)], allocations=waits)
    [gap] = score.gaps(one)
    assert (gap.seconds, gap.queued) == (21, 12)
    fits = [model.fit([one], without_queue=without) for without in (False, True)]
    assert [fit.restart for fit in fits if fit] == [21, 9]


def test_gap_at_whose_end_the_storm_was_over_says_so() -> None:
    [gap] = score.gaps(storm_of(steps(0, 0, 30), strikes=[struck(30)]))
    assert (gap.seconds, gap.is_over) == (70, False)


@pytest.mark.parametrize(
    ("launches", "more", "expected"),
    [
        ((steps(0, 0, 30), steps(25, 40, 30)), {}, Wrong()),
        # Before two checkpoints should have been there, a new start is no wrong one.
        ((steps(0, 0, 9), steps(0, 40, 30)), {}, Wrong()),
        ((steps(0, 0, 30), steps(0, 40, 30)), {}, Wrong(from_zero=1)),
        ((steps(0, 0, 30, wrong_from=7),), {}, Wrong(wrong_steps=1)),
        ((steps(0, 0, 30), steps(25, 40, 9, corrupt=True)), {}, Wrong(corrupt=1)),
        ((steps(0, 0, 30),), {"hands": [40.0, 90.0]}, Wrong(hands=2)),
    ],
)
def test_each_wrong_outcome_is_counted(
    launches: tuple[Steps, ...], more: dict[str, Any], expected: Wrong
) -> None:
    assert score.wrong(storm_of(*launches, **more)) == expected


def test_interval_holds_the_ratio_and_is_wider_with_fewer_events() -> None:
    few = [score.Cycle(10, useful, 0) for useful in (1, 5, 9)]
    many = few * 20
    (low, high), (lower, higher) = score.interval(many), score.interval(few)
    assert lower < low < score.ettr(many) < high < higher


# --- the model ------------------------------------------------------------------------------------


def test_model_is_fitted_from_events_that_were_saved_and_those_that_were_not() -> None:
    saved = storm_of(steps(0, 0, 30), steps(30, 50, 50), strikes=[struck(30)])
    lost = storm_of(steps(0, 0, 30), steps(20, 50, 50), strikes=[struck(30)])
    fit = model.fit([saved, lost])
    assert fit is not None
    assert fit.saved_share == 0.5
    assert fit.restart == 21
    assert fit.detection == pytest.approx(31 - 21 - 2.5)
    assert model.fit([storm_of(steps(0, 0, 30))]) is None


# --- raw files and tables -------------------------------------------------------------------------


def test_raw_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = storm_of(steps(0, 0, 3), strikes=[struck(2)], allocations=[allocation(0, 1, None)])
    path = raw.file_of(tmp_path, "one", 1)
    one.write(path)
    assert raw.read_all(tmp_path) == [one]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"is no raw file of a storm: Compressed data ended before"):
        raw.read_all(tmp_path)
    path.write_bytes(lzma.compress(b"{}"))
    with pytest.raises(DataError, match=r"is no raw file of a storm: contender: Field required"):
        raw.read_all(tmp_path)


def test_tables_name_each_contender_best_first_and_those_that_are_not_ranked_last() -> None:
    values = {"strikes": [struck(30)], "is_ranked": True}
    good = storm_of(steps(0, 0, 60), contender="good", **values)
    bad = storm_of(steps(0, 0, 30), contender="bad", **values)
    other = storm_of(steps(0, 0, 99), contender="other", **(values | {"is_ranked": False}))
    text = table.tables([bad, other, good])
    names = [line.split(":")[0] for line in text.splitlines() if ": a way" in line]
    assert names == ["| good", "| bad", "| other"]
    assert "a way (not ranked)" in text


def test_ratio_to_forge_is_of_the_storms_that_both_have() -> None:
    values = {"strikes": [struck(30)]}
    forge = [
        storm_of(steps(0, 0, count), contender="forge", seed=seed, **values)
        for seed, count in ((1, 80), (2, 20))
    ]
    other = storm_of(steps(0, 0, 40), contender="other", **values)
    none = storm_of(steps(0, 0, 100), contender="none")
    text = table.tables([*forge, other, none])
    ratios = {
        line.split(":")[0]: line.split("|")[-2] for line in text.splitlines() if ": a way" in line
    }
    assert ratios == {"| none": " 0.50 ", "| forge": " 1.00 ", "| other": " 2.00 "}
    assert "| forge: a way | 1, 2 |" in text


def test_page_has_the_tables_of_the_raw_files_beside_it() -> None:
    """To renew them: python -m bench.storm.table --write"""
    text = table.PAGE.read_text()
    assert table.renewed(text, table.page(raw.FOLDER)) == text
    folders = {path.name for path in raw.FOLDER.iterdir() if path.is_dir()}
    assert folders - {table.AGAIN} == table.BESIDE.keys()
    for path, drawn in table.pictures(raw.FOLDER).items():
        assert path.read_text() == drawn


def test_storms_measured_again_are_of_one_trace_and_one_machine_for_all_ways_of_a_seed() -> None:
    raws = raw.read_all(raw.FOLDER / table.AGAIN)
    for seed in {one.seed for one in raws}:
        own = [one for one in raws if one.seed == seed]
        assert {one.contender for one in own} == {"forge", "naive-requeue", "nvrx", "trap"}
        assert {one.cores for one in own} == {own[0].cores}
        assert all(one.trace == trace.drawn(seed, 20, 120) for one in own)


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [((40, 42, 38), "ahead"), ((60, 99, 20), "equal"), ((90, 91, 93), "behind")],
)
def test_way_is_ahead_only_where_the_paired_difference_is_above_0_at_95_percent(
    theirs: tuple[int, ...], verdict: str
) -> None:
    values = {"strikes": [struck(30)]}
    ours = [storm_of(steps(0, 0, 62), contender="forge", seed=n, **values) for n in (1, 2, 3)]
    others = [
        storm_of(steps(0, 0, count), contender="other", seed=n, **values)
        for n, count in enumerate(theirs, 1)
    ]
    found = score.paired(ours, others)
    assert found is not None
    apart = [
        score.ettr(score.cycles(a)) - score.ettr(score.cycles(b))
        for a, b in zip(ours, others, strict=True)
    ]
    test = stats.ttest_1samp(apart, 0).confidence_interval(0.95)
    assert found == pytest.approx((statistics.mean(apart), *test))
    line = next(x for x in table.again([*ours, *others]).splitlines() if x.startswith("| other | "))
    assert line.endswith(f": {verdict} |")
    assert score.paired(ours[:1], others) is None


def test_page_has_the_figures_of_the_storm_that_forge_had_the_machine_to_itself_in() -> None:
    [alone] = raw.read_all(raw.FOLDER / "alone")
    beside = raw.Raw.read(raw.file_of(raw.FOLDER, alone.contender, alone.seed))
    assert alone.trace == beside.trace
    text = table.PAGE.read_text().partition("With the machine to itself")[2]
    for one in (alone, beside):
        kept, inside = (
            score.ettr(score.cycles(one), without_queue=without) for without in (False, True)
        )
        assert f"{kept:.3f}" in text and f"{inside:.3f}" in text


def test_picture_has_a_line_for_each_ranked_contender_which_is_level_in_an_outage() -> None:
    one = storm_of(steps(0, 0, 30), steps(30, 80, 20), contender="a<b")
    drawn = ElementTree.fromstring(picture.picture([one, storm_of(is_ranked=False)]))
    [line] = drawn.findall("{*}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    # 30 useful seconds of 100 from 30 s on, until the first step at 81 s.
    x_at, y_at = (lambda sec: 44 + 5.16 * sec), (lambda useful: 260 - 2.48 * useful)
    level = [x for x, y in points if y == pytest.approx(y_at(30), abs=0.1)]
    assert level == pytest.approx([x_at(30), x_at(81)], abs=0.1)
    assert points[-1] == pytest.approx((x_at(100), y_at(50)), abs=0.1)
    assert [text.text for text in drawn.findall("{*}text")][-1] == "a<b"


def test_forecast_has_a_line_for_each_contender_that_several_storms_are_known_of() -> None:
    """20 s without a useful step, of which none was retrained: 1 - 20 s / M."""
    storms = [
        storm_of(
            steps(0, 0, 30), steps(30, 50, 50), contender=name, seed=seed, strikes=[struck(30)]
        )
        for name, seed in (("once", 1), ("twice", 1), ("twice", 2))
    ]
    drawn = ElementTree.fromstring(picture.forecast(storms))
    [line] = drawn.findall("{*}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    fit = model.fit(storms[1:], without_queue=True)
    assert points[0] == pytest.approx((44, 260 - 248 * (fit.ettr(60) - 0.5) / 0.5), abs=0.1)
    assert points[-1] == pytest.approx((560, 260 - 248 * (fit.ettr(6 * 3600) - 0.5) / 0.5), abs=0.1)
    assert [text.text for text in drawn.findall("{*}text")][-1] == "twice"


def test_tables_leave_out_what_cannot_be_counted_of_a_contender_that_loses_samples() -> None:
    """A gap of 10 s after the event, of both."""
    times = [at for at in range(1, 100) if not 30 < at < 40]
    samples = {"samples": [(at, 8) for at in times], "samples_per_step": 8}
    lossy = storm_of(contender="lossy", strikes=[struck(30)], **samples)
    launches = steps(0, 0, 30), steps(30, 39, 60)
    chained = storm_of(*launches, contender="chained", strikes=[struck(30)])
    lines = table.tables([lossy, chained]).splitlines()
    assert {"| lossy | – | – | – | 0 |", "| chained | 0 | 0 | 0 | 0 |"} <= {*lines}
    of = {
        name: [line for line in lines if line.startswith(f"| {name}")]
        for name in ("lossy", "chained")
    }
    # Goodput, outcomes, seconds; the model, too.
    assert {name: len(found) for name, found in of.items()} == {"lossy": 3, "chained": 4}


class _Slurm:
    """Keeps the time limit of one job, which was requeued whenever somebody looks again."""

    def __init__(self) -> None:
        self.limit, self.restarts = 60, count()

    def job(self, job: str) -> dict[str, str]:
        limit = f"{self.limit // 60:02}:{self.limit % 60:02}:00"
        restarts = str(next(self.restarts))
        return {"RunTime": "00:02:25", "TimeLimit": limit, "Restarts": restarts}

    def run(self, *words: str) -> None:
        self.limit = int(words[-1].removeprefix("TimeLimit="))


def test_job_keeps_its_time_limit_where_two_events_bring_it_near() -> None:
    slurm = _Slurm()
    repairs = [faults.reach_time_limit(Mock(cluster=slurm, job="1"), []) for _ in range(2)]
    assert slurm.limit == 4
    for repair in repairs:
        repair()
    assert slurm.limit == 60
