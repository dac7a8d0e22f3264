"""The workflow on a cluster: one command from the login node, and what people and clusters do to it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.user_snakefile import WITH_OWN_RULES

from forge.core.files import read_json
from forge.core.train_settings import Train
from tools.slurm_cluster.cluster import Cluster

from .job_run import GOAL, TINY_CONFIG, Uninterrupted
from .project import Project

Nodes = Callable[[int], list[str]]
NewProject = Callable[..., Project]
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"


def test_raw_text_becomes_a_validated_checkpoint_on_several_nodes_beside_a_run_that_fails(
    new_project: NewProject, shared_folder: Path, uninterrupted: Uninterrupted
) -> None:
    few = TINY_CONFIG["train"] | {"max_steps": 20}
    project = new_project(
        name="o dd;'q & project",  # quoted by Snakemake, its plugin, sbatch and the shells of a job
        values={"data": str(shared_folder / "da ta"), "validate": {}, "train": few},
    )
    # Snakemake delivers texts; the job must get them as numbers, too.
    goal = ("--config", f"train={{max_steps: {GOAL}}}")
    sheet = project.folder / "config/runs.tsv"
    sheet.write_text(f"run\ttrain.lr\tnodes\nbad\t1e30\t1\nbase\t{Train().lr}\t\n")
    assert project.end(project.start("train", *goal)) != 0
    bad, base = project.run("bad"), project.run()
    assert bad.events("failed") and not bad.paths.trained.exists()
    assert read_json(base.paths.validated)["status"] == "valid", project.said()
    assert base.paths.report.exists()
    said = project.output()
    for name in ("base", "bad"):
        submitted = rf" allocation-{name}: submitted with SLURM jobid \d+ \(log: (.*)\)\."
        [log] = re.findall(submitted, said)
        in_job = Path(log).read_text()
        started = re.findall(rf"^{TIME} (\w+) {name}: started", in_job, re.MULTILINE)
        done = re.findall(rf"^{TIME} (\w+) {name}: done", in_job, re.MULTILINE)
        assert started == ["stage_run", "preflight_run", "train_run"]
        assert done == started[: 3 if name == "base" else 2]
        assert "    resources: " not in in_job + said
        assert (f" allocation-{name}: done (" in said) == (name == "base")
    error = said.partition("message: Error in group allocation-bad")[2]
    # In Slurm's log and in that of training.
    assert "log: results/bad/logs/train.log" in error and error.count("are not finite") >= 2, said
    jobs = {run.events("launch")[-1]["job"] for run in (bad, base)}
    assert len(jobs) == 2  # two runs on the same data are two jobs
    assert [len(run.events("launch")[-1]["nodes"]) for run in (bad, base)] == [1, 2]
    uninterrupted.equals(base)
    [job] = {event["job"] for event in base.events("launch")}
    ranks = sorted(path.name for path in base.paths.logs.glob(f"{job}.0.node*.log"))
    assert [name.rsplit(".", 2)[1] for name in ranks] == ["0", "1"]
    sheet.write_text("run\nbase\n")
    assert project.end(project.start("train", *goal)) == 0
    assert "Nothing to be done" in project.output()


@pytest.mark.weekly
def test_module_beside_rules_of_the_user_trains_by_the_profile(
    new_project: NewProject, uninterrupted: Uninterrupted
) -> None:
    """Their jobs read the user's Snakefile again, in which a rule stands before Forge's."""
    project = new_project(values={"validate": {}})
    shutil.rmtree(project.folder / "workflow")
    (project.folder / "workflow").mkdir()
    (project.folder / "workflow/Snakefile").write_text(WITH_OWN_RULES)
    assert project.end(project.start("all")) == 0, project.said()
    base = project.run()
    assert read_json(base.paths.validated)["status"] == "valid", project.said()
    assert (project.folder / "plots/base.svg").stat().st_size
    uninterrupted.equals(base)
    assert len(base.events("launch")[-1]["nodes"]) == 2, "nodes of the profile"
    assert {"plot", "all"} <= set(re.findall(r"^\S+ (\w+)\b.*: done", project.output(), re.M))


@pytest.mark.weekly
def test_validations_of_an_array_are_each_of_its_own_run(new_project: NewProject) -> None:
    project = new_project()
    (project.folder / "config/runs.tsv").write_text("run\tnodes\none\t1\ntwo\t1\n")
    assert project.end(project.start("train", "--until", "train_run")) == 0, project.said()
    command = project.start("train", "--forge-array-jobs=validate_run")  # both are due at once
    assert project.end(command) == 0, project.said()
    assert "Submitted array job" in project.output()
    records = [read_json(project.run(name).paths.validated) for name in ("one", "two")]
    assert [record["status"] for record in records] == ["valid", "valid"]
    assert len({record["checkpoint_digest"] for record in records}) == 2


def test_cluster_that_slurm_does_not_know_is_refused_by_name_before_anything_is_submitted(
    new_project: NewProject,
) -> None:
    project = new_project(on=1)
    assert project.end(project.start(env={"SLURM_CLUSTERS": "other"})) != 0
    assert "is 'other': scontrol: error: No cluster 'other'" in project.output(), project.said()
    assert project.submitted() == []


@pytest.mark.weekly
def test_job_preempted_before_it_trains_is_waited_for(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    # No GraceTime: Slurm's signal finds no step yet, and a fast machine would be done before Slurm kills.
    project = new_project(on=1, train_run={"slurm_partition": "lownow"})
    command = project.start()
    run = project.run()
    [host] = set(cluster.nodes) - set(project.excluded())
    job = project.wait_for_job()
    cluster.wait_for_state(job, "RUNNING")
    cluster.submit(  # takes the node at once, while the job stages, tests or starts ranks
        *("--partition=high", "--exclusive", f"--nodelist={host}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    assert project.end(command) == 0, project.said()
    assert int(cluster.job(job)["Restarts"]) == 1, project.said()
    uninterrupted.equals(run)


def test_kempner_profile_runs_with_only_partition_gpus_and_backend_changed(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """And on the nodes of the command, which the Snakemake inside the job knows as well, with further
    options for sbatch."""
    project = new_project(
        profile="kempner",
        train_run={"gres": "gpu:1", "nodes": 1},
        machine={
            "fabric": {"backend": "gloo", "timeout_sec": 60},
            "preflight": {"min_free_disk_gib": 1, "min_free_memory_gib": 1},
            "slurm": {"options": "--switches=1@2"},
        },
    )
    assert project.end(project.start("train", "--config", "nodes=2")) == 0, project.said()
    assert "1 run to train on 2 nodes x 1 GPU: at most " in project.said()
    uninterrupted.equals(project.run())
    [launch] = project.run().events("launch")
    assert (len(launch["nodes"]), launch["world_size"]) == (2, 2)
    assert cluster.job(launch["job"])["Switches"] == "1@00:02:00"
    written = project.run().paths.monitor.glob("*.jsonl")
    assert sorted(path.stem for path in written) == sorted(launch["nodes"])


@pytest.mark.weekly
def test_one_rank_on_one_node_is_no_special_case_for_a_profile_that_stages(
    new_project: NewProject, uninterrupted: Uninterrupted
) -> None:
    project = new_project(
        on=1,
        profile="ethernet",
        train_run={"gres": "gpu:1"},
        machine={"fabric": {"backend": "gloo", "timeout_sec": 60}},
    )
    assert project.end(project.start()) == 0, project.said()
    assert read_json(project.run().paths.validated)["status"] == "valid"
    assert [launch["world_size"] for launch in project.run().events("launch")] == [1]
    uninterrupted.equals(project.run())


@pytest.mark.weekly
def test_steps_are_trained_again_on_another_node_than_those_that_trained(
    new_project: NewProject, cluster: Cluster
) -> None:
    """One command: which nodes will have trained is not known when it starts."""
    few = TINY_CONFIG["train"] | {"max_steps": 20}
    project = new_project(on=3, values={"train": few})
    assert project.end(project.start("reproduce")) == 0, project.said()
    run = project.run()
    [launch] = run.events("launch")
    job = cluster.job(project.submitted()[-1])
    assert (len(launch["nodes"]), job["NumNodes"], job["NumCPUs"]) == (2, "1", "2")
    assert {job["NodeList"]} == set(cluster.nodes[:3]) - set(launch["nodes"])
    record = read_json(run.paths.root / "reproduced.json")
    made = read_json(run.folder / record["file"])["predicate"]
    assert made["by"]["machine"] == "another"
    assert [one["outcome"] for one in made["intervals"]] == ["bitwise"]


def test_interactive_profile_trains_inside_an_allocation(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(profile="interactive")
    # As shipped, it has no nodes and ranks: those of the allocation are taken.
    profile = project.profile_folder / "config.yaml"
    values = yaml.safe_load(profile.read_text())
    del values["set-resources"]
    profile.write_text(yaml.safe_dump(values))
    others = project.excluded()
    command = cluster.popen(
        *("salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1800", "--time=10"),
        *([f"--exclude={','.join(others)}"] if others else []),
        *("snakemake", "--profile", "profiles/interactive", "train"),
        cwd=project.folder,
    )
    out, _ = command.communicate(timeout=400)
    assert command.returncode == 0, out + project.said()
    uninterrupted.equals(project.run())
    [launch] = project.run().events("launch")
    assert (len(launch["nodes"]), launch["world_size"]) == (2, 2)
    assert project.run().paths.report.exists()


@pytest.mark.parametrize(
    ("section", "wrong", "told"),
    [
        ("default-resources", {"slurm_account": "EDIT_account"}, ["still says slurm_account"]),
        ("default-resources", {"slurm_account": "nobody"}, ["slurm_account nobody"]),
        # The partition of the rules without an allocation: told before the training, not after it.
        ("default-resources", {"slurm_partition": "nope"}, ["start rule validate_run: sbatch"]),
        ("train_run", {"nodes": 50}, ["50 nodes, it gives 6 (TotalNodes)"]),
        (
            "train_run",
            {"runtime": 220, "mem_mb": 6000},
            ["set runtime: 40 or less", "6000 MB a node, 2 of its nodes have 5000"],
        ),
        ("train_run", {"task_per_node": 2}, ["did you mean tasks_per_node?"]),
    ],
)
def test_profile_that_cannot_work_is_refused_before_anything_is_submitted(
    new_project: NewProject, section: str, wrong: dict[str, Any], told: list[str]
) -> None:
    # A batch that also 50 ranks can share.
    project = new_project(on=0, values={"train": {**TINY_CONFIG["train"], "batch_size": 100}})
    path = project.profile_folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    (values["set-resources"]["train_run"] if section == "train_run" else values[section]).update(
        wrong
    )
    path.write_text(yaml.safe_dump(values))
    assert project.end(project.start()) != 0
    assert [words for words in told if words not in project.output()] == [], project.output()
    assert project.submitted() == []


def test_drained_node_is_reported_and_waited_for(new_project: NewProject, cluster: Cluster) -> None:
    project = new_project(on=2)
    name = next(node for node in cluster.nodes if node not in project.excluded())
    update = ("scontrol", "update", f"NodeName={name}")
    cluster.run(*update, "State=DRAIN", "Reason=for a while")
    command = project.start("preflight")
    job = project.wait_for_job()
    assert f"waits in the queue: 1 of 2 nodes that fit are {name} drained" in project.output()
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(*update, "State=RESUME")
    assert project.end(command) == 0, project.said()
