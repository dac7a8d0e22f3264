"""How training's end is told: to the event log, to the queue, to people."""

import pytest
from support import happenings

from forge.checkpoint.resume import CommittedCheckpoints
from forge.core import events
from forge.core.config import Config, checked
from forge.core.errors import UnfitError
from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.core.records import PreflightPass, StageRecord
from forge.data.content_ids import resolve
from forge.hosts.placement import Placement, WorldLayout
from forge.launch import lost_ranks
from forge.launch.launcher import LaunchPlan
from forge.launch.rank_records import RankRecord
from forge.run import requeue, train
from forge.run.programs import program_of
from forge.slurm import slurm

JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2"), 1, "gpu", "x", True, None)
LOST = RankRecord("lost", code=69, cause="peer lost", message="rank 1 of 2 exited without a record")


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_lost_ranks_of_a_requeued_job_do_not_reset_crash_loop_detection(paths, monkeypatch):
    monkeypatch.setattr(requeue, "requeue", lambda *_, **__: (True, ""))
    with pytest.raises(
        train.StoppedEarly, match="exited without a record; job 42 resumes from step 0"
    ):
        train._requeue(LOST, paths, JOB, load_machine(None))
    assert events.read(paths.events) == []


def test_why_a_job_stays_ended_is_said(paths, monkeypatch, capsys):
    monkeypatch.setattr(requeue, "requeue", lambda *_, **__: (False, "it was cancelled"))
    train._requeue(LOST, paths, JOB, load_machine(None))
    assert "not requeued: it was cancelled" in capsys.readouterr().err


TWO_NODES = WorldLayout(2, 1)


class Program:
    """A program of which only the records of its launches matter."""

    config = Config.model_validate({"train": {"batch_size": 12}})
    first_step = 0

    def __init__(self, paths, *records):
        self.paths, self.records, self.hosts, self.ranks = paths, list(records), [], []
        self.checkpoints = CommittedCheckpoints(paths)

    def on(self, layout):
        self.ranks.append(layout.world_size)
        return self

    def launch(self, start, placement, step):
        assert start.layout.nodes == len(placement.hosts)
        assert start.layout.world_size == self.ranks[-1]
        self.hosts.append(placement.hosts)
        return self.records.pop(0)

    def is_complete(self, step):
        return False

    def warnings(self):
        return []


@pytest.fixture
def trained(paths, monkeypatch):
    """trained(*records): launches on two of a job's three nodes, or another layout of the last `of`; the
    program, and the last record. keys: of machine.yaml."""
    monkeypatch.setattr(train.nodes, "unresponsive", lambda hosts: [])
    monkeypatch.setattr(requeue, "was_cancelled", lambda placement: False)
    monkeypatch.setattr(slurm, "this_cluster", lambda: "lab")

    def trained(*records, layout=TWO_NODES, of=3, **keys):
        program = Program(paths, *records)
        machine = load_machine(None, {"launcher": "srun", **keys})
        start = LaunchPlan(machine, layout, StageRecord(), job=JOB)
        placement = Placement(tuple(f"n{number}" for number in range(1, of + 1)), JOB)
        return program, train._train_until_it_ends(program, start, placement, 0)

    return trained


def of_gpu(cause, host="n2"):
    message = f"{cause} on {host} (rank 1): CUDA error: …"
    return RankRecord("lost", 1, 69, cause=cause, message=message, host=host)


DONE = RankRecord("completed", step=10)


def test_the_node_of_a_broken_gpu_is_left_out_and_named(trained, paths):
    program, record = trained(of_gpu(lost_ranks.GPU_FAULT), DONE)
    assert record == DONE
    assert program.hosts == [("n1", "n2"), ("n1", "n3")]
    assert "GPU fault on n2 (rank 1): CUDA error" in paths.bad_nodes.read_text()


@pytest.fixture
def rechecked(monkeypatch):
    """rechecked(trouble): what the check of any node finds; the nodes that were checked."""
    hosts = []

    def rechecked(trouble):
        def recheck(config, machine, layout, placement, staged):
            hosts.extend(placement.hosts)
            return {host: trouble for host in placement.hosts if trouble}

        monkeypatch.setattr(train, "recheck", recheck)
        return hosts

    return rechecked


