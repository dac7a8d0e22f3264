"""Shards on the nodes of an allocation: only where they lack, never half of them, never left behind.

Each machine has a /tmp of its own, which stands for a node's disk; the rest is the shared file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.project_plugin import write_documented, write_plugin
from support.repository import REPOSITORY

from forge.core.project_plugins import STAGED
from forge.data.inputs import source_digest
from forge.slurm import exclude
from tools.slurm_cluster.cluster import Cluster

from .job_run import PAUSES, JobRun, Uninterrupted

ROOT = f"/tmp/forge-{os.getuid()}"
UNFIT = 69


@dataclass
class Allocation:
    """A job that holds nodes, and the verbs that run in it, as from `salloc` on the login node."""

    cluster: Cluster
    job: str
    hosts: list[str]
    config: Path
    results: Path

    def forge(
        self,
        command: str,
        *options: str,
        python: str | Path = sys.executable,
        cwd: Path = Path("/"),
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(
            *(
                python,
                "-m",
                "forge",
                command,
                self.config,
                f"--results={self.results}",
                "--run=base",
            ),
            *(f"--nodes={len(self.hosts)}", "--machine.launcher=srun"),
            *("--machine.device=cpu", "--machine.stage.mode=always", *options),
            env={"SLURM_JOB_ID": self.job},
            cwd=cwd,
            check=False,
            timeout=120,
        )

    def make_inputs(self, python: Path) -> None:
        """On the login node, where the inputs are seen."""
        done = self.cluster.run(python, "-m", "forge", "inputs", self.config, check=False)
        assert done.returncode == 0, done.stderr

    def stage(self, *options: str, **keys: Any) -> dict[str, Any]:
        done = self.forge("stage", *options, **keys)
        assert done.returncode == 0, done.stderr
        return self.facts() | {"said": done.stderr}

    def facts(self) -> dict[str, Any]:
        return dict(json.loads((self.results / "base/.allocation/stage.json").read_text()))

    def on(self, host: str, script: str) -> str:
        return self.cluster.run("sh", "-c", script, machine=host, cwd=Path("/")).stdout

    def content(self, host: str) -> list[str]:
        """What lies below the private folder of a node."""
        listing = f"find {ROOT} -mindepth 1 -maxdepth 2 -printf '%P\\n' 2>/dev/null || true"
        return sorted(self.on(host, listing).split())


@pytest.fixture
def allocate(
    cluster: Cluster, nodes: Callable[[int], list[str]], tiny_config: Path, shared_folder: Path
) -> Iterator[Callable[[int], Allocation]]:
    """allocate(2): an allocation of two nodes, whose disks are empty."""
    jobs = []

    def make(count: int) -> Allocation:
        hosts = nodes(count)
        for host in hosts:
            cluster.run("rm", "-rf", ROOT, machine=host, cwd=Path("/"))
        jobs.append(
            cluster.submit(
                *(f"--nodelist={','.join(hosts)}", f"--nodes={count}", "--ntasks-per-node=1"),
                *("--mem=1500", "--time=5", "--output=/dev/null", "--wrap=sleep 300"),
            )
        )
        cluster.wait_for_state(jobs[-1], "RUNNING")
        return Allocation(cluster, jobs[-1], hosts, tiny_config, shared_folder / "results")

    yield make
    for job in jobs:
        cluster.run("scancel", job)


def test_only_nodes_that_lack_the_shards_get_them(allocate):
    here = allocate(2)
    one, two = here.hosts
    first = here.stage("--machine.stage.keep=true")
    assert first["sent"] == here.hosts
    folder = first["folders"][one]
    assert folder == f"{ROOT}/{first['digest'][:32]}"
    source = here.config.parent / "data" / "tokens"
    for host in here.hosts:
        assert Path(folder).name in here.content(host)
        assert not [name for name in here.content(host) if name.startswith("job-")]
        # Without statistics.json, which no rank reads.
        files = f"cd {source}/* && for f in *.bin manifest.json; do"
        here.on(host, f"{files} cmp $f {folder}/$f; done")
        assert here.on(host, f"stat -c %a {ROOT} {folder}").split() == ["700", "700"]
    assert here.stage("--machine.stage.keep=true")["sent"] == []
    here.on(two, f"rm -r {folder}")
    assert here.stage("--machine.stage.keep=true")["sent"] == [two]
    here.on(one, f"cd {folder}; f=$(ls train*.bin | head -1); printf X | dd of=$f conv=notrunc")
    again = here.stage("--machine.stage.keep=true")
    assert again["sent"] == [one]
    assert f"{one}: replacing a corrupt copy: {folder}/train" in again["said"]
    assert here.stage("--machine.stage.keep=true")["sent"] == []


def test_ranks_read_the_staged_shards_and_train_removes_them(allocate, shared_folder):
    here = allocate(2)
    # Shards in a place of their own, since they are taken away.
    data = shared_folder / "data"
    shutil.copytree(here.config.parent / "data", data)
    options = (f"--data={data}", "--train.max_steps=10")
    here.on(here.hosts[0], f"mkdir -m 700 {ROOT}; mkdir {ROOT}/job-1 {ROOT}/job-{here.job}")
    facts = here.stage(*options)
    assert "removed what ended jobs had left (job-1)" in facts["said"]
    for host in here.hosts:
        name = facts["digest"][:32]
        assert facts["folders"][host] == f"{ROOT}/job-{here.job}/{name}"
        assert {f"job-{here.job}/{name}", f"job-{here.job}/used-by-base"} <= set(here.content(host))
        assert "job-1" not in here.content(host)
    shutil.rmtree(data / "tokens")
    done = here.forge("train", *options)
    assert done.returncode == 0, done.stderr
    assert [here.content(host) for host in here.hosts] == [[], []]


NOT_READ = re.compile(r"(\d of \d) copies of the shards are not verified again: ranks of job (\d+)")
FLIP = (
    "cd {root}/*/ && f=train-00000-000.bin && touch -r $f /tmp/times &&"
    " dd if=$f bs=1 count=1 status=none | tr '\\000-\\377' '\\001-\\377\\000' |"
    " dd of=$f conv=notrunc status=none && touch -r /tmp/times $f"
)


@pytest.mark.weekly
def test_later_launches_of_a_job_do_not_read_unchanged_copies_again_and_find_a_changed_one(
    new_run: Callable[..., JobRun],
    uninterrupted: Uninterrupted,
    cluster: Cluster,
    shared_folder: Path,
) -> None:
    """After the loss of a rank, and after requeues, before the second of which a byte is changed."""
    before_a_loss, before_a_requeue, before_a_change = PAUSES
    run = replace(
        new_run(pauses=PAUSES),
        keys={"stage": {"mode": "always", "keep": True}},
        commands=("stage", "train"),
        cwd=shared_folder,
    )
    for host in run.names:
        cluster.run("rm", "-rf", ROOT, machine=host, cwd=Path("/"))

    def requeue(step: int) -> None:
        run.wait_for_pause(step)
        cluster.run("scancel", "--signal=TERM", job)
        run.end_pause_when_told_to_stop(step)

    job = run.submit("--partition=low")
    run.wait_for_pause(before_a_loss)
    assert not unread(run)
    run.ranks()[0].kill()
    run.end_pause(before_a_loss)
    run.wait_for_event("lost")
    requeue(before_a_requeue)
    run.wait_for_pause(before_a_change)
    assert unread(run) == [("2 of 2", job), ("2 of 2", job)]
    changed = run.names[1]
    cluster.run("sh", "-c", FLIP.format(root=ROOT), machine=changed, cwd=Path("/"))
    requeue(before_a_change)
    ended = run.wait_for_end(job)
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "2"), run.said()
    assert unread(run) == [("2 of 2", job), ("2 of 2", job), ("1 of 2", job)]
    assert f"stage: {changed}: replacing a corrupt copy: " in run.output.read_text()
    assert [len(event["sent"]) for event in run.events("stage")] == [2, 0, 1]
    uninterrupted.equals(run)


def unread(run: JobRun) -> list[tuple[str, str]]:
    """What the launches, in their order, say of copies that they do not read: how many, and the job."""
    logs = sorted(run.paths.logs.glob("*.log"), key=lambda log: log.stat().st_mtime_ns)
    return [found for log in logs for found in NOT_READ.findall(log.read_text())]


def test_full_disk_of_one_node_is_named_before_anything_is_sent(allocate):
    here = allocate(2)
    one, two = here.hosts
    here.cluster.fill_tmp(two, leave_mib=9)
    done = here.forge("stage")
    here.cluster.empty_tmp(two)
    assert done.returncode == UNFIT
    assert f"staging failed on node {two}: {ROOT} has 0.01 GiB free" in done.stderr
    assert f"node {one}" not in done.stderr
    assert exclude.read(here.results / "base/bad_nodes.txt") == [two]
    assert here.content(one) == []


def test_disk_that_takes_no_more_while_sbcast_writes_is_named(allocate):
    here = allocate(2)
    one, two = here.hosts
    # Room for the folders, none for another file: free space alone does not show it.
    here.on(two, "mkdir /tmp/few; mount -t tmpfs -o size=1g,nr_inodes=6 few /tmp/few")
    here.on(one, "mkdir /tmp/few")
    done = here.forge("stage", "--machine.stage.folder=/tmp/few")
    here.on(two, "umount --lazy /tmp/few")
    assert done.returncode == UNFIT, done.stderr
    assert f"sbcast failed on node {two}: sbcast: " in done.stderr
    assert f"node {one}" not in done.stderr
    assert exclude.read(here.results / "base/bad_nodes.txt") == [two]
    assert here.on(one, f"ls /tmp/few/forge-{os.getuid()}") == ""


def test_spare_node_that_cannot_be_used_is_left_out(allocate):
    here = allocate(3)
    one, two, three = here.hosts
    here.on(two, f"mkdir /tmp/trap; ln -s /tmp/trap {ROOT}")
    strict = here.forge("stage")
    assert strict.returncode == UNFIT
    assert f"node {two}: {ROOT} is not a folder (a planted link?)" in strict.stderr
    facts = here.stage("--nodes=2")
    assert facts["sent"] == [one, three] == list(facts["folders"])
    assert here.on(two, "ls /tmp/trap") == ""


def test_node_whose_slurmd_hangs_is_named_and_holds_up_nobody(allocate):
    here = allocate(2)
    one, two = here.hosts
    code = (
        "import json; from forge.slurm import slurm; from forge.hosts.nodes import NodePool, hello\n"
        "from forge.hosts.placement import Placement\n"
        "job = slurm.this_job()\n"
        "with NodePool(Placement(job.nodes, job), start_sec=5) as pool:\n"
        "    answers = pool.ask(hello, timeout_sec=20)\n"
        "print(json.dumps({h: str(a) for h, a in answers.items()}))\n"
    )
    here.on(two, "pkill -STOP -x slurmd")
    try:
        environment = {"SLURM_JOB_ID": here.job}
        done = here.cluster.run(sys.executable, "-c", code, env=environment, timeout=60)
    finally:
        here.on(two, "pkill -CONT -x slurmd")
    answers = json.loads(done.stdout)
    assert f"host='{one}'" in answers[one]
    assert "no answer to 'hello' within 5 s" in answers[two]
    left = here.on(one, "pgrep -f 'forge[.]node' || true")
    assert left == ""


# --- the project itself ----------------------------------------------------------------------------


@pytest.fixture
def lean_project(shared_folder: Path) -> Path:
    """A folder with Forge's code and an environment that has only what its nodes' part needs."""
    project = shared_folder / "project"
    shutil.copytree(REPOSITORY / "forge", project / "forge")
    make = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(project / ".venv")]
    subprocess.run(make, check=True)
    target = project / ".venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for path in _imported_packages():
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, target / path.name)
    (target / "__editable__.forge.pth").write_text(f"{project}\n")
    return project


def _imported_packages() -> list[Path]:
    """Top folders and files in site-packages behind the command and a node, with their libraries."""
    site = Path(sysconfig.get_path("purelib"))
    code = (
        "import sys, forge.cli, forge.data.inputs, forge.staging.stage, forge.run.train\n"
        "import forge.node_agent, forge.worker\n"
        "files = [getattr(m, '__file__', None) or '' for m in list(sys.modules.values())]\n"
        "print(*files, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    paths = {Path(line) for line in done.stdout.split()}
    tops = {site / p.relative_to(site).parts[0] for p in paths if p.is_relative_to(site)}
    libraries = {site / f"{top.name}.libs" for top in tops} & set(site.iterdir())
    return sorted(top for top in tops | libraries if not top.name.startswith("__editable__"))


INSPECT = """
import sys, forge.node_agent
print(forge.__file__)
project = sys.argv[1]
print([path for path in sys.path if path.startswith(project)])
print([line for line in open("/proc/self/maps") if project in line])
"""


def test_node_that_does_not_see_the_project_gets_it(allocate, lean_project):
    here = allocate(2)
    blind = here.hosts[1]
    here.cluster.hide(blind, lean_project)
    python = lean_project / ".venv" / "bin" / "python"
    missing = here.forge("stage", python=python, cwd=lean_project)
    assert missing.returncode == UNFIT
    assert f"node {blind}: its process ended" in missing.stderr
    facts = here.stage("--machine.stage.project=true", python=python, cwd=lean_project)
    here.cluster.unhide(blind, lean_project)
    assert facts["sent"] == here.hosts
    for host in here.hosts:
        # From within the project, and with it in the environment: the staged one does not look.
        found = here.cluster.run(
            *(facts["python"], "-c", INSPECT, lean_project),
            machine=host,
            cwd=lean_project,
            env={"PYTHONPATH": str(lean_project)},
        )
        code, *reads = found.stdout.splitlines()
        assert code.startswith(f"{ROOT}/job-{here.job}/project-")
        assert reads == ["[]", "[]"]
    assert (
        "project and Python"
        not in here.stage("--machine.stage.project=true", python=python)["said"]
    )


IMPORTS = """
import json, sys
from forge.core.config import ResolvedConfig, checked
from forge.core.project_plugins import folder_of
values = json.loads(sys.argv[1])
config = checked(ResolvedConfig, values, "config.json")
print(type(config.model).__module__, folder_of(values["ids"]["plugins"]["twin"]))
"""


def test_nodes_that_do_not_see_the_project_have_its_plugin(allocate, lean_project, tiny_config):
    here = replace(allocate(2), config=lean_project / "config.yaml")
    write_plugin(lean_project / "plugins/twin")
    values = yaml.safe_load(tiny_config.read_text())
    values["model"]["architecture"] = "twin"
    here.config.write_text(yaml.safe_dump({**values, "plugins": ["plugins/twin"]}))
    python = lean_project / ".venv/bin/python"
    facts = here.stage("--machine.stage.project=true", python=python, cwd=lean_project)
    [copy] = (lean_project / ".snakemake/forge/plugins").iterdir()
    ids = {"tokenizer": "a" * 12, "tokens": "b" * 12, "plugins": {"twin": copy.name}}
    recorded = json.dumps({"model": values["model"], "ids": ids})
    blind = here.hosts[1]
    here.cluster.hide(blind, lean_project)
    try:
        found = here.cluster.run(
            *(facts["python"], "-c", IMPORTS, recorded), machine=blind, cwd=Path("/")
        )
    finally:
        here.cluster.unhide(blind, lean_project)
    module, folder = found.stdout.split()
    assert module == "forge_plugin_twin.hooks"
    assert Path(folder).parent.name == STAGED.name and "job-" in folder


def test_nodes_that_do_not_see_the_project_make_the_checks_of_its_plugin(
    allocate, lean_project, tiny_config
):
    here = replace(allocate(2), config=lean_project / "config.yaml")
    plugin = write_documented(lean_project, "plugins/lab_node.py")
    blind = here.hosts[1]
    # Where its code was read from, in place of what it looks for.
    text = plugin.read_text().replace(
        "os.path.ismount(SCRATCH)", f"os.uname().nodename != {blind!r}"
    )
    plugin.write_text(text.replace('f"{SCRATCH} is not mounted"', "__file__"))
    values = yaml.safe_load(tiny_config.read_text())
    here.config.write_text(yaml.safe_dump({**values, "plugins": ["plugins/lab_node.py"]}))
    given = {"python": lean_project / ".venv/bin/python", "cwd": lean_project}
    here.stage("--machine.stage.project=true", **given)
    here.cluster.hide(blind, lean_project)
    try:
        done = here.forge("preflight", "--machine.stage.project=true", **given)
    finally:
        here.cluster.unhide(blind, lean_project)
    assert done.returncode == UNFIT, done.stderr
    assert f"scratch: {ROOT}/job-{here.job}/" in done.stderr and f"/{STAGED.name}/" in done.stderr


# --- another training program ----------------------------------------------------------------------

NAMES = ("one.txt", "größe/two words.txt")  # of inputs, whose content is their name
READS = """
import json, os, socket, sys
from pathlib import Path
from named import contents  # a module beside this one

