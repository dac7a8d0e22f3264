"""What the Snakefile uses of Forge: runs, resources of allocations, and the environment of rules."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Any

from forge.checkpoint import compatibility, parent, resume
from forge.cluster import exclude, jobs, submission
from forge.cluster.job_requests import requests_of
from forge.cluster.lock import WORKFLOW_LOCK, lock
from forge.cluster.placement import (
    WorldLayout,
    allocation_resources,
    check_layout,
    refuse_unknown,
    sbatch_options,
)
from forge.core.config import Config, ResolvedConfig, checked, read_values
from forge.core.errors import ConfigError, TrainingError, UnfitError
from forge.core.files import canonical, digest_bytes, read_json, write_json
from forge.core.machine import Machine, load_machine
from forge.core.paths import CONFIG, WORKFLOW, WORKFLOW_RUNS, RunPaths
from forge.core.records import WorkflowRuns
from forge.core.sample_sheet import run_configs, shared_folders
from forge.core.terminal import say
from forge.data.content_ids import resolve
from forge.reporting.workflow_end import print_end
from forge.run import train

SHEET = "config/runs.tsv"
LOCAL_MACHINE = "profiles/local/machine.yaml"  # without a profile; beside the workflow
ALLOCATION = jobs.ALLOCATION
# Names the file with the runs as they were submitted, for the Snakemake inside a job.
SUBMITTED = "FORGE_SUBMITTED"
QUEUE_POLL_SEC = 10.0
BEFORE_FIT_MIN = 10  # time limit of stage, and of preflight


def prepare_environment() -> None:
    """Let rules call the `forge` that belongs to this Snakemake, and know that they are rules.

    Works where no environment is activated. A verb in a workflow stops when its Snakemake is killed.
    Snakemake sets OMP_NUM_THREADS in every rule, so the user's own is kept under another name.
    """
    environ = os.environ
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["FORGE_IN_WORKFLOW"] = "1"
    environ.setdefault("FORGE_USER_OMP_NUM_THREADS", environ.get("OMP_NUM_THREADS", ""))


def read_config(settings: Any) -> dict[str, Any]:
    """config.yaml with what Snakemake's options --configfile and --config set in it.

    settings: Snakemake's ConfigSettings. Read by Forge and not by Snakemake's `configfile:`, which
    would read some values in another way than every other place (`010` as 8, YAML 1.1), and would read
    a file of 300 bytes for minutes. Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    if not settings.replace_workflow_config and (Path(CONFIG).exists() or not settings.configfiles):
        merged = read_values(CONFIG)
    for values in (*map(read_values, settings.configfiles), settings.config):
        _merge(merged, values)
    return merged


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def read_runs(settings: Any, *, main: bool) -> dict[str, ResolvedConfig]:
    """Run name -> resolved config, for every row of the sheet (key `runs`, else config/runs.tsv).

    settings: as for `read_config`. main: False for the Snakemake inside a job, which goes on with the
    runs as they were submitted: the config may have been edited while the job was in the queue.

    Raises ForgeError for a bad config or sheet, for a run that cannot resume from its checkpoint, and for
    a new one that cannot start from its parent's:
    refused here, since Snakemake removes a rule's outputs before it starts the rule.
    """
    if not main and SUBMITTED in os.environ:
        path = Path(os.environ[SUBMITTED])
        submitted: dict[str, Any] = read_json(path)["submitted"]
        return {
            name: checked(ResolvedConfig, values, "the job") for name, values in submitted.items()
        }
    base = read_config(settings)
    sheet = str(base.pop("runs", SHEET))
    runs = {name: resolve(config) for name, config in run_configs(base, sheet).items()}
    shared_folders(runs)
    parent.refuse_circles(runs)
    for name, config in runs.items():
        paths = RunPaths.of(config)
        checkpoint = resume.check_resumable(config, paths)
        # A finished run needs no parent any more, even where its checkpoints were removed.
        if checkpoint is None and not paths.fit.exists():
            parent.find(config)
        for line in compatibility.schedule_warnings(config, checkpoint) if main else ():
            say(f"{name}: {line}")
    return runs


