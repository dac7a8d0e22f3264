"""The subcommand: its output and files, which nodes train or are left out, what a restart may skip."""

import csv
import json
from dataclasses import replace

import pytest
from support import happenings

from forge.core import events, json_lines
from forge.core.config import Ids, load_config
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.core.paths import RunPaths, tokens_folder
from forge.core.process import hostname
from forge.core.records import Check, StageRecord
from forge.data.content_ids import resolve
from forge.hosts.placement import Placement, WorldLayout
from forge.launch.rank_records import ProbedRank, ProbeResult, RankRecord
from forge.preflight import compare_nodes, isolate, preflight
from forge.preflight.bisection import SearchResult
from forge.preflight.compare_nodes import CheckedNode
from forge.preflight.node_checks import ComparedFacts
from forge.slurm import exclude
from forge.slurm.slurm import Job

IDS = Ids(tokenizer="a" * 12, tokens="b" * 12)
MODEST = {"preflight.min_free_disk_gib": 0, "preflight.min_free_memory_gib": 0}


@pytest.fixture
def config(tmp_path):
    folders = {"results": str(tmp_path / "results"), "data": str(tmp_path / "data")}
    config = resolve(load_config("/dev/null", {**folders, "train.batch_size": 24, "ids": IDS}))
    tokens = tokens_folder(config.data, IDS.tokens)
    tokens.mkdir(parents=True)
    (tokens / "manifest.json").write_text("{}")
    RunPaths.of(config).root.mkdir(parents=True)
    return config


@pytest.fixture
def paths(config):
    return RunPaths.of(config)


def result(**changes):
    rank = ProbedRank(0, 0, "n1", "cpu", {"torch": "2"}, False, "", 0.05, [])
    ranks = [rank, replace(rank, rank=1, local_rank=1)]
    return replace(ProbeResult(ranks, "gloo", "eth7", True, 40.2, 3.456), **changes)


# --- one node -------------------------------------------------------------------------------------


def check(config, monkeypatch, record=None, ranks=2, **limits):
    """The subcommand with ranks that end with `record`; how many times they were launched."""
    starts = []

    def run_ranks(*_, **options):
        starts.append(options)
        return record or RankRecord("completed", result=result())

    monkeypatch.setattr(isolate, "run_ranks", run_ranks)
    keys = {**MODEST, "launcher": "torchrun", "preflight.min_open_files": 0, **limits}
    try:
        preflight.preflight(config, load_machine(None, keys), WorldLayout(1, ranks))
    finally:
        assert len(starts) <= 1
    return starts


def table(paths):
    with open(paths.preflight_table, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_pass_is_written_as_table_json_and_workflow_output(config, paths, monkeypatch):
    starts = check(config, monkeypatch, **{"preflight.deadline_sec": 7})
    assert [start["deadline_sec"] for start in starts] == [7]
    summary = json.loads(paths.preflight.read_text())
    assert summary["status"] == "ok"
    assert summary["ranks"]["world_size"] == 2
    assert [row["status"] for row in table(paths) if row["status"] == "fail"] == []
    assert [row["name"] for row in table(paths) if row["where"] == "ranks"] == [
        *("mapping", "rendezvous", "versions", "all-reduce"),
    ]
    assert json.loads(paths.preflight_pass.read_text()) == {
        "format": 1,
        "cluster": None,
        "job": None,
        "restart": 0,
        "host": hostname(),
        "nodes": [hostname()],
    }
    assert len(list(paths.logs.glob("preflight.local.*.json"))) == 1


def test_unfit_node_starts_no_ranks_and_still_leaves_its_table(config, paths, monkeypatch):
    with pytest.raises(UnfitError, match=r"disk: .* needed") as caught:
        check(config, monkeypatch, **{"preflight.min_free_disk_gib": 1e9})
    assert str(paths.preflight_table) in caught.value.fix
    assert [row["name"] for row in table(paths) if row["status"] == "fail"] == ["disk"]
    summary = json.loads(paths.preflight.read_text())
    assert (summary["status"], summary["ranks"]["checks"]) == ("failed", [])
    event = json_lines.read(paths.events)[-1]
    assert (event["event"], event["status"], event["failed"]) == ("preflight", "failed", ["disk"])


def test_failure_takes_back_an_earlier_pass(config, paths, monkeypatch):
    check(config, monkeypatch)
    with pytest.raises(UnfitError):
        check(
            config,
            monkeypatch,
            record=RankRecord("completed", result=result(all_reduce_right=False)),
        )
    assert not paths.preflight_pass.exists()
    assert json.loads(paths.preflight.read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            RankRecord("lost", message="rank 1 of 2 exited without a record"),
            "rendezvous: rank 1 of 2 exited without a record",
        ),
        (RankRecord("failed", 1, 69, message="no route to host"), "rendezvous: no route to host"),
    ],
)
def test_ranks_that_cannot_rendezvous_fail_and_name_their_logs(
    config, paths, monkeypatch, record, message
):
    with pytest.raises(UnfitError, match=message) as caught:
        check(config, monkeypatch, record=record)
    assert str(paths.logs) in caught.value.fix


