"""Which rank a process is: a wrong rank trains one model eight times."""

import os

import pytest

from forge.core.errors import ConfigError
from forge.launch import rank
from forge.launch.rank import Rank, this_rank

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*NAMES, *SLURM):
        # Set first, so that what this_rank sets is taken back after the test.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def export(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_process_without_launcher_is_the_only_rank():
    assert this_rank(1, 1) == Rank(0, 0, 1, 1)
    assert this_rank(1, 1).is_main
    assert [os.environ[name] for name in NAMES] == ["0", "0", "1"]


def test_rank_comes_from_torchrun(monkeypatch):
    export(monkeypatch, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", **SLURM)
    assert this_rank(4, 2) == Rank(3, 1, 4, 2)


def test_rank_falls_back_to_slurm_and_torch_sees_it(monkeypatch):
    export(monkeypatch, **SLURM)
    assert this_rank(8, 2) == Rank(5, 1, 8, 2)
    assert not this_rank(8, 2).is_main
    assert [os.environ[name] for name in NAMES] == ["5", "1", "8"]


def test_empty_values_count_as_none(monkeypatch):
    export(monkeypatch, RANK="", LOCAL_RANK="", WORLD_SIZE="", **SLURM)
    assert this_rank(8, 2) == Rank(5, 1, 8, 2)
    export(monkeypatch, **dict.fromkeys((*NAMES, *SLURM), ""))
    assert this_rank(1, 1) == Rank(0, 0, 1, 1)


def test_world_of_another_size_is_refused_with_both_numbers(monkeypatch):
    export(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with pytest.raises(ConfigError, match=r"world of 1, expected 2") as caught:
        this_rank(2, 2)
    assert "unset RANK" in caught.value.fix


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK=3, WORLD_SIZE=1, so this would be rank 3 of 1"),
        ({"RANK": "-1"}, "RANK=-1, so this would be rank -1 of 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, so this would be"),
        ({"RANK": "first"}, "RANK=first, which are not all numbers"),
        (
            {"RANK": "2", "WORLD_SIZE": "8", **SLURM},
            "RANK=2, WORLD_SIZE=8, but Slurm started this process as task 5",
        ),
    ],
)
def test_variables_left_over_in_the_shell_are_named(monkeypatch, values, message):
    export(monkeypatch, **values)
    with pytest.raises(ConfigError, match=message) as caught:
        this_rank(int(values.get("WORLD_SIZE", 1)), 1)
    assert caught.value.fix.startswith("unset ")
    assert 0 <= rank.rank_for_record(4) < 4


def test_process_that_starts_ranks_may_be_in_a_batch_job_but_be_no_rank(monkeypatch):
    export(monkeypatch, RANK="", WORLD_SIZE="", **SLURM)
    rank.refuse_left_over()
    export(monkeypatch, RANK="0", LOCAL_RANK="0")
    with pytest.raises(ConfigError, match="RANK=0, LOCAL_RANK=0, which a launcher sets") as caught:
        rank.refuse_left_over()
    assert caught.value.fix.startswith("unset RANK LOCAL_RANK,")


def test_ranks_meet_where_the_launcher_has_found_a_free_port(monkeypatch):
    export(monkeypatch, MASTER_ADDR="", MASTER_PORT="1")
    assert rank.set_rendezvous(("n1", 29500)) == "n1"
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("n1", "29500")
    assert rank.set_rendezvous(None) == "n1"  # torchrun on this host alone has set them
    monkeypatch.delenv("MASTER_ADDR")
    assert rank.set_rendezvous(None) == "127.0.0.1"


def test_ranks_of_torchrun_may_have_other_numbers_than_slurms_tasks(monkeypatch):
    export(monkeypatch, RANK="2", LOCAL_RANK="0", WORLD_SIZE="8", TORCHELASTIC_RUN_ID="x", **SLURM)
    assert this_rank(8, 1).rank == 2
