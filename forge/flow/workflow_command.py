"""Start and end of a workflow command: environment, records for its jobs, one Snakemake a run, table."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Any

from forge.core import hooks, project_plugins
from forge.core.config import (
    ResolvedConfig,
)
from forge.core.errors import ForgeError, UnfitError
from forge.core.files import (
    canonical,
    digest_bytes,
    write_json,
)
from forge.core.machine import Slurm
from forge.core.paths import (
    WORKFLOW,
    WORKFLOW_RUNS,
    RunPaths,
    place_logs,
    settings_file,
)
from forge.core.process import slurm_start_variable
from forge.core.records import RunSettings, WorkflowRuns
from forge.flow.runs import SUBMITTED
from forge.hosts.lock import WORKFLOW_LOCK, lock
from forge.reporting.workflow_output import print_end
from forge.slurm import adopt, jobs
from forge.slurm.slurm import settle_in_batch_step

QUEUE_POLL_SEC = 10.0


def prepare_environment() -> None:
    """Let rules call the `forge` that belongs to this Snakemake, and know that they are rules.

    Works where no environment is activated. A subcommand stops when its Snakemake is killed. Snakemake
    sets OMP_NUM_THREADS in every rule, so the user's own is kept under another name.
    """
    environ = os.environ
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["FORGE_IN_WORKFLOW"] = "1"
    environ.setdefault("FORGE_USER_OMP_NUM_THREADS", environ.get("OMP_NUM_THREADS", ""))
    environ.update(slurm_start_variable())
    settle_in_batch_step()
    # Else each line that Snakemake's log on a full disk does not take is a traceback on the terminal.
    logging.raiseExceptions = False


def keep_for_jobs(
    runs: dict[str, ResolvedConfig], layouts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the runs down as they are now, and tell this Snakemake's jobs where."""
    submitted = {name: config.to_json() for name, config in runs.items()}
    values: dict[str, Any] = {"submitted": submitted, "layouts": layouts}
    if used := project_plugins.used():
        values["plugins"] = used
    path = WORKFLOW / f"submitted-{digest_bytes(canonical(values))[:16]}.json"
    if not path.exists():
        write_json(path, values, private=True)  # addresses of trackers may have a password
    os.environ[SUBMITTED] = str(path)


def write_down(runs: dict[str, ResolvedConfig]) -> None:
    """Let `forge status`, `logs`, `show` and `export` find these runs, whatever set `results`; and put
    their logs where FORGE_LOG_DIR says."""
    for config in runs.values():
        place_logs(RunPaths.of(config))
    folders = {name: str(RunPaths.of(settings).root) for name, settings in runs.items()}
    WorkflowRuns(folders=folders).write(WORKFLOW_RUNS)


def keep_settings(
    runs: dict[str, ResolvedConfig],
    settings: Any,
    memory: Callable[[str], int],
    *,
    submits: bool,
) -> None:
    """Write what plugins need of each run while it trains, for the rule that trains it.
    settings: Snakemake's ResourceSettings. memory: of a run's model, in MB."""
    for name, config in runs.items():
        requests = hooks.job_requests(settings, memory(name)) if submits else {}
        kept = RunSettings(jobs=requests, **config.of_plugins)
        kept.write(settings_file(name))


def rules_due(due: Iterable[Any]) -> dict[str, list[str]]:
    """Rule -> the runs for which a job will run it, by name. due: jobs of Snakemake."""
    found: dict[str, set[str]] = {}
    for job in due:
        if "run" in job.wildcards_dict:
            found.setdefault(job.rule.name, set()).add(job.wildcards.run)
    return {rule: sorted(runs) for rule, runs in found.items()}


def end_with_table(
    workflow: Any, runs: dict[str, ResolvedConfig], end_dry_run: Callable[[], None]
) -> None:
    """Make a table of these runs the last lines of this Snakemake, however it ends: Snakemake's own
    handlers are not called where nothing is left to do, and print more after them.

    end_dry_run: called instead at the end of a dry run.
    """
    project = Path.cwd()  # Snakemake goes back to where it was called before it ends (--directory)

    def end() -> None:
        # Without an executor it was asked for something else, such as --dag or --unlock.
        if workflow.dryrun:
            with chdir(project):
                end_dry_run()
        elif workflow.executor_plugin and not workflow.touch:
            # The reader of our output may have left, and a table is no reason to end with a traceback.
            with suppress(OSError, ForgeError), chdir(project):
                print_end([RunPaths.of(settings) for settings in runs.values()])

    atexit.register(end)


def take_over(
    runs: dict[str, ResolvedConfig],
    slurm: Slurm,
    say: Callable[[str], None],
    *,
    submits: bool,
    given_in: str,
) -> None:
    """Look after these runs until this Snakemake ends, as the only one.

    A second command must not start a second trainer: a living Snakemake that does the same, or a job
    that still trains one of the runs (a killed Snakemake leaves its jobs behind), is named and refused,
    or waited for (slurm.when_running); so is one that cannot be judged from here, with what to do where
    it is dead. Raises UnfitError. submits: whether the rules become Slurm jobs. given_in: directory in
    which this command was given, and is given again after a wait.
    """
    said = ""
    name = adopt.controlled_name()
    if submits and not name and (warning := jobs.own_nodes()):
        say(warning)
    while True:
        try:
            with ExitStack() as held:
                for config in runs.values():
                    root = RunPaths.of(config).root
                    held.enter_context(lock(root, "snakemake", name=WORKFLOW_LOCK))
                if submits:
                    jobs.refuse_queued(runs, {j.id for j in adopt.adoptable(name)} if name else ())
                if not said:
                    atexit.register(held.pop_all().close)
                    return
            # Other jobs may be due now: plan again.
            os.chdir(given_in)  # words of the command may be relative paths, --directory among them
            os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])
        except UnfitError as err:
            is_of_disk = isinstance(err.__cause__, OSError)  # which no end of a job makes writable
            if slurm.when_running == "stop" or is_of_disk:
                raise
            if said != str(err):
                said = str(err)
                say(f"waiting: {said}")
            time.sleep(QUEUE_POLL_SEC)