def test_layout_that_the_launcher_cannot_give_is_refused_first(config, monkeypatch):
    with pytest.raises(ConfigError, match="5 ranks"):
        check(config, monkeypatch, ranks=5, **{"launcher": "single"})


# --- an allocation --------------------------------------------------------------------------------


NAMES = ("n1", "n2", "n3", "n4")
DOWN = Check("answers", "fail", "its process ended", "see that it is up", "it is down")
GOOD = [Check("mapping", "ok", "world"), Check("all-reduce", "ok", "40 µs")]
HANG = [Check("rendezvous", "fail", "large all-reduce took longer than 10 s")]


class Nodes:
    """A fake allocation: which nodes are down, and which ranks fail together."""

    def __init__(self, monkeypatch, config):
        self.config, self.down, self.broken = config, {}, None
        self.probed, self.restart, self.versions = [], 0, {"python": "3.11", "torch": "2.13"}
        self.has_time, self.endpoint = True, []
        self.warm, self.boots, self.names = [], {}, NAMES
        monkeypatch.setattr(preflight, "find_placement", lambda *_: self.placement)
        monkeypatch.setattr(compare_nodes, "inspect", self.inspect)
        monkeypatch.setattr(preflight, "Prober", lambda *_, **__: self)

    @property
    def placement(self):
        job = Job("7", "RUNNING", self.restart, self.names, 1, "main", "forge", True, None)
        return Placement(self.names, job)

    def inspect(self, placement, wanted, machine, *, sec, python, is_warm):
        self.warm = [name for name in NAMES if is_warm(name, self.facts(name))]
        assert set(wanted) == set(placement.hosts)
        alone = len(placement.hosts) == 1  # its ranks meet at the loopback address
        assert {w.master for w in wanted.values()} == {"" if alone else placement.hosts[0]}
        return [
            CheckedNode(name, [self.down[name]])
            if name in self.down
            else CheckedNode(name, [Check("project", "ok", "")], self.facts(name))
            for name in placement.hosts
        ]

    def facts(self, name):
        return ComparedFacts(
            **{
                "versions": self.versions,
                "address": name,
                "master_trouble": "",
                "infiniband": False,
            },
            **{"ports": {}, "gpus": 0, "driver": "", "exported": {}, "bytes_per_sec": None},
            boot=self.boots.get(name, "boot 1"),
        )

    def bad(self, hosts):
        gone = {*self.broken.nodes, *(two for _, two in self.broken.pairs)} if self.broken else ()
        return set(hosts) & set(gone)

    # The methods of Prober.
    def together(self, hosts):
        self.probed.append(list(hosts))
        return self.endpoint or (HANG if self.bad(hosts) else GOOD)

    trials = "trials"

    def search(self, hosts):
        return self.broken

    def known(self, hosts):
        return None

    def reason(self, *hosts):
        return "too slow"

    def run(self, nodes=4, **limits):
        machine = load_machine(None, {"launcher": "srun", **limits})
        preflight.preflight(self.config, machine, WorldLayout(nodes, 1))
        return json.loads(RunPaths.of(self.config).preflight_pass.read_text())["nodes"]


