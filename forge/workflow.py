"""Functions that the Snakefile uses: the runs, the files that rules and jobs read, one Snakemake a
run."""

from __future__ import annotations

import atexit
import difflib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint import family
from forge.core import hooks
from forge.core.config import (
    CONFIG,
    OF_FORGES_TRAINER,
    Config,
    ResolvedConfig,
    checked,
    read_values,
    use_plugins,
)
from forge.core.errors import ConfigError, TrainingError, UnfitError
from forge.core.files import (
    canonical,
    digest_bytes,
    disk_trouble,
    read_json,
    read_object_or_empty,
    write_json,
)
from forge.core.machine import Slurm
from forge.core.paths import (
    SHEET,
    WORKFLOW,
    WORKFLOW_RUNS,
    RunPaths,
    inputs_folder,
    model_folder,
    place_logs,
    settings_file,
    tokenizer_folder,
    tokens_folder,
)
from forge.core.process import slurm_start_variable
from forge.core.records import RunSettings, WorkflowRuns
from forge.core.sample_sheet import read_rows, run_configs, shared_folders
from forge.core.terminal import say
from forge.data.content_ids import resolve, single_corpora
from forge.hosts.allocation import (
    OF_COMMAND,
    Allocation,
    command_resources,
    plain,
    run_layouts,
)
from forge.hosts.lock import WORKFLOW_LOCK, lock
from forge.reporting.workflow_output import print_end
from forge.run import cost, train
from forge.run.programs import program_of
from forge.slurm import adopt, jobs, submission
from forge.slurm.sbatch import Request, requests_of
from forge.slurm.slurm import refuse_missing, settle_in_batch_step

# Names the file with the runs as they were submitted, for the Snakemake inside a job.
SUBMITTED = "FORGE_SUBMITTED"
QUEUE_POLL_SEC = 10.0
PROGRAM_MB = 8000  # for what another program has trained, whose size is not known


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


def read_config(settings: Any, files: Sequence[str] = (CONFIG,)) -> dict[str, Any]:
    """config.yaml with what Snakemake's options --configfile and --config set in it.

    settings: Snakemake's ConfigSettings. files: read in place of config.yaml. Read by Forge and not by
    Snakemake's `configfile:`, which would read some values in another way than every other place (`010`
    as 8, YAML 1.1), and would read a file of 300 bytes for minutes. Without the keys of --config that are
    about the allocation. Raises ConfigError.
    """
    given = {name: value for name, value in settings.config.items() if name not in OF_COMMAND}
    _refuse_misspelt(given)
    merged: dict[str, Any] = {}
    if settings.replace_workflow_config:
        files = ()
    # With --configfile there may be no config.yaml.
    files = [file for file in files if Path(file).exists() or not settings.configfiles]
    for values in (*map(read_values, [*files, *settings.configfiles]), given):
        if values.get("program"):  # config.yaml may be about Forge's own trainer
            of_trainer = [k for k, one in hooks.sections().items() if one.IS_OF_TRAINER]
            unused = (*OF_FORGES_TRAINER, *of_trainer)
            merged = {name: old for name, old in merged.items() if name not in unused}
        _merge(merged, values)
    return merged


def _refuse_misspelt(given: Mapping[str, Any]) -> None:
    """ConfigError for a key of --config that was meant for the allocation. Others are refused with the
    config that they are in."""
    known = [*Config.model_fields, *hooks.sections(), "runs", "plugins"]
    for name, value in given.items():
        close = difflib.get_close_matches(name, [*known, *OF_COMMAND], n=1)
        if name not in known and close and close[0] in OF_COMMAND:
            raise ConfigError(
                f"--config has {name}={value!r}, and no such key is known (did you mean {close[0]}?)",
                fix=f"for the allocation of one command: {', '.join(OF_COMMAND)}",
            )


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def read_runs(
    settings: Any, given: Mapping[str, Any] | None = None, *, main: bool
) -> dict[str, ResolvedConfig]:
    """Run name -> resolved config, for every row of the sheet (key `runs`, else config/runs.tsv).

    settings: as for `read_config`. given: taken in place of what that reads. main: False for the
    Snakemake inside a job, which keeps the runs as they were submitted: the config may have been edited
    while the job was in the queue; one that is to take jobs back (FORGE_CONTROLLED) keeps them, too.

    Raises ForgeError for a bad config or sheet, for a run that cannot resume from its checkpoint or whose
    parent has changed, and for a new one that cannot start from its parent's. Refused here, since
    Snakemake removes a rule's outputs before it starts the rule.
    """
    if values := _as_submitted(main):
        submitted: dict[str, Any] = values["submitted"]
        runs = {
            name: checked(ResolvedConfig, values, "the job") for name, values in submitted.items()
        }
        if main:
            _check_starts(runs)
        return runs
    base = dict(read_config(settings) if given is None else given)
    sheet = str(base.pop("runs", SHEET))
    use_plugins(base)
    configs = run_configs(base, sheet)
    family.refuse_circles(configs)
    runs = {name: resolve(config) for name, config in family.with_steps(configs).items()}
    shared_folders(runs)
    for name, config in runs.items():
        hooks.check_run(config, f"run {name}")
    warnings = _check_starts(runs)
    for line in warnings if main else ():
        say(line)
    return runs


