"""The workflow without a terminal: `forge submit`, and what people and clusters do to its controller."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from forge.core.files import read_json
from forge.plugins.controller.places import ControllerPaths
from tools.slurm_cluster.cluster import REPOSITORY, Cluster
from tools.slurm_cluster.machines import ClusterError, wait_until

from .job_run import INTERVAL, PAUSES, TINY_CONFIG, Uninterrupted, paused
from .project import Project
from .test_job_watch import both_daemons_away

NewProject = Callable[..., Project]
TASKS = REPOSITORY / "tests/plugins/evaluation/distributed/tasks"
ENDS = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY"
FIRST, SECOND, THIRD = PAUSES


class Submitted:
    """A project, and commands of `forge` about its controller on the login node."""

    def __init__(self, project: Project, **controller: Any) -> None:
        """controller: keys of slurm.controller. Little memory, so that no job of the run waits for it."""
        self.project, self.cluster = project, project.cluster
        project.edit_machine({"slurm": {"controller": {"mem_mb": 500, **controller}}})

    def forge(self, *words: str, env: dict[str, str] | None = None) -> str:
        """What a command says; it must exit with 0."""
        done = self.run(*words, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(
        self, *words: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(
            "forge", *words, cwd=self.project.folder, check=False, env=env, timeout=150
        )

    def submit(self, *words: str, env: dict[str, str] | None = None) -> str:
        """The job of the controller, which runs or waits."""
        self.forge("submit", *self.line(*words), env=env)
        return self.job()

    def line(self, *words: str) -> list[str]:
        return ["--profile", f"profiles/{self.project.profile}", *(words or ["validate"])]

    def job(self) -> str:
        """The last one."""
        return self.paths.job

    @property
    def paths(self) -> ControllerPaths:
        with contextlib.chdir(self.project.folder):
            return ControllerPaths.all()[-1]

    def state(self) -> dict[str, Any]:
        return dict(read_json(self.project.folder / self.paths.state))

    @property
    def log(self) -> str:
        path = self.project.folder / self.paths.log
        return path.read_text() if path.exists() else ""

    def said(self) -> str:
        return self.log[-4000:] + self.project.said()

    def wait_for_words(self, words: str, times: int = 1, timeout: float = 120) -> None:
        wait_until(lambda: self.log.count(words) >= times, timeout, words, self.said, every=0.2)

    def wait_for_end(self, job: str, timeout: float = 240) -> str:
        try:
            return self.cluster.wait_for_state(job, ENDS, timeout)["JobState"]
        except ClusterError as err:
            raise ClusterError(f"{err}\n{self.said()}") from None

    def jobs(self) -> list[str]:
        """Slurm's ids of the jobs that were submitted, each once, in order."""
        found = re.findall(r"submitted with SLURM jobid (\d+) \(log: [^)]*\)\.", self.log)
        return list(dict.fromkeys(found))

    def warn(self, job: str) -> None:
        """What Slurm sends before the time limit; returns when the job has been requeued."""
        before = self.restarts(job)
        self.cluster.run("scancel", "--signal=USR1", "--batch", job)
        wait_until(
            lambda: self.restarts(job) > before, 60, f"requeued: {job}", self.said, every=0.2
        )

    def approach_time_limit(self, job: str) -> None:
        """Let the limit of a running job come near, so that Slurm's warning is due; returns when the job
        has been requeued, with a limit that is far."""
        hours, minutes, _ = map(int, self.cluster.job(job)["RunTime"].split(":"))
        near = f"TimeLimit={hours * 60 + minutes + 3}"
        self.cluster.run("scontrol", "update", f"JobId={job}", near)
        wait_until(lambda: self.restarts(job), 120, f"requeued: {job}", self.said, every=0.2)
        self.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")

    def restarts(self, job: str) -> int:
        return int(self.cluster.job(job)["Restarts"])


HUB = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.hub import served
files = {path.name: path.read_bytes() for path in Path(sys.argv[3]).iterdir()}
with served({"datasets/me/corpus": files}) as hub:
    Path(sys.argv[2]).write_text(hub.url)
    time.sleep(600)
