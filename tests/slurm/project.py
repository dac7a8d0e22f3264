"""A copy of the project where all machines see it, its profile fitted to the test cluster."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support.repository import REPOSITORY

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.inside import Inside
from tools.slurm_cluster.machines import wait_until

from .job_run import FABRIC_TIMEOUT_SEC, Progress

# What the test cluster has: one account and partition for all, little memory, few cores.
SMALL = {"slurm_partition": "main", "cpus_per_task": 1, "mem_mb": 1800, "runtime": 10}


@dataclass
class Project:
    """config/, profiles/ and workflow/ of the repository, and commands on the login node."""

    folder: Path
    cluster: Cluster
    profile: str
    commands: list[Inside] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        folder: Path,
        cluster: Cluster,
        *,
        profile: str = "slurm-cpu",
        values: dict[str, Any],
        names: list[str],
        train_run: dict[str, Any],
        machine: dict[str, Any] | None = None,
    ) -> Project:
        """values: config.yaml. names: the nodes it may use. train_run, machine: what differs from the
        profile as shipped, beside partition, memory and cores."""
        for part in ("workflow", "profiles"):
            shutil.copytree(REPOSITORY / part, folder / part)
        (folder / "config").mkdir()
        (folder / "config/config.yaml").write_text(yaml.safe_dump(values))
        (folder / "config/runs.tsv").write_text("run\nbase\n")
        project = cls(folder, cluster, profile)
        others = sorted(set(cluster.nodes) - set(names))
        project.edit_profile(train_run, {"slurm": {"exclude": others}} if others else {})
        project.keep_cpu_jobs_from(others)
        project.edit_machine(
            {"fabric": {"timeout_sec": FABRIC_TIMEOUT_SEC}, "stop_grace_sec": 30, **(machine or {})}
        )
        return project

    @property
    def profile_folder(self) -> Path:
        return self.folder / "profiles" / self.profile

    def edit_profile(self, train_run: dict[str, Any], machine: dict[str, Any]) -> None:
        path = self.profile_folder / "config.yaml"
        values = yaml.safe_load(path.read_text())
        of_train = values.setdefault("set-resources", {}).setdefault("train_run", {})
        for place in (values.get("default-resources"), of_train):
            if place is not None and "slurm_partition" in place:
                place |= {key: value for key, value in SMALL.items() if key in place}
        values.get("default-resources", {}).update(slurm_account="root")
        values["set-threads"] = dict.fromkeys(values.get("set-threads", {}), 2)
        of_train |= train_run
        path.write_text(yaml.safe_dump(values))
        self.edit_machine(machine)

    def keep_cpu_jobs_from(self, others: list[str]) -> None:
        """Jobs of rules without an allocation would be killed on nodes that another case repairs."""
        path = self.profile_folder / "config.yaml"
        values = yaml.safe_load(path.read_text())
        if others and "default-resources" in values:
            values["default-resources"]["slurm_extra"] = f"'--exclude={','.join(others)}'"
            path.write_text(yaml.safe_dump(values))

    def edit_machine(self, changes: dict[str, Any]) -> None:
        """Merge sections into the profile's machine.yaml."""
        path = self.profile_folder / "machine.yaml"
        values = yaml.safe_load(path.read_text())
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump(values))

    def excluded(self) -> list[str]:
        """The nodes of other cases."""
        machine = yaml.safe_load((self.profile_folder / "machine.yaml").read_text())
        return list(machine.get("slurm", {}).get("exclude", []))

    def start(
        self, target: str = "train", *arguments: str, env: dict[str, str] | None = None
    ) -> Inside:
        """`snakemake --profile … target` on the login node, its output in a file."""
        command = self.cluster.popen(
            *("bash", "-c", 'exec snakemake "$@" > "$0" 2>&1'),
            self.folder / f"snakemake{len(self.commands)}.out",
            *("--profile", f"profiles/{self.profile}", target, *arguments),
            cwd=self.folder,
            env=env,
        )
        self.commands.append(command)
        return command

    def output(self, number: int = -1) -> str:
        """What a command printed so far."""
        outputs = sorted(self.folder.glob("snakemake*.out"))
        return outputs[number].read_text() if outputs else ""

    def end(self, command: Inside, timeout: float = 400) -> int:
        """The exit status of a command."""
        wait_until(
            lambda: command.poll() is not None,
            timeout,
            "the end of snakemake",
            self.said,
            every=0.2,
        )
        return int(command.returncode)

    def said(self) -> str:
        return "\n".join(run.said() for run in self.runs()) + self.output()[-3000:]

    def runs(self) -> list[Progress]:
        return [Progress(path.parent) for path in self.folder.glob("results/*/config.json")]

    def run(self, name: str = "base") -> Progress:
        return Progress(self.folder / "results" / name)

    def submitted(self) -> list[str]:
        """Slurm's ids of the jobs that Snakemake has submitted, all commands together."""
        text = "".join(path.read_text() for path in sorted(self.folder.glob("snakemake*.out")))
        return re.findall(r"submitted with SLURM jobid (\d+)", text)

    def wait_for_job(self, count: int = 1, timeout: float = 60) -> str:
        wait_until(lambda: len(self.submitted()) >= count, timeout, "a job", self.said, every=0.1)
        return self.submitted()[count - 1]