def hung_on(host):
    message = (
        f"rank 1 of 2 on {host} did not arrive at the agreement after step 8 and does not respond"
    )
    return RankRecord("lost", 1, 69, cause=lost_ranks.HANG, message=message, host=host)


def test_no_node_is_named_or_checked_for_a_job_that_is_over(trained, paths, rechecked, monkeypatch):
    """Neither starts a process for it: both were excluded for a day."""
    monkeypatch.setattr(slurm, "is_over", lambda job: True)
    monkeypatch.setattr(train.nodes, "unresponsive", lambda hosts: list(hosts.hosts))
    monkeypatch.setattr(requeue, "was_cancelled", lambda placement: True)
    checked = rechecked("is down")
    _, record = trained(hung_on("n2"))
    [lost] = [event for event in events.read(paths.events) if isinstance(event, events.Lost)]
    assert (record, lost.silent, checked) == (hung_on("n2"), [], [])
    assert not paths.bad_nodes.exists()


def test_a_spare_takes_over_from_the_node_of_a_hung_rank_even_where_its_checks_pass(
    trained, rechecked, paths
):
    checked = rechecked("")
    program, record = trained(hung_on("n2"), DONE)
    assert record == DONE
    assert checked == ["n2"]
    assert program.hosts == [("n1", "n2"), ("n1", "n3")]
    assert not paths.bad_nodes.exists()


def test_node_that_is_not_reached_but_reaches_slurm_gives_way_to_a_spare_and_is_not_excluded(
    trained, monkeypatch, paths
):
    monkeypatch.setattr(train.nodes, "unresponsive", lambda hosts: ["n2"])
    facts = {"cause": lost_ranks.PEER_LOST, "message": "ranks lost each other"}
    told = RankRecord("lost", 0, 69, **facts, connected=("n1", "n2"))
    program, record = trained(told, DONE)
    assert record == DONE
    assert program.hosts == [("n1", "n2"), ("n1", "n3")]
    assert not paths.bad_nodes.exists()
    [lost] = events.read(paths.events)
    assert f"{train.hostname()} and n2 do not reach each other" in lost.message


def test_broken_link_without_a_spare_excludes_no_node_at_the_next_loss_either(
    trained, monkeypatch, paths
):
    """The ranks of that launch never started, and have left no records."""
    monkeypatch.setattr(
        train.nodes, "unresponsive", lambda hosts: [host for host in hosts.hosts if host == "n2"]
    )
    told = RankRecord("lost", 0, 69, cause="peer lost", message="x", connected=("n1", "n2"))
    program, record = trained(told, of_gpu(lost_ranks.GPU_FAULT, "n3"), LOST)
    assert program.hosts == [("n1", "n2"), ("n1", "n3"), ("n1", "n2")]
    assert "n2 do not reach each other" in record.message
    assert [line.split()[0] for line in paths.bad_nodes.read_text().splitlines()] == ["n3"]


def test_node_that_is_cut_off_is_excluded_and_the_rank_of_another_one_is_not_checked(
    trained, rechecked, monkeypatch, paths
):
    monkeypatch.setattr(train.nodes, "unresponsive", lambda hosts: ["n2"])
    checked = rechecked("")
    program, _ = trained(hung_on("n1"), DONE)
    assert program.hosts == [("n1", "n2"), ("n1", "n3")]
    assert checked == []
    assert paths.bad_nodes.read_text().split()[0] == "n2"


def test_node_that_cannot_be_checked_since_slurm_is_away_is_not_blamed(trained, monkeypatch, paths):
    def recheck(*_):
        raise slurm.silent("srun: error: Unable to contact slurm controller")

    monkeypatch.setattr(train, "recheck", recheck)
    assert trained(hung_on("n2"), DONE)[1] == DONE
    assert not paths.bad_nodes.exists()


def test_without_a_spare_the_node_of_a_hung_rank_trains_again_if_its_checks_pass(
    trained, rechecked
):
    checked = rechecked("")
    program, _ = trained(hung_on("n2"), hung_on("n3"), DONE)
    assert checked == ["n2", "n3"]
    assert program.hosts == [("n1", "n2"), ("n1", "n3"), ("n1", "n2")]