saw = {
    **{"host": socket.gethostname(), "cwd": str(Path.cwd()), "python": sys.executable},
    **{"data": os.environ["FORGE_DATA"], "content": contents(Path(os.environ["FORGE_DATA"]))},
    "shared": [path for path in sys.argv[1:] if any(Path(path).iterdir())],
}
Path(os.environ["FORGE_RUN"], f"saw-{os.environ['RANK']}.json").write_text(json.dumps(saw))
if os.environ["RANK"] == "0":
    Path(os.environ["FORGE_CHECKPOINTS"], "checkpoint-1.json").write_text("{}")
"""
CONTENTS = """
def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
"""


def write_program(folder: Path, *hidden: Path) -> Path:
    """A program, its inputs and its config. hidden: directories that its ranks must not see."""
    for name, text in (("train.py", READS), ("named.py", CONTENTS), ("key.pem", "secret")):
        (folder / "source").mkdir(exist_ok=True)
        (folder / "source" / name).write_text(text)
    for name in NAMES:
        (folder / "inputs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "inputs" / name).write_text(name)
    source, inputs = folder / "source", folder / "inputs"
    program = {
        "command": ["python", "train.py", *map(str, (source, inputs, *hidden))],
        **{"source": str(source), "inputs": [str(inputs)], "goal": 1},
        "checkpoints": {"pattern": "checkpoint-{step}.json"},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"data": str(folder / "data"), "program": program}))
    return config


def test_program_runs_on_nodes_that_see_neither_its_source_nor_its_inputs(
    allocate, lean_project, shared_folder
):
    hidden = [lean_project, shared_folder / "source", shared_folder / "inputs"]
    config = write_program(shared_folder, lean_project)
    here = replace(allocate(2), config=config)
    lean = {"python": lean_project / ".venv" / "bin" / "python"}
    options = ("--machine.stage.project=true", "--program.stop.grace_sec=20")
    here.make_inputs(lean["python"])
    for host in here.hosts:
        for folder in hidden:
            here.cluster.hide(host, folder)
    try:
        facts = here.stage(*options, **lean)
        done = here.forge("train", *options, **lean)
    finally:
        for host in here.hosts:
            for folder in hidden:
                here.cluster.unhide(host, folder)
    assert done.returncode == 0, done.stderr
    assert (facts["sent"], facts["bytes"]) == (here.hosts, sum(len(n.encode()) for n in NAMES))
    own = f"{ROOT}/job-{here.job}"
    for rank, host in enumerate(here.hosts):
        saw = json.loads((here.results / f"base/saw-{rank}.json").read_text())
        assert (saw["host"], saw["data"]) == (host, f"{own}/{facts['digest'][:32]}/data")
        assert saw["content"] == {name: name for name in NAMES}
        assert saw["cwd"].startswith(f"{own}/source-") and saw["python"].startswith(own)
        assert saw["shared"] == []
        assert here.content(host) == []
    seal = json.loads((here.results / "base/checkpoints/checkpoint-1.json.forge.json").read_text())
    assert seal["lineage"]["source"]["digest"] == source_digest(shared_folder / "source")


def test_auto_copies_the_project_to_the_node_that_does_not_see_it(
    allocate, lean_project, shared_folder
):
    config = write_program(shared_folder, lean_project)
    here = replace(allocate(2), config=config)
    lean = {"python": lean_project / ".venv" / "bin" / "python"}
    options = ("--machine.stage.project=auto", "--program.stop.grace_sec=20")
    here.make_inputs(lean["python"])
    seeing, blind = here.hosts
    everywhere = here.stage(*options, **lean)
    assert f"stage: {seeing}, {blind}: proj=ok pkgs=ok source=ok\n" in everywhere["said"]
    assert (everywhere["python"], everywhere["source"]) == (None, "")
    hidden = [lean_project, shared_folder / "source"]
    for folder in hidden:
        here.cluster.hide(blind, folder)
    try:
        facts = here.stage(*options, **lean)
        done = here.forge("train", *options, **lean)
    finally:
        for folder in hidden:
            here.cluster.unhide(blind, folder)
    assert f"stage: {seeing}: proj=ok pkgs=ok source=ok\n" in facts["said"]
    assert f"stage: {blind}: proj=missing pkgs=missing source=missing\n" in facts["said"]
    for part in ("python", "project", "source"):
        assert re.search(rf"stage: {part} \(.* MiB\) on {blind} in ", facts["said"])
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((here.results / f"base/saw-{rank}.json").read_text()) for rank in (0, 1)
    )
    assert (first["host"], second["host"]) == (seeing, blind)
    assert first["cwd"] == str(shared_folder / "source")
    assert second["cwd"].startswith(f"{ROOT}/job-{here.job}/source-")
    assert second["shared"] == [str(shared_folder / "inputs")]
    assert all(here.content(host) == [] for host in here.hosts)