@pytest.fixture
def nodes(monkeypatch, config):
    return Nodes(monkeypatch, config)


def event(paths):
    return [e for e in json_lines.read(paths.events) if e["event"] == "preflight"][-1]


def test_all_healthy_nodes_train_and_the_record_is_named_by_job_and_restart(nodes, paths):
    assert nodes.run() == list(NAMES)
    assert nodes.probed == [list(NAMES)]
    assert (event(paths)["nodes"], event(paths)["left_out"]) == (list(NAMES), {})
    assert (paths.logs / "preflight.7.0.json").exists()


def test_only_node_of_a_job_elsewhere_needs_no_address_for_others(nodes):
    """As where the shell of salloc runs on a login node."""
    nodes.names = ("n1",)
    assert nodes.run(1) == ["n1"]


def test_time_that_preflight_may_take_is_printed_in_a_job(nodes, capsys):
    nodes.run(2)
    assert (
        "preflight of 4 ranks on 4 nodes takes 47 s for the nodes, 5 min for their import of torch and"
        " 1 min 34 s for the ranks at most; 1 min 34 s more if those fail"
    ) in capsys.readouterr().err


def test_unfit_node_is_replaced_by_a_spare_and_not_excluded(nodes, paths, capsys):
    nodes.down = {"n2": DOWN}
    assert nodes.run(3) == ["n1", "n3", "n4"]
    assert event(paths)["left_out"] == {"n2": "answers: its process ended"}
    assert "training gets n1, n3, n4; unhealthy: n2" in capsys.readouterr().err
    assert not paths.bad_nodes.exists()


def test_more_spares_than_needed_are_checked_and_may_take_over_later(nodes, paths):
    assert nodes.run(2) == list(NAMES)
    assert event(paths)["nodes"] == ["n1", "n2"]
    assert nodes.probed == [list(NAMES)]


def test_too_few_healthy_nodes_name_all_that_are_not(nodes, paths, capsys):
    """Also those that only the ranks of the other nodes show."""
    nodes.down, nodes.broken = {"n2": DOWN}, SearchResult(nodes=["n4"])
    with pytest.raises(UnfitError, match="2 of 4 nodes are healthy, base needs 4") as caught:
        nodes.run()
    assert nodes.probed == [["n1", "n3", "n4"]]
    assert "n2: answers: its process ended" in str(caught.value)
    assert "n4: collectives: too slow" in str(caught.value)
    assert "it is down" in caught.value.cause
    assert "see that it is up" in caught.value.fix
    assert exclude.read(paths.bad_nodes) == ["n2", "n4"]
    assert "cause: it is down   fix: see that it is up" in capsys.readouterr().err


def test_with_shrink_as_many_healthy_nodes_as_share_the_batch_train_and_the_others_are_excluded(
    nodes, paths, capsys
):
    nodes.down = {"n2": DOWN}
    assert nodes.run(**{"slurm.shrink": True}) == ["n1", "n3", "n4"]
    assert event(paths)["nodes"] == ["n1", "n3", "n4"]  # 24 samples
    assert "training gets n1, n3, n4; unhealthy: n2" in capsys.readouterr().err
    assert json.loads(paths.preflight.read_text())["ranks"]["world_size"] == 3
    assert exclude.read(paths.bad_nodes) == ["n2"]


@pytest.mark.parametrize(("down", "fewest"), [(("n2", "n3"), 1), (("n2",), 4)])
def test_with_shrink_half_of_the_nodes_or_fewer_than_nodes_min_are_too_few(nodes, down, fewest):
    nodes.down = dict.fromkeys(down, DOWN)
    with pytest.raises(UnfitError, match=f"{4 - len(down)} of 4 nodes are healthy, base needs 4"):
        nodes.run(**{"slurm.shrink": True, "slurm.nodes_min": fewest})