def test_the_node_of_a_hung_rank_that_fails_its_checks_is_excluded_with_both_reasons(
    trained, rechecked, paths
):
    rechecked("gpus: 3 GPUs for 4 ranks")
    program, record = trained(hung_on("n2"), hung_on("n1"))
    assert program.hosts == [("n1", "n2"), ("n1", "n3")]
    assert "does not respond; checked: gpus: 3 GPUs" in paths.bad_nodes.read_text()
    assert record.cause in requeue.REQUEUED_CAUSES


def test_ranks_that_blame_nobody_have_all_their_nodes_checked_before_the_next_launch(
    trained, monkeypatch, paths
):
    """On a GPU: all hosts wait for results of the same step."""
    checked = []

    def recheck(config, machine, layout, placement, staged):
        checked.append(placement.hosts)
        return {"n1": "collectives: too slow"}

    monkeypatch.setattr(train, "recheck", recheck)
    nobody = RankRecord("lost", 0, 69, cause="peer lost", message="ranks lost each other")
    program, record = trained(nobody, DONE)
    assert record == DONE
    assert checked == [("n1", "n2")]
    assert program.hosts == [("n1", "n2"), ("n2", "n3")]
    assert "ranks lost each other; checked: collectives: too slow" in paths.bad_nodes.read_text()


def test_an_error_that_a_kernel_may_have_made_blames_no_node(trained, paths):
    program, record = trained(of_gpu(lost_ranks.GPU_ERROR), DONE)
    assert record == DONE
    assert program.hosts == [("n1", "n2")] * 2
    assert not paths.bad_nodes.exists()


def test_launch_that_slurm_itself_never_starts_blames_no_node_and_the_job_is_requeued(
    trained, paths, monkeypatch
):
    def launch(*_):
        raise slurm.silent(
            "srun: error: Unable to create step: Memory required by task is not available"
        )

    monkeypatch.setattr(Program, "launch", launch)
    _, record = trained()
    assert record.status == "lost" and record.cause in requeue.REQUEUED_CAUSES
    assert "Slurm starts no process" in record.message
    assert not paths.bad_nodes.exists() and events.read(paths.events) == []


def test_first_node_that_names_no_port_gives_way_to_a_spare(trained, paths, monkeypatch):
    launch, silent = Program.launch, []

    def fails_once(program, start, placement, step):
        if not program.hosts:
            program.hosts.append(placement.hosts)
            silent.append(placement.hosts[0])
            raise slurm.NodeUnfit("node n1 cannot run python: no answer within 60 s")
        return launch(program, start, placement, step)

    monkeypatch.setattr(Program, "launch", fails_once)
    monkeypatch.setattr(
        train.nodes, "unresponsive", lambda hosts: [h for h in hosts.hosts if h in silent]
    )
    program, record = trained(DONE)
    assert record == DONE
    assert program.hosts == [("n1", "n2"), ("n2", "n3")]
    assert "n1 cannot run python" in events.last(events.read(paths.events), events.Lost).message


def test_first_node_that_names_no_port_and_starts_other_commands_is_checked(
    trained, rechecked, paths, monkeypatch
):
    launch = Program.launch

    def fails_once(program, start, placement, step):
        if not program.hosts:
            program.hosts.append(placement.hosts)
            raise slurm.NodeUnfit("node n1 cannot run python: no such file")
        return launch(program, start, placement, step)

    monkeypatch.setattr(Program, "launch", fails_once)
    checked = rechecked("python: no such file")
    program, record = trained(DONE)
    assert (record, checked) == (DONE, ["n1"])
    assert program.hosts == [("n1", "n2"), ("n2", "n3")]
    assert paths.bad_nodes.read_text().split()[0] == "n1"


FULL = RankRecord(
    "failed", 1, 69, cause="DiskFull", message="cannot write x: No space left on device"
)


