"""The twin of a site: its Slurm answers as the site's did, and refuses, holds back and preempts jobs as
the site's would. A profile that is tried on another cluster than its own proves nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.clone import link_environment
from support.pages import commands_of
from support.repository import REPOSITORY
from support.site_answers import nodes, partition, site

from forge.core.files import write_json
from forge.slurm.site import SiteAnswers
from tools.slurm_cluster import __main__
from tools.slurm_cluster.cluster import Cluster, base_folder, fields
from tools.slurm_cluster.inside import login_environment
from tools.slurm_cluster.machines import ClusterError, wait_until
from tools.slurm_cluster.twin import fit_for_here, twin_of

from .conftest import require_slurm, started
from .job_run import write_tiny_config

pytestmark = pytest.mark.tools

GPUS = "gpu:nvidia_h100_80gb_hbm3:4(S:0-1)"
SITE = site(
    [
        partition(
            "gpu_h100",
            **{"MaxTime": "2-00:00:00", "DefaultTime": "01:00:00", "PriorityTier": "10"},
            **{"QoS": "gpus", "AllowAccounts": "lab", "JobDefaults": "DefCpuPerGPU=12"},
        ),
        partition(
            "gpu_requeue",
            **{"MaxTime": "7-00:00:00", "PreemptMode": "REQUEUE", "MaxNodes": "20"},
            **{"DefMemPerCPU": "1000", "MaxCPUsPerSocket": "40"},
            TRESBillingWeights="CPU=1.0,Mem=0.25G,GRES/gpu:nvidia_h100_80gb_hbm3=14",
        ),
        partition(
            "cpu", Default="YES", MaxCPUsPerNode="40", MaxMemPerNode="180000", AllowQos="normal"
        ),
    ],
    [
        *nodes("gpu_h100,gpu_requeue", ["gn1", "gn2"], gres=GPUS, of="h100,ib"),
        *nodes("cpu", ["cn1"], "48|190000"),
    ],
    qos=[
        "normal|0||00:00:00||cluster|||",
        "gpus|0|DenyOnLimit|00:00:00||cluster||gres/gpu=6|",
        "short|20||00:00:00||cluster|||00:10:00",
        "wide|5||00:01:00|normal|requeue|gres/gpu=4||",
    ],
    associations=["far|lab||normal,short,wide|normal|||", "far|guests||normal||node=1||1-00:00:00"],
    examples=[
        "NodeName=gn1 CoresPerSocket=48 CPUTot=96 CPUEfctv=96 Sockets=2 ThreadsPerCore=1"
        " RealMemory=1500000 MemSpecLimit=9000"
    ],
    PreemptMode="REQUEUE",
    PreemptType="preempt/partition_prio",
    KillWait="7 sec",
)
SITES = REPOSITORY / "tests/plugins/site/sites"
# What depends on the number and the names of nodes.
COUNTED = {"Nodes", "TotalCPUs", "TotalNodes", "TRES"}


@pytest.fixture(scope="module")
def twin() -> Iterator[Cluster]:
    settings, _ = fit_for_here(twin_of(SITE)[0])
    with started(settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(twin: Cluster) -> Iterator[Cluster]:
    yield twin
    twin.run("scancel", "--user", "root")
    twin.wait_until_idle()
    twin.kill_started()


@pytest.fixture
def answers(cluster: Cluster, tmp_path: Path) -> SiteAnswers:
    """What the twin's Slurm says of itself."""
    code = "from forge.slurm.site import *; print(SiteAnswers.ask().model_dump_json(by_alias=True))"
    said = cluster.run("python", "-c", code).stdout
    write_json(
        tmp_path / "site.json", {"format": 1, **SiteAnswers.model_validate_json(said).model_dump()}
    )
    return SiteAnswers.read(tmp_path / "site.json")


@pytest.fixture
def project(cluster: Cluster) -> Path:
    """The project as a user has it, but for the config: a tiny model on a small text."""
    folder = cluster.folder / "scratch/project"
    for part in ("workflow", "profiles", "config", "tools"):
        shutil.copytree(REPOSITORY / part, folder / part)
    shutil.copy(REPOSITORY / "Makefile", folder)
    link_environment(folder)
    shutil.copy(write_tiny_config(folder / "tiny"), folder / "config")
    return folder