"""


@contextlib.contextmanager
def hub_on_login_node(cluster: Cluster, folder: Path, corpus: Path) -> Iterator[str]:
    """Address of a hub that only the login node reaches."""
    url = folder / "hub-url"
    hub = cluster.popen("python", "-c", HUB, REPOSITORY / "tests", url, corpus, cwd=folder)
    wait_until(lambda: url.exists() and url.read_text(), 60, "a hub", every=0.1)
    yield url.read_text()
    hub.kill_group()


def test_submitted_workflow_trains_and_validates_and_tells_its_end_once(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """A second submit and a second Snakemake are refused by name meanwhile; a controller of another run
    works beside it."""
    project = new_project(on=1)
    told = project.folder / "told.jsonl"
    project.edit_machine({"notify": {"command": ["tee", "-a", str(told)]}})
    own = Submitted(project)
    job = own.submit("train", env=paused())
    project.run().wait_for_pause()
    status = own.forge("status").splitlines()
    [node] = set(cluster.job(job)["NodeList"].split(","))
    assert re.match(rf"controller: job {job} RUNNING on {node} since \S+, limit \S+, ", status[0])
    again = own.run("submit", *own.line("train"))
    assert again.returncode == 69 and f"job {job} (RUNNING on " in again.stderr, again.stderr
    assert "forge submit --stop" in again.stderr
    assert project.end(project.start()) != 0
    assert f"the controller, job {job}" in project.output(), project.output()
    (project.folder / "config/others.tsv").write_text("run\nother\n")
    other = own.submit("validate", "--config", "runs=config/others.tsv")
    shown = json.loads(own.forge("status", "--json"))["controllers"]
    assert [(one["job"], one["runs"]) for one in shown] == [(job, ["base"]), (other, ["other"])]
    which = own.run("submit", "--stop")
    assert which.returncode == 78 and f"2 controllers live: job {job} (base)" in which.stderr
    project.run().end_pause()
    assert own.wait_for_end(other) == own.wait_for_end(job) == "COMPLETED", own.said()
    assert own.forge("status").startswith(f"controller: job {job} ended: done")
    events = [yaml.safe_load(line) for line in told.read_text().splitlines()]
    assert sorted((e["event"], e.get("run") or "", e["state"]) for e in events) == [
        *[("controller ended", "", "done")] * 2,
        ("run ended", "base", "validated"),
        ("run ended", "other", "validated"),
    ]
    assert len(own.jobs()) == 2  # the allocation and validation
    assert "nothing to be done" in own.forge("submit", *own.line("train"))
    uninterrupted.equals(project.run())
    uninterrupted.equals(project.run("other"))


@pytest.mark.weekly
def test_time_limit_in_each_phase_leaves_the_jobs_to_the_next_start(
    new_project: NewProject, shared_folder: Path, tiny_config: Path, uninterrupted: Uninterrupted
) -> None:
    """A real one while tokenizing; Slurm's signal alone while training waits in the queue, while it
    trains, and while validation runs. Each job is submitted once, and the config of the submission holds.

    The network is used on the login node only: the corpus comes from its loopback interface. Other runs
    that need the same tokens are refused meanwhile.
    """
    tokens = {"inputs": ["hf://datasets/me/corpus@main/*.txt"], "val_fraction": 0.3}
    project = new_project(
        on=1,
        values={"data": str(shared_folder / "data"), "tokenize": tokens},
        machine={"slurm": {"options": "--hold"}},
    )
    profile = project.profile_folder / "config.yaml"
    values = yaml.safe_load(profile.read_text())
    values["set-resources"]["tokenize"] = {"slurm_extra": "'--hold'"}
    profile.write_text(yaml.safe_dump(values))
    own, cluster, run = Submitted(project), project.cluster, project.run()
    with hub_on_login_node(cluster, shared_folder, tiny_config.parent / "corpus") as url:
        env = {"HF_ENDPOINT": url, "HF_HOME": str(shared_folder / "hf")}
        said = own.forge("submit", *own.line(), env={**env, **paused(FIRST)})
        (project.folder / "config/others.tsv").write_text("run\nother\n")
        others = own.line("validate", "--config", "runs=config/others.tsv")
        too = own.run("submit", *others, env=env)
    assert too.returncode == 69, too.stdout + too.stderr
    assert re.search(r"makes \S+/tokens/\w+/manifest.json, which these runs need, too", too.stderr)
    assert re.findall("which has a network: (.*)", said) == ["inputs", "tokenizer"]
    assert list((shared_folder / "data/tokenizers").glob("*/manifest.json"))
    (project.folder / "config/config.yaml").write_text("run: edited\n")  # for the next experiment
    job = own.job()
    own.wait_for_words("submitted with SLURM jobid")
    [tokenize] = own.jobs()
    own.approach_time_limit(job)
    own.wait_for_words("is PENDING, and is watched again", timeout=150)
    # Slurm has restarted the job once; twice where its node did not answer at that start.
    assert "the time limit is near" in own.log
    cluster.run("scontrol", "release", tokenize)

    wait_until(lambda: len(own.jobs()) == 2, 150, "training", own.said, every=0.2)
    own.warn(job)
    own.wait_for_words("is PENDING, and is watched again", times=2, timeout=150)
    cluster.run("scontrol", "release", own.jobs()[1])
    run.wait_for_pause(FIRST)
    own.warn(job)
    own.wait_for_words("is RUNNING, and is watched again", timeout=150)
    run.end_pause(FIRST)
    wait_until(lambda: len(own.jobs()) == 3, 150, "validation", own.said, every=0.2)
    own.warn(job)
    assert own.wait_for_end(job) == "COMPLETED", own.said()
    assert own.state()["starts"] == 5
    assert len(own.jobs()) == 3 and len(run.events("launch")) == 1, own.log
    uninterrupted.equals(run)


def snakemake_of(project: Project) -> psutil.Process:
    """That of the controller."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = process.cmdline()
            if line[1:3] == ["-m", "snakemake"] and process.cwd() == str(project.folder):
                return process
    raise AssertionError("no Snakemake")