def test_endpoint_that_cannot_work_is_no_fault_of_a_node(nodes, paths):
    nodes.endpoint = [Check("endpoint", "fail", "port 29500 is in use on n1", "unset MASTER_PORT")]
    nodes.broken = SearchResult(nodes=["n4"])  # what a search would find
    with pytest.raises(UnfitError, match="port 29500 is in use on n1") as caught:
        nodes.run()
    assert "unset MASTER_PORT" in caught.value.fix
    assert event(paths)["left_out"] == {} and not paths.bad_nodes.exists()


def test_after_a_search_the_rest_is_tried_together_before_it_trains(nodes):
    nodes.broken = SearchResult(pairs=[("n1", "n3")])
    assert nodes.run(3) == ["n1", "n2", "n4"]
    assert nodes.probed == [list(NAMES), ["n1", "n2", "n4"]]


def test_of_two_that_fail_together_without_a_third_neither_is_excluded(nodes, paths):
    nodes.down = {"n3": DOWN, "n4": DOWN}
    nodes.broken = SearchResult(unclear=[("n1", "n2")])
    nodes.bad = lambda hosts: {"n1", "n2"} <= set(hosts)
    with pytest.raises(UnfitError, match="a third node would tell which"):
        nodes.run(2)
    assert exclude.read(paths.bad_nodes) == ["n3", "n4"]


def test_when_time_runs_out_the_nodes_in_doubt_are_named(nodes, paths):
    nodes.broken, nodes.has_time = SearchResult(among=("n3", "n4"), probes=5), False
    nodes.bad = lambda hosts: True
    with pytest.raises(UnfitError, match="after 5 trials; the fault is among n3, n4"):
        nodes.run()
    assert not paths.bad_nodes.exists()


def test_failure_that_does_not_repeat_is_tried_once_more(nodes):
    nodes.broken = SearchResult(among=NAMES, probes=3)
    nodes.bad = lambda hosts: len(nodes.probed) == 1
    assert nodes.run() == list(NAMES)


@pytest.mark.parametrize(
    ("down", "broken", "trouble"),
    [
        ({}, None, ""),
        ({"n3": DOWN}, None, "answers: its process ended"),
        ({}, SearchResult(nodes=["n3"]), "rendezvous: "),
    ],
)
def test_node_of_a_running_job_is_checked_alone_with_its_own_ranks(
    nodes, config, down, broken, trouble
):
    nodes.down, nodes.broken = down, broken
    machine, layout = load_machine(None, {"launcher": "srun"}), WorldLayout(4, 1)
    found = preflight.recheck(config, machine, layout, nodes.placement.only(["n3"]), StageRecord())
    assert list(found) == ["n3"] * bool(trouble)
    assert found.get("n3", "").startswith(trouble)
    assert nodes.probed == ([] if down else [["n3"]])


def test_nodes_of_a_running_job_are_searched_for_the_one_at_fault(nodes, config):
    machine, layout = load_machine(None, {"launcher": "srun"}), WorldLayout(2, 1)
    three = nodes.placement.only(["n1", "n2", "n3"])
    assert preflight.recheck(config, machine, layout, three, StageRecord()) == {}
    nodes.broken = SearchResult(nodes=["n3"])
    found = preflight.recheck(config, machine, layout, three, StageRecord())
    assert found == {"n3": "collectives: too slow"}
    assert nodes.probed[0] == ["n1", "n2", "n3"]