def sbatch(cluster: Cluster, *options: str) -> str:
    """What sbatch says of a job that it refuses; the job's id where it takes the job."""
    options = ("--account=lab", "--output=/dev/null", *options, "--wrap", "sleep 600")
    done = cluster.run("sbatch", "--parsable", *options, check=False)
    return (done.stderr if done.returncode else done.stdout).strip()


def test_partitions_are_those_of_the_file_but_for_nodes_and_unknown_keys(
    answers: SiteAnswers,
) -> None:
    here, there = (
        {fields(line)["PartitionName"]: fields(line) for line in one.answer("partitions").lines}
        for one in (answers, SITE)
    )
    assert here.keys() == there.keys()
    for name, values in there.items():
        known = values.keys() & here[name].keys() - COUNTED
        assert len(known) > 15
        assert {key: here[name][key] for key in known} == {key: values[key] for key in known}
    assert "MaxCPUsPerSocket" not in here["gpu_requeue"]  # of Slurm 23.02


def test_nodes_accounts_qos_and_settings_are_those_of_the_file(answers: SiteAnswers) -> None:
    def kinds(one: SiteAnswers) -> set[tuple[object, ...]]:
        return {
            (name, node.cpus, node.memory_mb, node.gpus, node.features)
            for name, partition in one.partitions().items()
            for node in partition.nodes
        }

    assert kinds(answers) == kinds(SITE)
    assert all(len(partition.nodes) for partition in answers.partitions().values())
    for name, of_row in (("associations", "account"), ("qos", "name")):
        here = {row[of_row]: row for row in answers.answer(name).rows}
        for row in SITE.answer(name).rows:
            told = {key: sorted(value.split(",")) for key, value in row.items() if key != "cluster"}
            assert {key: sorted(here[row[of_row]][key].split(",")) for key in told} == told
    assert "root" not in {row["account"] for row in answers.answer("associations").rows}
    for key, value in SITE.settings.items():
        if key not in ("ClusterName", "TaskPlugin"):
            assert answers.settings[key] == value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-p", "gpu_h100", "-N2", "--gpus-per-node=4"), "QOSMaxGRESPerUser"),
        (("-p", "gpu_h100", "--qos=gpus"), "Invalid qos"),
        (("-p", "cpu", "--account=nobody"), "Invalid account"),
    ],
)
def test_job_that_the_site_would_refuse_is_refused(
    cluster: Cluster, options: tuple[str, ...], said: str
) -> None:
    assert said in sbatch(cluster, *options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-p", "gpu_requeue", "--qos=wide", "--gpus-per-node=4", "-N2"), "QOSGrpGRES"),
        (("-p", "gpu_h100", "--gpus=4", "--time=3-0"), "PartitionTimeLimit"),
        (("-p", "gpu_requeue", "-A", "guests", "-t", "2-0"), "AssocMaxWallDurationPerJobLimit"),
        (("-p", "gpu_h100", "--account=guests", "--gpus=1"), "account_not_permitted"),
        (("-p", "cpu", "--qos=short", "--mem=1G", "-t", "5"), "QOS_not_permitted"),
    ],
)
def test_job_above_a_limit_that_sbatch_does_not_check_waits_with_its_reason(
    cluster: Cluster, options: tuple[str, ...], reason: str
) -> None:
    job = sbatch(cluster, *options)
    seen: set[str] = set()

    def held_back() -> bool:
        seen.add(cluster.job(job)["Reason"])
        return any(reason in one for one in seen)

    wait_until(held_back, 30, f"PENDING ({reason}): job {job}", lambda: str(seen), every=0.2)


def test_job_gets_gpus_cores_and_memory_by_the_defaults_of_the_site(cluster: Cluster) -> None:
    step = ("srun", "-A", "lab", "-p", "gpu_h100", "--gpus=3", "-t", "1", "bash", "-c")
    show = "echo $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE $SLURM_JOB_PARTITION"
    assert cluster.run(*step, show).stdout == "0,1,2 36 gpu_h100\n"


