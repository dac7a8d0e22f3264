"""A real Slurm of several machines on this one: start and stop it, ask it, restart its daemons."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from .faults import BreakableMachines
from .machines import RACK, REPOSITORY, ClusterError, own_folder, wait_until
from .settings import CONTROLLER, Settings, other_files, slurm_conf

PACKAGES = "slurm-wlm slurmdbd slurm-wlm-mysql-plugin munge mariadb-server iproute2 procps"
PROGRAMS = (
    "slurmctld slurmd slurmdbd sinfo munged mariadbd mariadb-install-db ip tc unshare nsenter pgrep"
)
SETTINGS = TypeAdapter(Settings)  # settings.json
DAEMONS = {"slurmdbd": ("sacctmgr", "-n", "list", "user"), "slurmctld": ("scontrol", "ping")}


def base_folder() -> Path:
    """Directory of the clusters' state, FORGE_SLURM_DIR or /var/tmp/forge-slurm. Raises as own_folder."""
    return own_folder(Path(os.environ.get("FORGE_SLURM_DIR") or "/var/tmp/forge-slurm").absolute())


def why_not() -> str | None:
    """Why no cluster can run on this machine, with what to do; None if one can."""
    if sys.platform != "linux":
        return f"the Slurm cluster is made of Linux namespaces, this is {sys.platform}"
    if os.geteuid() != 0:
        return "the Slurm cluster makes namespaces and network links: run as root"
    if missing := [program for program in PROGRAMS.split() if not shutil.which(program)]:
        return (
            f"the Slurm cluster needs {', '.join(missing)}. On Debian: "
            f"apt-get install -y --no-install-recommends {PACKAGES}"
        )
    return None


