"""The one object that the Snakefile and its rule files use: runs of this command, and what each rule is
given."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from snakemake.logging import logger

from forge.checkpoint import family
from forge.core import hooks, project_plugins
from forge.core.config import RUN_NAME, ResolvedConfig
from forge.core.errors import ConfigError, Exit, ForgeError
from forge.core.paths import (
    inputs_folder,
    model_folder,
    settings_file,
    tokenizer_folder,
    tokens_folder,
)
from forge.core.sample_sheet import shared_folders
from forge.core.terminal import say
from forge.data.content_ids import single_corpora
from forge.data.corpus import made_by_rules
from forge.flow import (
    batch_steps,
    resources,
    rule_inputs,
    runs,
    snakemake_private,
    user_module,
    workflow_command,
)
from forge.flow.snakemake_private import refusal, targets_of, unknown_targets
from forge.hosts.allocation import Allocation, Profile
from forge.launch.rank import refuse_left_over
from forge.reporting import workflow_output
from forge.run import ended_allocation
from forge.slurm import jobs
from forge.slurm.sbatch import Request, excluding


class Flow:
    """The runs of one command of Snakemake, and functions for the keywords of rules.

    snakemake: its Workflow. values: the global `config` of the Snakefile. An error of Snakemake, with the
    message alone, for a config, sheet or profile that is refused.

    runs: name -> config. results, data: the directories of all runs. settings: rule -> run -> file
    (`rule_inputs.rule_settings`). waiting: runs that begin when another one of the sheet has trained ->
    its name. failed: runs whose config has failed before -> the message: no allocation is spent on them.
    environment: path of the conda environment, for rules of plugins.
    """

    def __init__(self, snakemake: Any, values: dict[str, Any]) -> None:
        self._snakemake = snakemake
        self._is_main = bool(snakemake.is_main_process)
        self.environment = f"{snakemake.current_basedir}/envs/forge.yaml"
        workflow_command.prepare_environment()
        workflow_output.shorten(snakemake, logger)
        try:
            user_module.refuse_other_names(snakemake)
            self._read(values)
            self.failed = runs.known_failures(self.runs) if self._is_main else {}
        except ForgeError as err:
            raise refusal(str(err)) from None
        except KeyboardInterrupt:
            sys.exit(Exit.STOPPED)
        if self._is_main and not user_module.is_read_again(snakemake):
            workflow_command.end_with_table(snakemake, self.runs, self._end_dry_run)
        self.waiting = family.waiting(self.runs)
        self._resumed: dict[str, int] = {}  # run -> step, filled when `resume` is the target
        # Where the user has changed a rule, Snakemake runs it.
        is_changed = user_module.is_read_again(snakemake)
        own_steps = partial(batch_steps.write_steps, snakemake)
        jobs.write_steps = jobs.no_steps if is_changed else own_steps
        user_module.start_with(snakemake, self._before_plan, self._before_first_job)

    def _read(self, values: dict[str, Any]) -> None:
        # No `configfile:`, so that a value means the same here as in every `forge` command.
        given = user_module.given_config(self._snakemake, values)
        settings, main = self._snakemake.config_settings, self._is_main
        self.runs = runs.read_runs(settings, given, main=main)
        os.environ.update(project_plugins.hand_on())
        resources = self._snakemake.resource_settings
        overwrites = resources.overwrite_resources
        self._profile = Profile.of_command(sys.argv[1:], overwrites) if main else Profile()
        of_profile = overwrites.get(jobs.TRAIN_RULE, {})
        self._layouts = runs.read_layouts(settings, of_profile, given, main=main)
        self.allocation = Allocation(of_profile, self.runs, self._layouts, self._profile)
        if main:  # what functions of resources raise, Snakemake shows with its own traceback
            excluding(self.allocation.machine.slurm.options, [])
        snakemake_private.set_resources(resources, jobs.TRAIN_RULE, self.allocation.of_profile)
        self.results, self.data = shared_folders(self.runs)
        self.settings = rule_inputs.rule_settings(self.runs, main=main)

    @cached_property
    def tokens(self) -> dict[str, ResolvedConfig]:
        """Content id of tokens -> config that makes them."""
        return rule_inputs.tokenizing(self.runs)

    @cached_property
    def sources(self) -> dict[str, ResolvedConfig]:
        """Content id of the list of a run's sources -> config of a run that has them."""
        return rule_inputs.listing_sources(self.runs)

    @cached_property
    def tokenizers(self) -> dict[str, ResolvedConfig]:
        """Content id of a tokenizer -> config of a run that has it."""
        return {run.ids.tokenizer: run for run in self.runs.values() if run.ids.tokenizer}

    # --- inputs and outputs of rules ---

    @property
    def wildcards(self) -> dict[str, str]:
        """Pattern of each wildcard."""
        ids = ("tokenizer", "tokens", "inputs", "model")
        return {"run": RUN_NAME, **dict.fromkeys(ids, "[0-9a-f]{12}")}

    @property
    def rule_files(self) -> list[str]:
        """The rule files of plugins."""
        return hooks.rule_files()

    def one_of(self, ids: Iterable[str]) -> str:
        """Pattern of these ids: two rules make manifests in data/tokens."""
        return "|".join(ids) or "none"

    def settings_file(self, run: str) -> Path:
        """Trackers and evaluations of a run, which may change without retraining it."""
        return settings_file(run)

    def settings_of(self, rule: str) -> Any:
        """Input of this rule: newer than its output where that was made with other settings."""
        return lambda wildcards: self.settings[rule][wildcards.run]

    def files_of(self, runs: Iterable[str], *names: str) -> list[str]:
        """These files of each run; for a known failure the file that its rule never makes."""
        return [
            f"{self.results}/{run}/{name}"
            for run in runs
            for name in ([".allocation/none"] if run in self.failed else names)
        ]

    def tokenizer_manifest(self, run: ResolvedConfig) -> Path:
        return tokenizer_folder(self.data, run.ids.tokenizer) / "manifest.json"

    def tokens_manifest(self, run: ResolvedConfig) -> Path:
        return tokens_folder(self.data, run.ids.tokens) / "manifest.json"

    def source_manifests(self, run: ResolvedConfig) -> list[Path]:
        ids = run.ids.sources.values()
        return [tokens_folder(self.data, tokens) / "manifest.json" for tokens in ids]

    def inputs_manifest(self, run: ResolvedConfig) -> list[Path]:
        """Manifest of the inputs of a program, or of the corpus files of a hub; [] without any."""
        ids = run.ids.inputs
        return [inputs_folder(self.data, ids) / "manifest.json"] if ids else []

    def corpus_of(self, run: ResolvedConfig) -> list[Path | str]:
        """Files that are downloaded, or made by a user's own rules, before a single corpus is read."""
        return [*self.inputs_manifest(run), *made_by_rules(run.tokenize.inputs)]

    def corpus_of_tokenizer(self, wildcards: Any) -> list[Path | str]:
        """The same before a tokenizer is trained on it."""
        run = self.tokenizers[wildcards.tokenizer]
        corpora = single_corpora(run) if run.tokenizer.source == "train" else []
        return [path for corpus in corpora for path in self.corpus_of(corpus)]

    def data_of(self, run: ResolvedConfig) -> list[Path]:
        """Manifests of what a run reads: pretrained weights, if any, tokenizer and tokens; or the inputs
        of its program, if any."""
        if not run.ids.tokens:
            return self.inputs_manifest(run)
        weights = run.ids.model
        start = [model_folder(self.data, weights) / "manifest.json"] if weights else []
        return [*start, self.tokenizer_manifest(run), self.tokens_manifest(run)]

    def staged_data(self, run: ResolvedConfig) -> list[Path]:
        """The manifest among these whose files are staged; weights and tokenizer are not staged."""
        return self.data_of(run)[-1:]

    def parent_of(self, wildcards: Any) -> list[Path]:
        """The output of parent_run, also for a run that has begun, so that its inputs stay the same."""
        made = Path(f"{self.results}/{wildcards.run}/.parent_trained")
        # In a job this is asked again: the parent may have ended since, and nothing makes the file there.
        waits = self._is_main and wildcards.run in self.waiting
        return [made] if waits or made.exists() else []

    def wanted_files(self, target: str, runs: Iterable[str], *own: str) -> list[str]:
        """Files of each run that this target asks for: its own, and those that plugins add."""
        try:
            wanted = {run: (*own, *hooks.wanted_files(self.runs[run], target)) for run in runs}
        except ForgeError as err:
            raise refusal(str(err)) from None
        return [path for run, names in wanted.items() for path in self.files_of([run], *names)]

    def resumed_files(self, wildcards: Any) -> list[str]:
        """Files that `train` asks for, of the runs that have a checkpoint."""
        if not self._resumed:
            self._resumed.update(runs.resumable_steps(self.runs))
            for name, step in self._resumed.items():
                logger.info(f"resume {name}: step {step} of {self.runs[name].goal}")
        if not self._resumed:
            raise refusal(
                f"nothing to resume: none of {', '.join(self.runs)} has"
                f" {self.results}/RUN/checkpoints/latest.\nStart with the target `train`."
            )
        return self.wanted_files("resume", self._resumed, "validated.json")

    # --- resources and groups of rules ---

    @property
    def resource_settings(self) -> Any:
        """Snakemake's ResourceSettings: default-resources, set-resources and set-threads."""
        return self._snakemake.resource_settings

    @property
    def submits(self) -> bool:
        """Return whether the rules of this command become Slurm jobs."""
        return self._profile.submits

    def allocation_of(self, wildcards: Any) -> str:
        """Each run is a job of its own: a group of two runs would fuse their allocations."""
        return f"{jobs.ALLOCATION}-{wildcards.run}"

    def allocation_extra(self, wildcards: Any) -> str:
        # Not inside a job, whose node may not have a file that slurm.options names.
        return self.allocation.slurm_extra(wildcards.run) if self._is_main else ""

    def validation_mem_mb(self, wildcards: Any) -> int:
        return self._model_mem_mb(wildcards.run)

    def _model_mem_mb(self, run: str) -> int:
        ranks = self.allocation.layout(run).world_size
        defaults = self._snakemake.resource_settings.default_resources
        return resources.validation_mem_mb(self.runs[run], ranks, defaults)

    # --- what is checked and written before jobs run ---

    @property
    def due(self) -> list[Any]:
        """Jobs of Snakemake that will run; all of a dry run, which has finished them."""
        dag = self._snakemake.dag
        return list(dag.needrun_jobs(exclude_finished=False)) if dag else []

    @property
    def executor(self) -> str:
        """The executor that the command names, also of a dry run, which has another one; "" for none."""
        return self._profile.executor

    @property
    def default_resources(self) -> dict[str, Any]:
        """Resources that the profile gives every rule."""
        return resources.of_profile("", self._snakemake.resource_settings)

    def _check_plan(self, submits: bool) -> str:
        """A line with what the runs cost that will be trained; "" without any. submits: whether rules
        become Slurm jobs. Raises ForgeError for a profile and a plan that cannot work, cost too much, or
        that a plugin refuses."""
        settings, limits = self._snakemake.resource_settings, self._snakemake.global_resources
        option, most = ("jobs", settings.nodes) if submits else ("cores", settings.cores)
        if most == 0:
            raise ConfigError(
                f"--{option} is 0: no job would ever start", fix=f"--{option} 1, or more"
            )
        self.allocation.check_profile(settings, limits, submits=submits)
        self.allocation.check_runs(self.due, self.failed)
        hooks.check_plan(self.runs, workflow_command.rules_due(self.due))
        return resources.check_cost(self.runs, self.allocation, self.due) if submits else ""

    def _end_dry_run(self) -> None:
        """Say what the runs cost, or with what a start would be refused at once."""
        refusal = None
        try:
            # An empty one is false.
            if self._snakemake.dag and (cost := self._check_plan(self._profile.submits)):
                say(cost)
        except ForgeError as err:
            say(f"without -n this is refused: {err}")
            refusal = err
        hooks.after_dry_run(self, refusal)

    def check_start(self) -> list[Request]:
        """Check the plan of a dry run with an executor for Slurm as a start does, and write down the runs
        as they are now (`workflow_command.keep_for_jobs`); the requests to Slurm. Raises ForgeError."""
        with snakemake_private.with_executor(self._snakemake, self.executor):
            return self._check_jobs(say)

    def _check_jobs(self, tell: Callable[[str], None]) -> list[Request]:
        folders = [self.results, self.data]
        requests = resources.check_submission(self._snakemake.dag, self.due, folders, tell)
        workflow_command.keep_for_jobs(self.runs, self._layouts)
        return requests

    def _before_plan(self, dry: bool) -> None:
        # What input functions raise, Snakemake shows with its own traceback.
        targets = sorted(self._snakemake.dag_settings.targets)
        for unknown in unknown_targets(self._snakemake, targets):
            raise refusal(str(self._no_target(unknown)))
        if "resume" in targets:
            self.resumed_files(None)
        try:
            hooks.check_targets(self.runs, targets)
        except ForgeError as err:
            raise refusal(str(err)) from None
        runs, submits = self.runs.values(), self._profile.submits
        ended_allocation.remove(runs, logger.info, submits=submits, dry=dry)

    def _no_target(self, name: str) -> ConfigError:
        known, is_run = targets_of(self._snakemake), name in self.runs
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        run = name if is_run else next(iter(self.runs))
        return ConfigError(
            f"there is no target {name}{', which is a run' if is_run else hint}",
            fix=f"targets over all runs: {', '.join(known)}\n"
            f"         of one run: {self.results}/{run}/validated.json",
        )

    def _before_first_job(self) -> None:
        # Not in a dry run. Only here is it known where jobs will run.
        profile = replace(self._profile, executor=self._snakemake.executor_plugin.name)
        try:
            cost = self._start(profile)
        except ForgeError as err:
            raise refusal(str(err)) from None
        if cost:
            logger.info(cost)
        # A STOP file is removed: who resumes a stopped run wants it to train. Not in a dry run.
        resumed = {name: self.runs[name] for name in self._resumed}
        runs.remove_stop_files(resumed, logger.info)

    def _start(self, profile: Profile) -> str:
        """Check, and write for jobs what they read; what the runs cost. Raises ForgeError."""
        submits = profile.submits
        profile.refuse_plugin()
        refuse_left_over()  # jobs inherit the environment
        cost = self._check_plan(submits)
        if submits:
            self._check_jobs(logger.warning)
        slurm = self.allocation.machine.slurm
        where = self._snakemake.rundir
        workflow_command.take_over(self.runs, slurm, logger.info, submits=submits, given_in=where)
        rule_inputs.write_configs(self.runs, self.due)
        workflow_command.write_down(self.runs)
        settings, memory = self._snakemake.resource_settings, self._model_mem_mb
        workflow_command.keep_settings(self.runs, settings, memory, submits=submits)
        return cost