def _as_submitted(main: bool) -> dict[str, Any]:
    """Values that `keep_for_jobs` has written for this Snakemake; {} where it reads the config itself."""
    given = os.environ.get(adopt.CONTROLLED if main else SUBMITTED)
    values: dict[str, Any] = read_json(Path(given)) if given else {}
    return values


def _check_starts(runs: dict[str, ResolvedConfig]) -> list[str]:
    """Warnings. Raises ForgeError for a run that cannot start, or resume."""
    return [
        f"{name}: {line}"
        for name, config in runs.items()
        for line in program_of(config).check_start(runs)
    ]


def read_layouts(
    settings: Any,
    resources: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    *,
    main: bool,
) -> dict[str, dict[str, Any]]:
    """Run name -> nodes, ranks, GPUs and partition, from the columns `nodes` and `tasks_per_node` of the
    sheet and from --config; inside a job as they were submitted. {} without either. given: as for
    `read_runs`. Raises ConfigError.
    """
    if submitted := _as_submitted(main):
        layouts: dict[str, dict[str, Any]] = submitted["layouts"]
        return layouts
    base = read_config(settings) if given is None else given
    sheet = str(base.get("runs", SHEET))
    of_command = command_resources(settings.config)
    columns: dict[str, dict[str, Any]] = {}
    for row in read_rows(sheet):
        if twice := of_command.keys() & row.layout.keys():
            name = sorted(twice)[0]
            raise ConfigError(
                f"--config has {name}={of_command[name]}, and {sheet}, line {row.line} (run {row.run}),"
                f" column {name}: {row.layout[name]}",
                fix="change the cell, or leave it empty; --config is for what the sheet does not say",
            )
        columns[row.run] = {**row.layout, **of_command}
    return run_layouts(resources, columns)


def set_resources(settings: Any, rule: str, values: Mapping[str, Any]) -> None:
    """Make these the set-resources of a rule. settings: Snakemake's ResourceSettings."""
    from snakemake.resources import Resource, Resources

    settings.overwrite_resources[rule] = Resources(
        {
            name: value if isinstance(value, Resource) else Resource(name, value)
            for name, value in values.items()
        }
    )
    # Snakemake keeps them as the first rule needed them, which in a module may be one of the user's own.
    vars(settings).pop("_parsed_overwrite_resources", None)


def of_profile(rule: str, settings: Any) -> dict[str, Any]:
    """Resources that the profile gives a rule. settings: Snakemake's ResourceSettings."""
    own = settings.overwrite_resources.get(rule, {})
    return {n: plain(v) for n, v in {**(settings.default_resources or {}), **own}.items()}


def known_failures(runs: dict[str, ResolvedConfig]) -> dict[str, str]:
    """Run name -> what `forge train` would say at once, for the runs whose config has failed before.

    Told here, such a run costs no allocation, and the other runs of the sheet are trained.
    """
    failures = {}
    for name, config in runs.items():
        try:
            train.refuse_known_failure(config.of_training, RunPaths.of(config))
        except TrainingError as err:
            failures[name] = str(err)
    return failures


