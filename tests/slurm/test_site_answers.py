"""What `forge profile` and forecasts ask a real Slurm. Threat: answers in another form than those that
the unit tests have recorded, and a command that waits for accounting for ever, or needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from forge.slurm.site import SiteAnswers
from tools.slurm_cluster.cluster import REPOSITORY, Cluster
from tools.slurm_cluster.machines import wait_until

RECORDED = REPOSITORY / "tests/plugins/site/sites/test-cluster.json"
FORGE = (REPOSITORY / ".venv/bin/python", "-m", "forge", "profile")


def test_recorded_answers_are_in_the_form_of_a_real_slurm(
    cluster: Cluster, shared_folder: Path
) -> None:
    cluster.run(*FORGE, "--save", "site.json", cwd=shared_folder)
    asked, recorded = SiteAnswers.read(shared_folder / "site.json"), SiteAnswers.read(RECORDED)
    assert [name for name, answer in asked.answers.items() if answer.error] == []
    assert asked.answers.keys() == recorded.answers.keys()
    for name in asked.answers.keys() - {"examples"}:
        assert asked.answer(name).command == recorded.answer(name).command
    assert asked.settings.keys() == recorded.settings.keys()
    ours, theirs = asked.partitions(), recorded.partitions()
    assert list(ours) == list(theirs)
    assert {node.gpus for node in ours["main"].nodes} == {
        node.gpus for node in theirs["main"].nodes
    }
    assert [row["account"] for row in asked.answer("associations").rows] == ["lab", "root"]


@pytest.mark.parametrize(
    "words", [(), ("--partition=lownow", "--gpus=1", "--nodes=3"), ("--gpus=0",)]
)
def test_slurm_itself_takes_the_jobs_of_a_profile(
    cluster: Cluster, shared_folder: Path, words: tuple[str, ...]
) -> None:
    (shared_folder / "profiles").mkdir()
    cluster.run(*FORGE, "mine", *words, cwd=shared_folder)
    config = yaml.safe_load((shared_folder / "profiles/mine/config.yaml").read_text())
    asked = config["default-resources"] | config["set-resources"]["train_run"]
    options = {
        "account": "slurm_account",
        "partition": "slurm_partition",
        "nodes": "nodes",
        "ntasks-per-node": "tasks_per_node",
        "cpus-per-task": "cpus_per_task",
        "mem": "mem_mb",
        "gres": "gres",
        "time": "runtime",
    }
    given = [f"--{name}={asked[key]}" for name, key in options.items() if key in asked]
    assert len(given) == (7 if words == ("--gpus=0",) else 8)
    cluster.run("sbatch", "--test-only", *given, "--wrap=true")


STARTS = """
import json, sys, time
from forge.slurm import slurm
starts = slurm.accounted_starts(time.time() - 3600, "low")
print(json.dumps([start.state for start in starts if start.job == sys.argv[1]]))
"""


def test_accounting_has_a_row_for_each_start_of_a_job(cluster: Cluster) -> None:
    options = ("--parsable", "--requeue", "--partition=low", "--output=/dev/null")
    job = cluster.run("sbatch", *options, "--wrap=sleep 600").stdout.strip()

    def states() -> list[str]:
        line = (REPOSITORY / ".venv/bin/python", "-c", STARTS, job)
        found: list[str] = json.loads(cluster.run(*line, cwd=REPOSITORY).stdout)
        return found

    wait_until(lambda: states() == ["RUNNING"], 120, "the job in accounting", every=0.5)
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: states()[:1] == ["REQUEUED"], 120, "the requeue in accounting", every=0.5)
    cluster.run("scancel", job)
    both = ["REQUEUED", "CANCELLED"]
    wait_until(lambda: states() == both, 120, "both starts in accounting", every=0.5)


def test_account_is_left_to_edit_while_accounting_is_down(
    exclusive_cluster: Cluster, shared_folder: Path
) -> None:
    (shared_folder / "profiles").mkdir()
    exclusive_cluster.stop_daemon("slurmdbd")
    done = exclusive_cluster.run(*FORGE, "mine", "--gpus=0", cwd=shared_folder, timeout=150)
    config = (shared_folder / "profiles/mine/config.yaml").read_text()
    assert "slurm_account: EDIT_account" in config and "slurm_partition: main" in config
    assert "not known: slurm_account: edit the lines that begin with EDIT_" in done.stdout