def test_a_disk_that_is_full_for_a_while_costs_no_allocation(trained, monkeypatch, paths, capsys):
    pauses = []
    monkeypatch.setattr(train.time, "sleep", pauses.append)
    program, record = trained(FULL, DONE)
    assert record == DONE and pauses == [30]
    assert program.hosts == [("n1", "n2")] * 2
    assert "No space left on device; starting again in 30 s" in capsys.readouterr().err
    assert trained(FULL, FULL, FULL)[1] == FULL
    assert pauses == [30, 30, 120] and not paths.bad_nodes.exists()


def test_without_nodes_left_the_job_is_requeued(trained):
    program, record = trained(*(of_gpu(lost_ranks.GPU_FAULT, host) for host in ("n2", "n1")))
    assert program.hosts == [("n1", "n2"), ("n1", "n3")]
    assert record.status == "lost" and record.cause in requeue.REQUEUED_CAUSES


# --- fewer nodes (slurm.shrink) ------------------------------------------------------------------

SHRINK = {"slurm.shrink": True}


def faults(*hosts):
    return [of_gpu(lost_ranks.GPU_FAULT, host) for host in hosts]


def test_run_without_a_spare_resumes_on_as_many_nodes_as_share_the_batch_and_keeps_the_rest_as_spare(
    trained, capsys, paths
):
    six = {"layout": WorldLayout(6, 2), "of": 6}
    program, record = trained(*faults("n2", "n3", "n4"), DONE, **six, **{"slurm.shrink": True})
    assert record == DONE
    # 12 samples: 5 nodes of 2 ranks cannot share them, 3 can.
    assert program.hosts == [
        ("n1", "n2", "n3", "n4", "n5", "n6"),
        ("n1", "n3", "n4"),
        ("n1", "n4", "n5"),
        ("n1", "n5", "n6"),
    ]
    assert program.ranks == [12, 6, 6, 6]
    said = capsys.readouterr().err
    words = "on 3 of 6 nodes, 6 of 12 ranks (slurm.shrink); a requeue asks for all nodes again"
    assert said.count(words) == 1
    assert len(paths.bad_nodes.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("keys", "hosts"),
    [
        ({}, [("n1", "n2", "n3")]),
        (SHRINK, [("n1", "n2", "n3"), ("n1", "n3"), ("n1",)]),
        ({**SHRINK, "slurm.nodes_min": 2}, [("n1", "n2", "n3"), ("n1", "n3")]),
        ({"slurm.nodes_min": 1}, [("n1", "n2", "n3")]),
    ],
    ids=["without", "to the last", "to nodes_min", "nodes_min is for starts"],
)
def test_run_shrinks_down_to_the_fewest_nodes_and_is_then_requeued(trained, keys, hosts):
    program, record = trained(*faults("n2", "n3", "n1"), layout=WorldLayout(3, 1), **keys)
    assert program.hosts == hosts
    assert record.status == "lost" and record.cause in requeue.REQUEUED_CAUSES


def test_node_that_is_not_reached_is_done_without_and_is_not_excluded(trained, monkeypatch, paths):
    monkeypatch.setattr(train.nodes, "unresponsive", lambda hosts: ["n2"])
    facts = {"cause": lost_ranks.PEER_LOST, "message": "ranks lost each other"}
    told = RankRecord("lost", 0, 69, **facts, connected=("n1", "n2"))
    program, record = trained(told, DONE, of=2, **SHRINK)
    assert (program.hosts, record) == ([("n1", "n2"), ("n1",)], DONE)
    assert not paths.bad_nodes.exists()


def test_healthy_node_of_a_hung_rank_is_kept(trained, rechecked):
    rechecked("")
    program, record = trained(hung_on("n2"), DONE, of=2, **SHRINK)
    assert (program.hosts, record) == ([("n1", "n2")] * 2, DONE)


def test_ranks_lost_without_a_node_are_restarted_twice_on_each_number_of_nodes(trained):
    error = of_gpu(lost_ranks.GPU_ERROR)
    [fault] = faults("n2")
    program, record = trained(error, error, fault, error, error, error, of=2, **SHRINK)
    assert program.hosts == [("n1", "n2")] * 3 + [("n1",)] * 3
    assert record == error


