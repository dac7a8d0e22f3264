"""The split of a recovery: phases that follow each other, and add up to the time until a new step."""

from __future__ import annotations

import pytest

from bench.recovery_split import PHASES, Seen, longest_step, split
from forge.core import events
from forge.core.events import Event
from forge.trainer.metrics import Line, TrainLine

pytestmark = pytest.mark.tools

FAULT = 100.0


def step(number: int, time: float, launch: str) -> TrainLine:
    rates = {"grad_norm": 1.0, "lr": 1e-3, "tokens_per_sec": 1.0, "mfu": None, "tokens": number}
    return TrainLine(time=time, kind="train", launch=launch, step=number, loss=1.0, **rates)


def launch(time: float, name: str, step: int) -> events.Launch:
    layout = {"world_size": 4, "launcher": "srun", "host": "n1", "nodes": ["n1", "n2"]}
    return events.Launch(time=time, launch=name, step=step, **layout)


def init(time: float, name: str, step: int) -> events.Init:
    facts = {"world_size": 4, "parameters": 1, "versions": {}, "numerics": {}}
    return events.Init(time=time, seconds=1.0, launch=name, step=step, **facts)


def trained(launch: str, *times: tuple[int, float]) -> list[Line]:
    return [step(number, time, launch) for number, time in times]


BEFORE = trained("a", (8, 99.0), (9, 100.1))  # the step in flight is one that was taken before, too


def test_killed_rank_is_split_into_what_happened_in_the_allocation() -> None:
    log: list[Event] = [launch(50, "a", 0), launch(101.5, "b", 7), init(104, "b", 7)]
    lines = BEFORE + trained("b", (8, 104.5), (9, 104.75), (10, 105.0))
    found = split(Seen(FAULT, record=100.3, ended=101, processes={"b": 102}), log, lines)
    assert found
    used = {name: sec for name, sec in found.seconds.items() if sec}
    assert used == pytest.approx(
        {
            **{"detection": 0.3, "end of ranks": 0.7, "launch": 0.5, "processes": 0.5},
            **{"load": 2.0, "first step": 0.5, "steps again": 0.5},
        }
    )
    assert (found.total, found.of_forge) == pytest.approx((5.0, 4.5))


def test_requeue_is_split_into_the_save_slurms_delay_and_the_rules_of_the_job() -> None:
    log: list[Event] = [
        launch(50, "a", 0),
        events.Save(time=101.5, seconds=0.5, stall=0.1, bytes=1, step=9),
        events.Requeue(time=102, job="1", cause="SIGTERM", step=9),
        events.Stage(time=123, seconds=1, bytes=1, digest="d", folders={}, sent=[]),
        events.Preflight(time=126, seconds=2, status="ok", failed=[], nodes=[], left_out={}),
        launch(126.5, "b", 9),
        init(130, "b", 9),
    ]
    seen = Seen(FAULT, ended=102, job_start=119, processes={"b": 127.5})
    found = split(seen, log, BEFORE + trained("b", (10, 130.25)))
    assert found
    assert found.seconds == pytest.approx(
        {
            **{
                "detection": 1.0,
                "end of ranks": 1.0,
                "slurm": 17.0,
                "batch step": 3.0,
                "stage": 1.0,
            },
            **{"preflight": 3.0, "launch": 0.5, "processes": 1.0, "load": 2.5},
            **{"first step": 0.25, "steps again": 0.0},
        }
    )
    assert (found.total, found.of_forge) == pytest.approx((30.25, 13.25))


def test_save_as_usual_between_a_time_limit_and_its_signal_is_not_that_of_the_stop() -> None:
    log: list[Event] = [
        launch(50, "a", 0),
        events.Save(time=102, seconds=0.5, stall=0.1, bytes=1, step=9),
        events.Save(time=109, seconds=0.5, stall=0.1, bytes=1, step=20),
        events.Requeue(time=109.5, job="1", cause="SIGUSR1", step=20),
        launch(126.5, "b", 20),
        init(130, "b", 20),
    ]
    lines = BEFORE + trained("a", (20, 108)) + trained("b", (21, 130.25))
    found = split(Seen(FAULT, ended=110, job_start=119), log, lines)
    assert found
    assert (found.seconds["detection"], found.seconds["end of ranks"]) == (8.5, 1.5)


def test_launch_in_vain_belongs_to_the_launch_that_took_a_step() -> None:
    log: list[Event] = [
        launch(50, "a", 0),
        launch(101, "b", 7),
        launch(110, "c", 7),
        init(112, "c", 7),
    ]
    lines = BEFORE + trained("b", (8, 105)) + trained("c", (8, 113), (9, 114), (10, 115))
    found = split(Seen(FAULT, ended=100.5, processes={"b": 102, "c": 111}), log, lines)
    assert found
    assert found.seconds["launch"] == pytest.approx(9.5)
    assert found.total == pytest.approx(15.0)


def test_training_that_goes_on_has_its_longest_step_and_nothing_else() -> None:
    lines = trained("a", (8, 99.0), (9, 100.25), (10, 103.0), (11, 103.5), (12, 109.0))
    found = longest_step(FAULT, 104.0, lines)
    assert {name: sec for name, sec in found.seconds.items() if sec} == {"first step": 2.75}
    assert longest_step(FAULT, 108.5, lines).total == 5.0  # a step that has not ended counts, too


def test_there_is_no_split_before_a_new_step() -> None:
    log = [launch(50, "a", 0), launch(101, "b", 7)]
    assert split(Seen(FAULT), log[:1], BEFORE) is None
    assert split(Seen(FAULT), log, BEFORE) is None
    assert split(Seen(FAULT), log, BEFORE + trained("b", (8, 105), (9, 106))) is None


def test_a_mark_out_of_order_takes_no_time_from_other_phases() -> None:
    """Slurm's clock has seconds: the start of a job may lie before the end of its old ranks."""
    log = [launch(50, "a", 0), launch(102, "b", 9), init(103, "b", 9)]
    seen = Seen(FAULT, ended=101.5, job_start=101)
    found = split(seen, log, BEFORE + trained("b", (10, 103.5)))
    assert found
    assert found.seconds["slurm"] == 0
    assert found.total == pytest.approx(3.5)
    assert list(found.seconds) == list(PHASES)
