"""Threat: a run that trains on nodes that nobody staged or checked, or on none for ever, since records of
an earlier allocation are still there: after Ctrl-C, a killed Snakemake, or the target `preflight`."""

from __future__ import annotations

import json

from support.clone import Project, kill_tree, started_rules, wait

OF_ALLOCATION = ["stage_run", "preflight_run", "train_run"]


def of_allocation(output: str) -> list[str]:
    return [rule for rule in started_rules(output) if rule in OF_ALLOCATION]


def test_target_preflight_checks_again_each_time_and_train_checks_its_own_nodes(
    project: Project,
) -> None:
    project.one_rank()
    record = project.path(".allocation/preflight.json")
    for _ in range(2):
        code, output = project.snakemake("preflight")
        assert code == 0, output
        assert of_allocation(output) == OF_ALLOCATION[:2], output
    record.write_bytes(record.read_bytes()[:20])  # cut short by a full disk, or a power failure
    before = record.read_bytes()
    code, output = project.snakemake("-n", "train")
    assert code == 0 and "without -n also stage_run and preflight_run of base: " in output, output
    assert record.read_bytes() == before, "a dry run writes nothing"
    code, output = project.snakemake("train")
    assert code == 0, output
    assert of_allocation(output) == OF_ALLOCATION


def test_run_killed_on_another_machine_is_staged_checked_and_resumed_on_this_one(
    project: Project,
) -> None:
    project.one_rank()
    project.write_config(train={"max_steps": 400, "checkpoint_every": 4})
    process = project.start("train")
    wait(lambda: project.path("checkpoints/latest").exists() or process.poll() is not None)
    kill_tree(process.pid)
    process.communicate()
    wait(lambda: not project.processes(), 60)
    record = project.path(".allocation/preflight.json")
    said = json.loads(record.read_text())
    record.write_text(json.dumps(said | {"host": "elsewhere", "nodes": ["elsewhere"]}))
    project.write_config(train={"max_steps": project.steps() + 8, "checkpoint_every": 4})
    code, output = project.snakemake("train")
    assert code == 0, output
    assert of_allocation(output) == OF_ALLOCATION
    assert "resume from" in output