def keep_for_jobs(
    runs: dict[str, ResolvedConfig], layouts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the runs down as they are now, and tell this Snakemake's jobs where."""
    submitted = {name: config.to_json() for name, config in runs.items()}
    values = {"submitted": submitted, "layouts": layouts}
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
            end_dry_run()
        elif workflow.executor_plugin and not workflow.touch:
            with suppress(OSError), chdir(project):  # the reader of our output may have left
                print_end([RunPaths.of(settings) for settings in runs.values()])

    atexit.register(end)


def check_cost(runs: dict[str, ResolvedConfig], allocation: Allocation, due: Iterable[Any]) -> str:
    """A line with what the runs that will be trained cost; "" for none. due: jobs that will run. Raises
    ConfigError for more than slurm.max_gpu_hours."""
    costs, machine = cost.costs(runs, allocation, due), allocation.machine
    cost.refuse_more(costs, machine, allocation.of_profile["machine"])
    return cost.summary(costs, machine)


def check_submission(
    dag: Any, due: Iterable[Any], folders: Iterable[str], say: Callable[[str], None]
) -> list[Request]:
    """The requests to Slurm. ConfigError for a job of Snakemake's plan that Slurm could never start,
    UnfitError without Slurm's programs. due: jobs that will run. folders: that nodes must see, beside the
    project's."""
    refuse_missing("sbatch", "squeue", "scontrol")
    submission.check_folders([Path.cwd(), *map(Path, folders)], say)
    jobs_due = {dag.get_job_group(job) or job for job in due}
    requests = requests_of(jobs_due, dag.workflow.executor_settings)
    submission.check(requests, say)
    return requests


@contextmanager
def with_executor(workflow: Any, name: str) -> Iterator[None]:
    """In a dry run, whose executor makes every job a local one, see jobs as this executor would."""
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    dry = workflow._executor_plugin
    workflow._executor_plugin = ExecutorPluginRegistry().get_plugin(name)
    for group in set(workflow.dag._group.values()):
        group._resources = None  # they depend on it
    try:
        yield
    finally:
        workflow._executor_plugin = dry


# --- one Snakemake for a run -----------------------------------------------------------------------


def take_over(
    runs: dict[str, ResolvedConfig], slurm: Slurm, say: Callable[[str], None], *, submits: bool
) -> None:
    """Look after these runs until this Snakemake ends, as the only one.

    A second command must not start a second trainer: a living Snakemake that does the same, or a job
    that still trains one of the runs (a killed Snakemake leaves its jobs behind), is named and refused,
    or waited for (slurm.when_running). Raises UnfitError. submits: whether the rules become Slurm jobs.
    """
    waited = False
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
                if not waited:
                    atexit.register(held.pop_all().close)
                    return
            # Other jobs may be due now: plan again.
            os.execv(sys.executable, [sys.executable, "-m", "snakemake", *sys.argv[1:]])
        except UnfitError as err:
            is_of_disk = isinstance(err.__cause__, OSError)  # which no end of a job makes writable
            if slurm.when_running == "stop" or is_of_disk:
                raise
            say(f"waiting: {err.what}")
            waited = True
            time.sleep(QUEUE_POLL_SEC)


# --- what rules are given --------------------------------------------------------------------------


@dataclass(frozen=True)
class RuleSettings:
    """A file with settings, an input of the rule that uses them, by which Snakemake sees them change.

    As params they would be compared with Snakemake's own record, which `make clean` removes and a copied
    project lacks: a changed config would then count as done. The output says what it was made with.
    """

    name: str
    """With the digest of the values: a waiting job keeps those that it was submitted with."""
    values: Any
    output: Path
    made_with: Any
    """The same settings as the output has them; None where it does not tell."""

    @classmethod
    def of(cls, name: str, values: Any, output: Path, made_with: Any) -> RuleSettings:
        digest = digest_bytes(canonical(values))
        return cls(f"{name}-{digest[:16]}.json", values, output, made_with)

    @classmethod
    def of_sections(cls, name: str, sections: Any, output: Path, made_with: Any) -> RuleSettings:
        """Sections of the config, in a file that the job of the rule reads (--settings)."""
        head = {"format": RunSettings.FORMAT}
        recorded = head | made_with if isinstance(made_with, dict) else made_with
        return cls.of(name, head | sections, output, recorded)

    @property
    def path(self) -> Path:
        return WORKFLOW / self.name

    def write(self) -> None:
        """Make the file newer than the output if that was made with other settings, and only then. Raises
        UnfitError when the disk does not let it."""
        is_new = not self.path.exists()
        if is_new:
            write_json(self.path, self.values)
        if not self.output.exists() or (self.made_with is None and not is_new):
            return
        made = self.output.stat().st_mtime_ns
        is_newer = self.path.stat().st_mtime_ns > made
        if is_newer != (self.made_with != self.values):
            # The disk may have another clock than this machine.
            when = made if is_newer else max(time.time_ns(), made + 10**9)
            with disk_trouble(self.path):
                os.utime(self.path, ns=(when, when))


def rule_settings(runs: Mapping[str, ResolvedConfig], *, main: bool) -> dict[str, dict[str, str]]:
    """Rule -> run -> path of its settings, an input; of a rule over all runs by its output.

    main: whether to write them, False for the Snakemake inside a job. Raises UnfitError where the disk
    does not let it.
    """
    by_rule: dict[str, dict[str, RuleSettings]] = {
        "config_run": {name: _of_training(config) for name, config in runs.items()},
        "validate_run": {name: _of_validation(config) for name, config in runs.items()},
        **hooks.rule_settings(runs),
    }
    for settings in (file for by_run in by_rule.values() for file in by_run.values() if main):
        settings.write()
    return {
        rule: {run: str(settings.path) for run, settings in by_run.items()}
        for rule, by_run in by_rule.items()
    }


def _of_training(config: ResolvedConfig) -> RuleSettings:
    """Inputs that a run's training depends on."""
    output = RunPaths.of(config).config
    return RuleSettings.of(config.run, config.training_json(), output, read_object_or_empty(output))


def _of_validation(config: ResolvedConfig) -> RuleSettings:
    paths = RunPaths.of(config)
    made_with = read_object_or_empty(paths.validation).get("settings")
    name, sections = f"{config.run}.validate", config.validation_json()
    return RuleSettings.of_sections(name, sections, paths.validated, made_with)


def write_configs(runs: dict[str, ResolvedConfig], due: Iterable[Any]) -> None:
    """Write the config files that rules of shared artefacts name in their param `config`. due: jobs that
    will run.

    Only theirs, so that the config of a shared artefact is the one that it was made by. Raises UnfitError
    where the disk does not let it.
    """
    # As paths: a rule says ./data/… where the config does.
    wanted = {Path(path) for job in due if (path := job.params.get("config"))}
    for config in runs.values():
        files = _data_configs(config)
        for path in wanted & files.keys():
            write_json(path, files[path])
        wanted -= files.keys()


def _data_configs(config: ResolvedConfig) -> dict[Path, dict[str, Any]]:
    """The config files of what a run reads, by path."""
    data, configs = config.data, {}
    if config.ids.tokens:
        configs[tokenizer_folder(data, config.ids.tokenizer)] = config
        configs[tokens_folder(data, config.ids.tokens)] = config
    for corpus in single_corpora(config):
        if corpus.ids.tokens:
            configs[tokens_folder(data, corpus.ids.tokens)] = corpus
        if corpus.ids.inputs:
            configs[inputs_folder(data, corpus.ids.inputs)] = corpus
    files = {folder / "config.json": _of_data(made_by) for folder, made_by in configs.items()}
    if config.ids.model:
        of_model = {**_of_data(config), "model": config.to_json()["model"]}
        files[model_folder(data, config.ids.model) / "config.json"] = of_model
    return files


def _of_data(config: ResolvedConfig) -> dict[str, Any]:
    values = config.of_training.to_json()
    keys = ("data", "program", "tokenizer", "tokenize", "ids")
    return {key: values[key] for key in keys if key in values}


def tokenizing(runs: dict[str, ResolvedConfig]) -> dict[str, ResolvedConfig]:
    """Content id of tokens -> config that makes them, of a run's only corpus or of one of its sources:
    whichever run has them, since the id fixes the tokenizer."""
    configs: dict[str, ResolvedConfig] = {}
    for config in runs.values():
        if config.ids.tokens:
            configs |= {corpus.ids.tokens: corpus for corpus in single_corpora(config)}
    return configs


def listing_sources(runs: dict[str, ResolvedConfig]) -> dict[str, ResolvedConfig]:
    """Content id of a list of sources -> config of a run that has them."""
    return {config.ids.tokens: config for config in runs.values() if config.ids.sources}


def validation_mem_mb(
    config: ResolvedConfig, world_size: int, defaults: Mapping[str, Any] | None
) -> int:
    """Memory of validate_run in MB, by the size of the model; that of default-resources, if it is more.

    world_size: ranks that train the run. defaults: default-resources of the profile, as Snakemake has
    them.
    """
    given = plain((defaults or {}).get("mem_mb"))
    of_profile = given if isinstance(given, int) else 0  # else a formula of Snakemake's own
    needed = program_of(config).validation_bytes(world_size)
    if needed is None:
        return of_profile or PROGRAM_MB
    return max(of_profile, math.ceil(needed / 10**6))


def resumable_steps(runs: dict[str, ResolvedConfig]) -> dict[str, int]:
    """Run name -> step of its checkpoint, for the runs that have one."""
    steps = {name: program_of(config).resumable_step() for name, config in runs.items()}
    return {name: step for name, step in steps.items() if step is not None}


def remove_stop_files(runs: dict[str, ResolvedConfig], say: Callable[[str], None]) -> None:
    """Let runs that a STOP file has stopped train again."""
    for config in runs.values():
        stop = RunPaths.of(config).stop
        if stop.exists():
            stop.unlink()
            say(f"removed {stop}")