def test_nodes_that_preflight_left_out_are_done_without(trained, paths):
    passed = PreflightPass(cluster="lab", job=JOB.id, host="n1", nodes=["n1", "n3"])
    paths.preflight_pass.parent.mkdir(parents=True)
    passed.write(paths.preflight_pass)
    three = {"layout": WorldLayout(3, 1), "of": 3}
    program, _ = trained(DONE, **three, **SHRINK)
    assert (program.hosts, program.ranks) == ([("n1", "n3")], [2])
    with pytest.raises(UnfitError, match="preflight passed n1, n3 of n1, n2, n3, training needs 3"):
        trained(DONE, **three)


@pytest.mark.parametrize(
    "of_job", [{}, {"job": "41"}, {"job": "42", "restart": 1}, {"job": "42", "cluster": "other"}]
)
def test_preflight_of_another_allocation_is_named_and_not_used(trained, paths, capsys, of_job):
    """Left by Ctrl-C: no command trained on other nodes any more."""
    passed = PreflightPass(**{"cluster": "lab", **of_job}, host="n8", nodes=["n8", "n9"])
    paths.preflight_pass.parent.mkdir(parents=True)
    passed.write(paths.preflight_pass)
    program, record = trained(DONE)
    assert (program.hosts, record) == ([("n1", "n2")], DONE)
    assert "preflight.json is not used: it is of " in capsys.readouterr().err


def test_launches_that_lose_ranks_are_counted_across_requeues(paths):
    for number in range(3):
        events.record(paths.events, happenings.launch(0, launch=f"l{number}"))
        events.record(paths.events, happenings.lost(LOST.message))
        events.record(paths.events, happenings.requeue(LOST.cause, 0))
    assert len(train.crash_loop.launches_without_progress(events.read(paths.events), 0)) == 3


def resolved(folder):
    """The config of a run of 100 steps in this folder."""
    (folder / "text.txt").write_text("some text")
    values = {"run": "base", "results": str(folder), "train": {"max_steps": 100}}
    values["tokenize"] = {"inputs": [str(folder / "text.txt")]}
    return resolve(checked(Config, values, "the test"))


def test_job_that_no_rank_was_started_for_is_not_said_to_have_lost_ranks(
    trained, paths, monkeypatch
):
    """Where the requeue fails, too: it was told that the system had killed them."""

    def launch(*_):
        raise slurm.silent("srun: error: Unable to contact slurm controller")

    monkeypatch.setattr(Program, "launch", launch)
    program, record = trained()
    program.config = resolved(paths.root)
    with pytest.raises(UnfitError) as caught:
        train._conclude(program, record, None)
    assert caught.value.what.startswith("no rank was started: Slurm does not answer: srun: error")
    assert "ask `sinfo`" in str(caught.value) and "lost" not in str(caught.value)


@pytest.mark.parametrize(
    ("since", "is_complete"),
    [
        ([], True),
        ([happenings.launch(100), happenings.init(100)], True),  # it was still there
        ([happenings.launch(0), happenings.init(0)], False),
        ([happenings.launch(100), happenings.init(50)], False),  # ranks found step 100 corrupt
        ([happenings.launch(0), happenings.completed(100)], True),
    ],
)
def test_digest_of_weights_that_were_trained_again_is_not_that_of_the_training_before(
    tmp_path, since, is_complete
):
    """Killed between the commit and the event: trained.json had the digest of other weights."""
    program = program_of(resolved(tmp_path))
    for event in [happenings.launch(0), happenings.completed(100), *since]:
        events.record(program.paths.events, event)
    assert program.is_complete(100) == is_complete


def test_ranks_that_were_killed_before_their_last_save_are_reported():
    killed = RankRecord("stopped", cause="SIGTERM", lost=(1,))
    assert "rank 1 ended without a final checkpoint" in train._what_is_kept(killed, 400)
    assert "the steps after 400 are lost" in train._what_is_kept(killed, 400)
    assert train._what_is_kept(RankRecord("stopped"), 400) == "a checkpoint is committed"
    assert train._what_is_kept(RankRecord("stopped"), 400, 400) == "nothing had been trained yet"