@pytest.mark.weekly
def test_struck_controller_watches_the_running_job_again(
    new_project: NewProject, exclusive_cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """Its Snakemake is killed, as by a lack of memory; it is preempted; its node loses power; both
    daemons are away, while training ends. Training is submitted and launched once."""
    cluster, watched = exclusive_cluster, "is RUNNING, and is watched again"
    project = new_project(on=1)
    free = sorted(set(project.excluded()))[0]
    own = Submitted(project, partition="low", options=f"--nodelist={free}")
    job = own.submit(env=paused(FIRST))
    project.run().wait_for_pause(FIRST)

    snakemake_of(project).kill()
    own.wait_for_words("Snakemake was killed by signal 9: it is started again")
    own.wait_for_words(watched)

    node = (f"--nodelist={free}", "--exclusive")
    cluster.submit("--partition=high", *node, "--output=/dev/null", "--wrap=true")
    own.wait_for_words(watched, times=2)
    preempted = own.restarts(job)
    assert preempted, own.said()

    cluster.power_cut(free)
    wait_until(lambda: own.restarts(job) > preempted, 90, "requeued by Slurm", own.said, every=0.2)
    cluster.run("scontrol", "update", f"JobId={job}", "ReqNodeList=")  # any other node
    own.wait_for_words(watched, times=3)

    with both_daemons_away(cluster):
        own.wait_for_words("Jobs continue; this command tries again")
        assert own.forge("status").startswith(f"controller: job {job}: Slurm does not answer")
        project.run().end_pause(FIRST)
        wait_until(lambda: project.run().events("completed"), 60, "trained", own.said, every=0.2)
    assert own.wait_for_end(job) == "COMPLETED", own.said()
    assert len(project.run().events("launch")) == 1 and len(own.jobs()) == 2
    uninterrupted.equals(project.run())


@pytest.mark.weekly
def test_cancelled_controller_leaves_training_and_stop_ends_it_with_a_checkpoint(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(on=1)
    own, run = Submitted(project), project.run()
    first = own.submit(env=paused(*PAUSES))
    run.wait_for_pause(FIRST)
    cluster.run("scancel", first)
    assert own.wait_for_end(first) == "CANCELLED"
    wait_until(lambda: own.state()["phase"] == "cancelled", 30, "recorded", own.said)
    [training] = own.jobs()
    assert cluster.job(training)["JobState"] == "RUNNING"
    assert own.forge("status").startswith(f"controller: job {first} ended: cancelled")
    second = own.submit(env=paused(*PAUSES))
    own.wait_for_words("is RUNNING, and is watched again")
    run.end_pause(FIRST)
    run.wait_for_pause(SECOND)
    stop = cluster.popen("forge", "submit", "--stop", cwd=project.folder)
    run.end_pause_when_told_to_stop(SECOND)
    said, _ = stop.communicate(timeout=120)
    assert stop.returncode == 0 and "stopped; forge submit --profile" in said, said
    assert not cluster.squeue()
    assert own.state()["phase"] == "stopped"
    third = own.submit()
    assert own.wait_for_end(third) == "COMPLETED", own.said()
    assert len({first, second, third}) == 3
    assert len(run.events("launch")) == 2
    uninterrupted.equals(run)


def test_nodes_that_may_not_submit_are_refused_at_once(
    new_project: NewProject, exclusive_cluster: Cluster
) -> None:
    project = new_project(on=1)
    own = Submitted(project)
    exclusive_cluster.run("scontrol", "update", "PartitionName=main", "AllocNodes=ctl")
    done = own.run("submit", *own.line())
    assert done.returncode == 69, done.stdout + done.stderr
    assert "no node of partition main may submit jobs to main (AllocNodes=ctl)" in done.stderr
    assert "tmux" in done.stderr and not exclusive_cluster.squeue()


def test_failure_is_final_and_told_once_and_data_of_tasks_are_made_on_the_login_node(
    new_project: NewProject, shared_folder: Path, cluster: Cluster
) -> None:
    """Slurm keeps the mail options of the controller."""
    data, tasks = shared_folder / "words.jsonl", shared_folder / "tasks"
    shutil.copy(TASKS / "words.jsonl", data)
    tasks.mkdir()
    (tasks / "words.yaml").write_text((TASKS / "words.yaml").read_text().replace("DATA", str(data)))
    train = {**TINY_CONFIG["train"], "lr": 1e30, "keep_every": INTERVAL}
    evaluate = {"tasks": ["words"], "include_path": str(tasks), "every": INTERVAL}
    project = new_project(on=1, values={"train": train, "evaluate": evaluate})
    told = project.folder / "told.jsonl"
    project.edit_machine({"notify": {"command": ["tee", "-a", str(told)]}})
    own = Submitted(project, options="--mail-type=END,FAIL --mail-user=nobody")
    said = own.forge("submit", *own.line("train"), env={"HF_HOME": str(shared_folder / "hf")})
    job = own.job()
    assert "on this machine, which has a network: evaluate_data" in said
    assert project.run().paths.evaluation_data.exists()
    mail = cluster.job(job)
    assert (mail["MailUser"], mail["MailType"]) == ("nobody", "END,FAIL")
    assert own.wait_for_end(job) == "FAILED", own.said()
    assert own.restarts(job) == 0 and own.state()["phase"] == "failed"
    assert "evaluate_data" not in own.log
    events = [yaml.safe_load(line) for line in told.read_text().splitlines()]
    assert [(e["event"], e["state"]) for e in events] == [
        ("run ended", "failed"),
        ("controller ended", "failed"),
    ]
    assert "are not finite" in events[0]["message"]


@pytest.mark.weekly
def test_family_trains_across_requeues_of_its_parent_and_its_child(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """By hand, while their ranks wait. The child goes on from its parent's data and state, to its end."""
    project = new_project(on=1, values={"train": {**TINY_CONFIG["train"], "keep_every": INTERVAL}})
    sheet = f"run\tparent\nbase\t\nchild\tbase@{INTERVAL}\n"
    (project.folder / "config/runs.tsv").write_text(sheet)
    own = Submitted(project)
    job = own.submit(env=paused(FIRST))
    for run in (project.run(), project.run("child")):
        run.wait_for_pause(FIRST)
        cluster.run("scontrol", "requeue", str(run.events("launch")[-1]["job"]))
        run.end_pause_when_told_to_stop(FIRST)
        run.wait_for_event("init", 2, timeout=150)
    assert own.wait_for_end(job) == "COMPLETED", own.said()
    uninterrupted.equals(project.run())
    assert project.run("child").events("init")[0]["step"] == INTERVAL
    assert project.run("child").weights_digest() == project.run().weights_digest()