def test_job_of_the_preemptable_partition_is_requeued_for_one_of_higher_tier(
    cluster: Cluster,
) -> None:
    # Without the signal of a job and without GraceTime, as the file says.
    low = sbatch(cluster, "-p", "gpu_requeue", "-N2", "--gpus-per-node=4", "--requeue")
    cluster.wait_for_state(low, "RUNNING")
    high = sbatch(cluster, "-p", "gpu_h100", "--gpus=4", "-t", "10")
    cluster.wait_for_state(high, "RUNNING")
    assert cluster.wait_for_state(low, "PENDING")["Restarts"] == "1"


def test_start_that_fails_leaves_no_twin_without_its_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_slurm()
    settings, notes = twin_of(SITE)
    unknown = (*settings.accounting, ("add", "user", "root", "Account=nowhere"))
    wrong = replace(settings, accounting=unknown)
    monkeypatch.setattr(__main__, "twin_of", lambda _: (wrong, notes))
    SITE.write(tmp_path / "site.json")
    folder = base_folder() / f"start-{uuid.uuid4().hex}"  # tests-* without a lock is removed
    try:
        with pytest.raises(ClusterError, match="This account 'nowhere' doesn't exist"):
            __main__.start(folder, Namespace(nodes=None, twin=tmp_path / "site.json"))
        assert not Cluster(folder).is_up()
    finally:
        Cluster(folder).down()
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["kempner", "perlmutter"])  # preempted by partitions, by QOS
def test_profile_that_is_made_in_the_twin_is_that_of_the_file(name: str) -> None:
    file = SITES / f"{name}.json"
    settings, _ = fit_for_here(twin_of(SiteAnswers.read(file))[0])
    with started(settings) as cluster:
        project = cluster.folder / "scratch/project"
        (project / "profiles").mkdir(parents=True)
        shutil.copy(file, project)  # where the machines see it
        cluster.run("forge", "profile", "there", "--from", file.name, cwd=project)
        cluster.run("forge", "profile", "here", cwd=project)
        for part in ("config.yaml", "machine.yaml"):
            there, here = (project / "profiles" / made / part for made in ("there", "here"))
            assert yaml.safe_load(here.read_text()) == yaml.safe_load(there.read_text())


def test_profile_of_a_site_passes_its_preflight_on_the_twin_by_the_commands_of_the_page(
    cluster: Cluster, project: Path
) -> None:
    commands = [command.bare for command in commands_of("tests/slurm/test_twin.py")]
    save, up, shell, *inside = commands
    assert [words.split()[0] for words in inside] == ["forge", "sed", "snakemake"]
    cluster.run(*save.split(), cwd=project)  # on the cluster, which is a twin itself here
    env = {**login_environment(), "FORGE_SLURM_DIR": str(cluster.folder / "scratch/slurm")}

    def make(command: str, given: str = "") -> str:
        # -o: with the environment as it is. `make slurm-shell` reads commands as from a terminal.
        words = ["make", "-o", ".venv/ready", *command.split()[1:]]
        done = subprocess.run(
            words,
            cwd=project,
            env=env,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    try:
        said = make(up)
        assert (
            "node01, node02: the site's 2 nodes such as node01: 4 x nvidia_h100_80gb_hbm3" in said
        )
        said = make(
            shell, "\n".join(["set -e", *inside, "sacct -nPXo partition,alloctres", "exit"])
        )
    finally:
        make("make slurm-down")
    assert re.search(r"^gpu_h100\|.*gres/gpu=4\b", said, re.MULTILINE), said
    log = (project / "results/base/logs/preflight.log").read_text()
    assert re.search(r"NODE node01 OK", log), log  # one: its GPUs are four of the user's six
    profile = yaml.safe_load((project / "profiles/mine/config.yaml").read_text())
    assert profile["set-resources"]["train_run"]["gres"] == "gpu:nvidia_h100_80gb_hbm3:4"