def known_failures(runs: dict[str, ResolvedConfig]) -> dict[str, str]:
    """Run name -> what `forge train` would say at once, for the runs whose config has failed before.

    Told here, such a run costs no allocation, and the other runs of the sheet are trained.
    """
    found = {}
    for name, settings in runs.items():
        # What rules of the allocation read: config_run leaves the sections of later rules out.
        written = checked(ResolvedConfig, json.loads(science(settings)), name)
        try:
            train.refuse_known_failure(written, RunPaths.of(settings))
        except TrainingError as err:
            found[name] = str(err)
    return found


def keep_for_jobs(runs: dict[str, ResolvedConfig]) -> None:
    """Write the runs down as they are now, and tell this Snakemake's jobs where."""
    values = {"submitted": {name: settings.to_json() for name, settings in runs.items()}}
    path = WORKFLOW / f"submitted-{digest_bytes(canonical(values))[:16]}.json"
    if not path.exists():
        write_json(path, values)
    os.environ[SUBMITTED] = str(path)


def write_down(runs: dict[str, ResolvedConfig]) -> None:
    """Let `forge status`, `logs`, `show` and `export` find these runs, whatever set `results`."""
    folders = {name: str(RunPaths.of(settings).root) for name, settings in runs.items()}
    WorkflowRuns(folders=folders).write(WORKFLOW_RUNS)


def end_with_table(workflow: Any, runs: dict[str, ResolvedConfig]) -> None:
    """Make a table of these runs the last lines of this Snakemake, however it ends: Snakemake's own
    handlers are not called where nothing is left to do, and print more after them. Not in a dry run.
    """
    project = Path.cwd()  # Snakemake goes back to where it was called before it ends (--directory)

    def end() -> None:
        # Without an executor it was asked for something else, such as --dag or --unlock.
        if workflow.executor_plugin and not (workflow.dryrun or workflow.touch):
            with suppress(OSError), chdir(project):  # the reader of our output may have left
                print_end([RunPaths.of(settings) for settings in runs.values()])

    atexit.register(end)


def check_submission(dag: Any, folders: Iterable[str], say: Callable[[str], None]) -> None:
    """ConfigError for a job of Snakemake's plan that Slurm could never start. folders: that nodes must
    see, beside the project's."""
    submission.check_folders([Path.cwd(), *map(Path, folders)], say)
    due = dag.needrun_jobs()
    submission.check(requests_of({dag.get_job_group(job) or job for job in due}), say)


# --- the allocation --------------------------------------------------------------------------------