class Cluster(BreakableMachines):
    """The cluster whose state is in `folder`. Several processes may have an object for it."""

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        """`settings` are for a new start: while the cluster is up, it keeps those it has."""
        super().__init__(folder, settings or Settings())
        if self.is_up():
            self.settings = SETTINGS.validate_json((self.folder / "settings.json").read_bytes())
        self.nodes = self.settings.node_names

    # ------------------------------------------------------------------ start and stop

    def up(self) -> None:
        """Start what does not run; return when each node is idle. A new start forgets all jobs."""
        if reason := why_not():
            raise ClusterError(reason)
        is_new = not self.is_up()
        if is_new:
            self._make_folder()
            self.start_rack()
        for name in self.settings.machine_names:
            self.start(name)
        for name in self.settings.machine_names:
            self.wait_ready(name)
        if is_new:
            self._fill_accounting()
        self.wait_until_idle()

    def down(self) -> None:
        """Stop everything at once. Logs stay, and what jobs wrote to shared paths."""
        self.cut_all()

    def _make_folder(self) -> None:
        for name in ("etc", "gpus", "machines", "mysql", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        machines = (f"machines/{name}" for name in (RACK, *self.settings.machine_names))
        for name in ("etc", "gpus", "state", *machines):
            (self.folder / name).mkdir(parents=True)
        most = max(kind.num_gpus for kind in self.settings.kind_of.values())
        for number in range(most):  # the device of /dev/null
            device = self.folder / "gpus" / f"nvidia{number}"
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        self._write_etc()
        shutil.copytree(_empty_database(), self.folder / "mysql")
        (self.folder / "settings.json").write_bytes(SETTINGS.dump_json(self.settings))

    def _write_etc(self) -> None:
        etc = self.folder / "etc"
        files = other_files(self.settings, self.folder)
        for name, text in {**files, "slurm.conf": slurm_conf(self.settings, self.folder)}.items():
            (etc / name).write_text(text)
        (etc / "munge.key").write_bytes(secrets.token_bytes(1024))
        for name in ("munge.key", "slurmdbd.conf"):  # else their daemons refuse to start
            (etc / name).chmod(0o600)

    def _fill_accounting(self) -> None:
        for words in self.settings.accounting:
            self.run("sacctmgr", "-i", *words)

    # ------------------------------------------------------------------ ask Slurm

    def submit(
        self, *arguments: str | Path, cwd: Path = REPOSITORY, env: dict[str, str] | None = None
    ) -> str:
        """The id of the new job. Arguments are those of sbatch."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).stdout.strip()

    def squeue(self) -> list[dict[str, str]]:
        """The jobs in the queue: id, name, state, partition, nodes, those asked for, reason."""
        keys = ("id", "name", "state", "partition", "nodes", "asked_nodes", "reason")
        lines = self.run("squeue", "-h", "-a", "-o", "%i|%j|%T|%P|%N|%n|%r").stdout.splitlines()
        return [dict(zip(keys, line.split("|"), strict=True)) for line in lines]

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`, such as JobState, Restarts, NodeList, RunTime."""
        return fields(self.run("scontrol", "show", "job", job_id).stdout)

    def node(self, name: str) -> dict[str, str]:
        """Fields of `scontrol show node`, such as State and Reason."""
        return fields(self.run("scontrol", "show", "node", name).stdout)

    def wait_for_state(self, job_id: str, states: str, timeout: float = 60) -> dict[str, str]:
        """Wait until the job is in one of the states ("PENDING REQUEUED"); what job() says then."""
        last: dict[str, str] = {}

        def arrived() -> bool:
            last.update(self.job(job_id))
            return last["JobState"] in states.split()

        wait_until(arrived, timeout, f"{states}: job {job_id}", lambda: str(last), every=0.5)
        return last

    def wait_until_idle(self, nodes: Iterable[str] = (), timeout: float = 60) -> None:
        """Wait until the nodes (none named: all) answer and have no job."""
        wanted = ",".join(nodes) or ",".join(self.nodes)
        states: dict[str, str] = {}

        def idle() -> bool:
            # Not sinfo: it may call a node mixed for minutes whose last job ended seconds before the
            # node was set down (22.05). A node that does not answer is IDLE+NOT_RESPONDING.
            said = self.run("scontrol", "show", "node", "--oneliner", wanted).stdout
            states.update(re.findall(r"NodeName=(\S+) .*? State=(\S+)", said))
            return bool(states) and set(states.values()) == {"IDLE"}

        wait_until(idle, timeout, f"idle: {wanted}", lambda: str(states), every=0.2)

    # ------------------------------------------------------------------ the controller

    def stop_daemon(self, name: str) -> None:
        """Stop slurmctld or slurmdbd; MariaDB stays."""
        pid = self.run("cat", f"/run/{name}.pid").stdout.strip()
        self.run("kill", pid)
        alive = ("test", "-e", f"/proc/{pid}")
        wait_until(
            lambda: self.run(*alive, check=False).returncode, 20, f"stopped: {name}", every=0.2
        )

    def start_daemon(self, name: str) -> None:
        """Start slurmctld or slurmdbd; return when it answers."""
        self.run(name)

        def answers() -> bool:
            answer = self.run(*DAEMONS[name], check=False)
            return answer.returncode == 0 and "DOWN" not in answer.stdout

        wait_until(answers, 60, f"answering: {name}", every=0.2)

    def restart_slurmctld(self) -> None:
        self.stop_daemon("slurmctld")
        self.start_daemon("slurmctld")

    def configure(self, **changes: object) -> None:
        """Replace top-level keys of slurm.conf, such as SlurmdTimeout=300; none: as at the start."""
        new = self.folder / "etc/slurm.conf.new"
        new.write_text(slurm_conf(self.settings, self.folder, changes))
        new.replace(self.folder / "etc/slurm.conf")
        self.run("scontrol", "reconfigure")

    # ------------------------------------------------------------------ repair

    def repair(self, nodes: Iterable[str]) -> None:
        """The nodes as after a first start: nothing broken, /tmp empty, no job on them and none
        in the queue that asked for them."""
        names = list(nodes)
        self._cancel_jobs(set(names))
        which = f"NodeName={','.join(names)}"
        # Down, a node ends its jobs at once; else Slurm asks for 30 s whether they have ended.
        # Each comes back with its next registration, that is, after its boot.
        self.run("scontrol", "update", which, "State=DOWN", "Reason=repair")
        for name in names:  # a reboot takes 0.1 s and forgets every fault
            self.power_cut(name)
            self.start(name)
        for name in names:
            self.wait_ready(name)
        self.wait_until_idle(names)

    def repair_all(self) -> None:
        """Everything as after a first start: daemons, configuration, queue, nodes."""
        self.boot(CONTROLLER)
        for name in DAEMONS:
            if self.run("pgrep", "-x", name, check=False).returncode:
                self.start_daemon(name)
        self.configure()
        self.run("scancel", "--user", "root")
        self.repair(self.nodes)

    def _cancel_jobs(self, nodes: set[str]) -> None:
        for job in self.squeue():
            its = ",".join(filter(None, (job["nodes"], job["asked_nodes"])))
            if its and nodes & set(self.run("scontrol", "show", "hostnames", its).stdout.split()):
                self.run("scancel", job["id"], check=False)  # it may have ended by itself


def _empty_database() -> Path:
    """The files of a MariaDB without tables. Making them takes seconds, so they are kept."""
    version = subprocess.check_output(["mariadbd", "--version"], text=True).split()[2]
    kept = base_folder() / f"empty-mariadb-{version}"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        fresh = Path(folder) / "empty"
        fresh.mkdir()
        command = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={fresh}"]
        # As MariaDB starts, it removes all temporary tables in its folder, which would else be /tmp:
        # also those of another one that starts at the same time, which fails then.
        command.append(f"--tmpdir={fresh}")
        options = (
            "--skip-test-db --auth-root-authentication-method=normal --innodb-log-file-size=8M"
        )
        done = subprocess.run(
            [*command, *options.split()], capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        with contextlib.suppress(OSError):  # somebody else was quicker
            fresh.rename(kept)
    return kept


def fields(text: str) -> dict[str, str]:
    """Slurm's `Key=value Other=value with blanks` as a dictionary."""
    words = re.split(r"\s+(?=[A-Z][\w:/]*=)", text.strip())
    return dict(word.split("=", 1) for word in words if "=" in word)
