"""The job of reproduce_run: what it asks Slurm for, and on which nodes it runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.core import events
from forge.core.config import Config, Ids, checked
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.data.content_ids import resolve
from forge.flow import resources
from forge.hosts.placement import WorldLayout
from forge.plugins.attestation import flow

ALLOCATION = SimpleNamespace(
    machine=Machine(slurm={"exclude": ["n8"]}),
    resources=lambda name: {"slurm_partition": "gpu", "gres": "gpu:2", "nodes": 2, "machine": "x"},
    layout=lambda name: WorldLayout(2, 2),
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    return resolve(checked(Config, {"tokenize": {"inputs": ["text.txt"]}}, "the test"))


def extra_of(run, monkeypatch, *, submits=True, trained=("n1", "n2"), **of_profile):
    """slurm_extra of a run that these nodes have trained, and the request by which others were sought."""
    asked = []

    def avoid(request, nodes):
        asked.append(request)
        return sorted(nodes)

    monkeypatch.setattr(flow.submission, "nodes_to_avoid", avoid)
    RunPaths.of(run).root.mkdir(parents=True, exist_ok=True)
    launch = {"launch": "a", "world_size": 2, "launcher": "srun", "host": "n1", "step": 0}
    if trained:
        events.record(RunPaths.of(run).events, events.Launch(**launch, nodes=list(trained)))
    settings = SimpleNamespace(
        default_resources={"slurm_partition": "cpu", "slurm_extra": "'--exclude=n9 --nice'"},
        overwrite_resources={"reproduce_run": of_profile},
    )
    monkeypatch.setattr(flow, "mem_mb", lambda *_: 3000)
    command = SimpleNamespace(
        **{"runs": {run.run: run}, "allocation": ALLOCATION, "resource_settings": settings},
        submits=submits,
    )
    return flow.slurm_extra(command, run.run, 2), asked


def test_reproduction_is_on_nodes_of_the_kind_that_trained_and_on_none_of_these(run, monkeypatch):
    RunPaths.of(run).root.mkdir(parents=True)
    RunPaths.of(run).bad_nodes.write_text("n7\n")
    extra, [asked] = extra_of(run, monkeypatch)
    assert extra == "--exclude=n9,n8,n7,n1,n2 --nice"
    assert (asked.partition, asked.gpus, asked.cpus, asked.mem_mb) == ("gpu", ("", 2), 2, 3000)
    assert asked.nodes == 1 and asked.excluded == {"n7", "n8", "n9"}
    _, [asked] = extra_of(run, monkeypatch, slurm_partition="other", mem_mb=9)
    assert (asked.partition, asked.mem_mb) == ("other", 9)


def test_reproduction_asks_slurm_for_no_nodes_before_the_run_has_trained_or_without_slurm(
    run, monkeypatch
):
    assert extra_of(run, monkeypatch, trained=()) == ("--exclude=n9,n8 --nice", [])
    assert extra_of(run, monkeypatch, submits=False) == ("", [])


def test_time_limit_of_a_reproduction_is_that_of_the_profile_also_as_a_formula():
    def made(defaults):
        settings = SimpleNamespace(default_resources=defaults)
        allocation = SimpleNamespace(of_nodes={"slurm_partition": "gpu"})
        return flow.resources(SimpleNamespace(allocation=allocation, resource_settings=settings))

    assert made({"runtime": "attempt * 60"}) == {"slurm_partition": "gpu"}
    assert made(None) == {"slurm_partition": "gpu", "runtime": flow.LIMIT_MIN}


def test_memory_of_a_reproduction_is_that_of_all_ranks(run):
    two, four = (memory(run, {}, n) for n in (2, 4))
    assert 2000 < two < four and four == pytest.approx(2 * two, abs=1)
    assert memory(run, {"mem_mb": 10**6}, 2) == 10**6


def memory(run, defaults, nodes, mem_mb=3000):
    """Of a run that so many nodes with one rank each train, by these default-resources."""
    allocation = SimpleNamespace(
        layout=lambda run: WorldLayout(nodes, 1), resources=lambda run: {"mem_mb": mem_mb}
    )
    settings = SimpleNamespace(default_resources=defaults)
    command = SimpleNamespace(
        runs={run.run: run}, allocation=allocation, resource_settings=settings
    )
    return flow.mem_mb(command, run.run)


def test_memory_of_a_programs_reproduction_is_that_of_all_nodes_of_its_training(run):
    program = run.model_copy(update={"ids": Ids()})
    assert memory(program, {"mem_mb": 1000}, 4) == 12000
    assert memory(program, {}, 4, "attempt * 1000") == resources.PROGRAM_MB