class Allocation:
    """Resources of the rules that share an allocation, from what the profile sets for `fit`.

    Raises ConfigError for what could not work on any cluster.
    """

    def __init__(
        self, resources: Mapping[str, Any], runs: dict[str, ResolvedConfig], workflow_folder: str
    ) -> None:
        """workflow_folder: of the Snakefile, beside which the profiles lie."""
        self.fit, self._runs = {name: _plain(value) for name, value in resources.items()}, runs
        local = os.path.relpath(Path(workflow_folder).parent / LOCAL_MACHINE)
        machine = self.fit.get("machine", local)
        self.machine: Machine = load_machine(machine)
        self._made = {"machine": machine, **allocation_resources(self.fit, self.machine)}

    @property
    def whole(self) -> dict[str, Any]:
        """For stage and preflight: all nodes, spare ones too. In a group, times add up."""
        return {**self._made, "train_nodes": self.train_nodes, "runtime": BEFORE_FIT_MIN}

    @property
    def own(self) -> dict[str, Any]:
        """For fit: what the profile does not set itself."""
        return {n: v for n, v in self._made.items() if n not in self.fit} | {
            "train_nodes": self.train_nodes
        }

    @property
    def train_nodes(self) -> int:
        return int(self.fit.get("nodes", 1))

    def slurm_extra(self, run: str) -> str:
        """More options for sbatch, with the nodes that this run found unfit left out."""
        bad = exclude.read(RunPaths.of(self._runs[run]).bad_nodes)
        return sbatch_options(self.machine, self._made["tasks_per_node"], bad)

    def check_profile(self, defaults: Mapping[str, Any] | None, custom: Collection[str]) -> None:
        """ConfigError for lines of a shipped profile that were not edited, and for names in fit that
        no resource has. custom: resources that the user gave a limit for (--resources)."""
        for place, values in (("default-resources", defaults or {}), ("fit", self.fit)):
            for name, value in values.items():
                if str(_plain(value)).startswith("EDIT_"):
                    raise ConfigError(
                        f"the profile still says {name}: {_plain(value)} ({place})",
                        fix="edit this line in config.yaml of the profile: your account, and"
                        " partitions as `sinfo` lists them",
                    )
        refuse_unknown(self.fit, custom)

    def check_runs(self, due: Iterable[Any], failed: Mapping[str, str]) -> None:
        """ConfigError for a run whose batch these ranks cannot share, TrainingError for a known failure
        whose training was asked for by file name. due: jobs that will run."""
        due = list(due)
        for job in due:
            if job.rule.name == "fit" and job.wildcards.run in failed:
                raise TrainingError(f"run {job.wildcards.run}: {failed[job.wildcards.run]}")
        layout = WorldLayout(self.train_nodes, self._made["tasks_per_node"])
        allocated = [job for job in due if job.rule.name in jobs.ALLOCATION_RULES]
        for name in dict.fromkeys(job.wildcards.run for job in allocated):
            try:
                check_layout(self.machine, layout, self._runs[name])
            except ConfigError as err:
                raise ConfigError(f"run {name}: {err.what}", cause=err.cause, fix=err.fix) from None

    def take_over(self, say: Callable[[str], None], *, submits: bool) -> None:
        """Look after these runs until this Snakemake ends, as the only one.

        A second command must not start a second trainer: a living Snakemake that does the same, or a
        job that still trains one of the runs (a killed Snakemake leaves its jobs behind), is named and
        refused, or waited for (slurm.when_running). Raises UnfitError.
        """
        waited = False
        while True:
            try:
                with ExitStack() as held:
                    for settings in self._runs.values():
                        root = RunPaths.of(settings).root
                        held.enter_context(lock(root, "snakemake", name=WORKFLOW_LOCK))
                    if submits:
                        _refuse_queued(self._runs)
                    if not waited:
                        atexit.register(held.pop_all().close)
                        return
                # What has to run is not what it was: begin anew.
                os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])
            except UnfitError as err:
                if self.machine.slurm.when_running == "stop":
                    raise
                say(f"waiting: {err.what}")
                waited = True
                time.sleep(QUEUE_POLL_SEC)


def _plain(value: Any) -> Any:
    """A resource of the profile as a number or text: on Snakemake's command line all are texts."""
    raw = getattr(value, "raw", value)
    return int(raw) if isinstance(raw, str) and raw.isdigit() else raw


def _refuse_queued(runs: dict[str, ResolvedConfig]) -> None:
    if found := _jobs_of(runs):
        raise UnfitError(
            "; ".join(f"job {job.id} ({job.state}) trains {run}" for run, job in found),
            cause="an earlier Snakemake was killed, or the same command was given twice",
            fix=f"wait for it, or end it: scancel {' '.join(job.id for _, job in found)}\n"
            "         (slurm.when_running: wait in machine.yaml waits and goes on)",
        )


def _jobs_of(runs: dict[str, ResolvedConfig]) -> list[tuple[str, jobs.QueuedJob]]:
    """Jobs in the queue that this project submitted for one of these runs."""
    queue = jobs.read_queue([os.getuid()])
    found = ((name, jobs.of_run(queue, name, set(), Path.cwd())) for name in runs)
    return [(name, job) for name, job in found if job]


# --- what rules are given --------------------------------------------------------------------------


def science(config: Config) -> str:
    """The config without the sections of what comes after training, as one line of JSON."""
    values = config.to_json()
    kept = {name: values[name] for name in values if name not in ("validate", "report")}
    return json.dumps(kept, sort_keys=True)


def overrides(config: Config, *names: str) -> list[str]:
    """Sections of a config as arguments of a verb."""
    values = config.to_json()
    return [f"--{name}={json.dumps(values[name], sort_keys=True)}" for name in names]


def resumable_steps(runs: dict[str, ResolvedConfig]) -> dict[str, int]:
    """Run name -> step of its checkpoint, for the runs that have one."""
    found = {name: resume.check_resumable(c, RunPaths.of(c)) for name, c in runs.items()}
    return {name: checkpoint.step for name, checkpoint in found.items() if checkpoint}


def remove_stop_files(runs: dict[str, ResolvedConfig], say: Callable[[str], None]) -> None:
    """Let runs go on that a STOP file has stopped."""
    for config in runs.values():
        stop = RunPaths.of(config).stop
        if stop.exists():
            stop.unlink()
            say(f"removed {stop}")