@pytest.mark.parametrize(("num_nodes", "num_lines"), [(16, 16), (17, 1)])
def test_many_healthy_nodes_share_one_line(config, capsys, num_nodes, num_lines):
    some = [CheckedNode(f"n{n:02}", [Check("data", "ok", "")]) for n in range(num_nodes)]
    odd = CheckedNode("n99", [Check("clock", "warn", "8 s ahead")])
    place, layout, machine = Placement(NAMES), WorldLayout(1), load_machine(None)
    identity = preflight._identity(place, layout, [odd, *some], machine, {})
    found = preflight.Findings(config, machine, place, layout, [odd, *some], identity)
    preflight._print_summary(found)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("NODE n")]
    assert len(lines) == num_lines + 1
    assert lines[-1].startswith("NODE n99")
    assert ("17 nodes like this" in lines[0]) == (num_lines == 1)


# --- a restart ------------------------------------------------------------------------------------


def test_restart_with_the_same_nodes_skips_the_ranks_and_says_so(nodes, paths, capsys):
    nodes.run()
    nodes.restart = 1
    assert nodes.run() == list(NAMES)
    assert len(nodes.probed) == 1
    text = "the same nodes, shards and versions passed in start 0 of job 7"
    assert f"RANKS skipped: {text}" in capsys.readouterr().err
    assert (paths.logs / "preflight.7.1.json").exists()


@pytest.mark.parametrize("change", ["versions", "boot", "lost rank", "failed before", "no restart"])
def test_ranks_are_checked_again_where_anything_may_have_changed(nodes, paths, change):
    if change == "failed before":
        nodes.down = {"n2": DOWN}
        with pytest.raises(UnfitError):
            nodes.run()
        nodes.down = {}
    else:
        nodes.run()
    nodes.restart = 0 if change == "no restart" else 1
    if change == "versions":
        nodes.versions = {"python": "3.11", "torch": "2.14"}
    if change == "boot":
        nodes.boots = {"n2": "boot 2"}
    if change == "lost rank":
        events.record(paths.events, happenings.lost("rank 1 of 2 exited without a record"))
    nodes.run()
    several = ["n1", "n2", "n3"] if change == "boot" else list(NAMES)
    assert nodes.probed[1:] == [several]
    warm = {"boot": ["n1", "n3", "n4"], "lost rank": list(NAMES)}
    assert nodes.warm == warm.get(change, [])


@pytest.mark.parametrize("new", [NAMES[1], NAMES[3]])
def test_new_node_is_checked_with_ranks_of_two_that_passed_before(nodes, capsys, new):
    nodes.names = tuple(name for name in NAMES if name != new)
    nodes.run(3)
    nodes.names, nodes.restart = NAMES, 1
    assert nodes.run() == list(NAMES)
    assert nodes.probed[1:] == [["n1", *(["n2", "n3"] if new == "n2" else ["n2", "n4"])]]
    said = capsys.readouterr().err
    names = ", ".join(nodes.probed[1])
    assert f"RANKS of {names} only: all others passed in start 0 of job 7" in said
    assert "RANKS world; all-reduce 40 µs" in said


def test_all_ranks_are_checked_where_a_new_node_fails_with_some(nodes):
    nodes.names = NAMES[:3]
    nodes.run(3)
    nodes.names, nodes.restart, nodes.broken = NAMES, 1, SearchResult(nodes=["n4"])
    with pytest.raises(UnfitError, match="3 of 4 nodes are healthy"):
        nodes.run()
    assert nodes.probed[1:] == [["n1", "n2", "n4"], list(NAMES)]


def test_lost_node_is_checked_once_it_is_back_and_no_other_is_in_doubt(nodes, paths):
    nodes.run()
    lost = happenings.lost("n3 starts no process").model_copy(update={"silent": ["n3"]})
    events.record(paths.events, lost)
    nodes.restart = 1
    nodes.run()
    assert nodes.probed[1:] == [["n1", "n2", "n3"]]
    assert nodes.warm == list(NAMES)


def test_only_nodes_that_changed_import_torch_again_after_a_restart(nodes):
    """On the same nodes their import took more than a second of a start of ten."""
    nodes.run()
    assert nodes.warm == []
    nodes.restart = 1
    nodes.run()
    assert nodes.warm == list(NAMES)
