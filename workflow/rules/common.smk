# For the files beside this one: the config of each run, and which shared artefacts it needs.
import sys
from dataclasses import replace
from pathlib import Path

from snakemake.logging import logger

from forge.checkpoint import family
from forge.cluster import jobs
from forge.cluster.allocation import Allocation, Profile
from forge.core.config import RUN_NAME
from forge.core.errors import ForgeError
from forge.core.paths import (
    inputs_folder,
    model_folder,
    tokenizer_folder,
    tokens_folder,
)
from forge.data.corpus import made_by_rules
from forge.evaluation.tasks import task_files
from forge.launch.rank import refuse_left_over
from forge.core.sample_sheet import shared_folders
from forge.reporting import workflow_output
from forge.run import ended_allocation
from forge.snakemake_private import refusal

helpers.prepare_environment()
workflow_output.shorten(workflow, logger)

try:
    as_module.refuse_other_names(workflow)
    # No `configfile:`, so that a value means the same here as in every `forge` command.
    GIVEN = as_module.given_config(workflow, config)
    RUNS = helpers.read_runs(
        workflow.config_settings, GIVEN, main=workflow.is_main_process
    )
    overwrites = workflow.resource_settings.overwrite_resources
    PROFILE = (
        Profile.of_command(sys.argv[1:], overwrites)
        if workflow.is_main_process
        else Profile()
    )
    OF_PROFILE = overwrites.get(jobs.TRAIN_RULE, {})
    LAYOUTS = helpers.read_layouts(
        workflow.config_settings, OF_PROFILE, GIVEN, main=workflow.is_main_process
    )
    ALLOCATION = Allocation(OF_PROFILE, RUNS, LAYOUTS, PROFILE)
    helpers.set_resources(
        workflow.resource_settings, jobs.TRAIN_RULE, ALLOCATION.of_profile
    )
    REPRODUCTION = helpers.reproduction_resources(
        ALLOCATION, workflow.resource_settings
    )
except ForgeError as err:
    raise refusal(str(err)) from None

if workflow.is_main_process and not as_module.is_read_again(workflow):
    helpers.end_with_table(workflow, RUNS, lambda: check_dry_run())

RESULTS, DATA = shared_folders(RUNS)
# Content id of tokens -> config that makes them, and of the list of a run's sources.
TOKENS = helpers.tokenizing(RUNS)
SOURCES = helpers.listing_sources(RUNS)
TOKENIZERS = {
    settings.ids.tokenizer: settings
    for settings in RUNS.values()
    if settings.ids.tokenizer
}
# Runs with tasks (evaluate.tasks), and those of which checkpoints are evaluated while they train.
EVALUATED = [run for run, settings in RUNS.items() if settings.evaluate.tasks]
EVALUATED_BESIDE = [run for run in EVALUATED if RUNS[run].evaluate.every]
# Runs that begin when another one of the sheet has trained, with that one's name.
WAITING = family.waiting(RUNS)
# Runs whose config has failed before, with the message: no allocation is spent on them.
FAILED = helpers.known_failures(RUNS) if workflow.is_main_process else {}
RESUMED = {}  # run name -> step, filled when `resume` is the target
COMPARISON = f"{RESULTS}/compare.html"
try:
    SETTINGS = helpers.rule_settings(RUNS, COMPARISON, main=workflow.is_main_process)
except ForgeError as err:
    raise refusal(str(err)) from None


wildcard_constraints:
    run=RUN_NAME,
    tokenizer="[0-9a-f]{12}",
    tokens="[0-9a-f]{12}",
    inputs="[0-9a-f]{12}",
    model="[0-9a-f]{12}",


def check_plan(submits):
    """A line with what the runs cost that will be trained; "" without any. submits: whether rules become
    Slurm jobs. Raises ForgeError for a profile and a plan that cannot work, or cost too much.
    """
    ALLOCATION.check_profile(
        workflow.resource_settings, workflow.global_resources, submits=submits
    )
    # All, since a dry run has finished them.
    due = list(workflow.dag.needrun_jobs(exclude_finished=False))
    ALLOCATION.check_runs(due, FAILED)
    return helpers.check_cost(RUNS, ALLOCATION, due) if submits else ""


def check_dry_run():
    """As `check_plan`; that of `forge submit` checks more."""
    cost = check_plan(PROFILE.submits)
    helpers.answer_submit(
        workflow,
        RUNS,
        LAYOUTS,
        machine=ALLOCATION.of_profile["machine"],
        folders=[RESULTS, DATA],
        executor=PROFILE.executor,
    )
    return cost


def settings_of(rule):
    """Input of this rule: newer than its output where that was made with other settings."""
    return lambda wildcards: SETTINGS[rule][wildcards.run]


def allocation_of(wildcards):
    """Each run is a job of its own: a group of two runs would fuse their allocations."""
    return f"{jobs.ALLOCATION}-{wildcards.run}"


def allocation_extra(wildcards):
    return ALLOCATION.slurm_extra(wildcards.run)


def model_mem_mb(run):
    return helpers.validation_mem_mb(
        RUNS[run],
        ALLOCATION.layout(run).world_size,
        workflow.resource_settings.default_resources,
    )


def validation_mem_mb(wildcards):
    return model_mem_mb(wildcards.run)


def training_ranks(wildcards):
    """Of this run; a core for each is enough to train parts of it again."""
    return ALLOCATION.layout(wildcards.run).world_size


def reproduction_mem_mb(wildcards):
    return helpers.reproduction_mem_mb(
        RUNS[wildcards.run], ALLOCATION, workflow.resource_settings.default_resources
    )


def reproduction_extra(wildcards, threads):
    """Read again when the job is submitted: only then its run has trained, in the same command."""
    return helpers.reproduction_extra(
        RUNS[wildcards.run],
        ALLOCATION,
        workflow.resource_settings,
        threads=threads,
        mem_mb=reproduction_mem_mb(wildcards),
        submits=PROFILE.submits,
    )


def tokenizer_manifest(settings):
    return tokenizer_folder(DATA, settings.ids.tokenizer) / "manifest.json"


def tokens_manifest(settings):
    return tokens_folder(DATA, settings.ids.tokens) / "manifest.json"


def source_manifests(settings):
    return [
        tokens_folder(DATA, tokens) / "manifest.json"
        for tokens in settings.ids.sources.values()
    ]


def one_of(ids):
    """The wildcards that are among these ids: two rules make manifests in data/tokens."""
    return "|".join(ids) or "none"


def inputs_manifest(settings):
    """Manifest of the inputs of a program, or of the corpus files of a hub; [] without any."""
    folder = settings.ids.inputs and inputs_folder(DATA, settings.ids.inputs)
    return [folder / "manifest.json"] if folder else []


def corpus_of(settings):
    """What is downloaded, or made by rules of the user's own, before a single corpus is read."""
    return [*inputs_manifest(settings), *made_by_rules(settings.tokenize.inputs)]


def corpus_of_tokenizer(wildcards):
    """The same before a tokenizer is trained on it."""
    settings = TOKENIZERS[wildcards.tokenizer]
    trained = settings.tokenizer.source == "train"
    corpora = helpers.single_corpora(settings) if trained else []
    return [path for one in corpora for path in corpus_of(one)]


def data_of(settings):
    """Manifests of what a run reads: pretrained weights, if any, tokenizer and tokens; or the inputs of
    its program, if any."""
    if not settings.ids.tokens:
        return inputs_manifest(settings)
    weights = settings.ids.model and model_folder(DATA, settings.ids.model)
    start = [weights / "manifest.json"] if weights else []
    return [*start, tokenizer_manifest(settings), tokens_manifest(settings)]


def staged_data(settings):
    """The manifest among these whose files are staged; weights and tokenizer are not staged."""
    return data_of(settings)[-1:]


def files_of(runs, *names):
    """These files of each run; for a known failure the file that its rule never makes."""
    return [
        f"{RESULTS}/{run}/{name}"
        for run in runs
        for name in ([".allocation/none"] if run in FAILED else names)
    ]


def parent_of(wildcards):
    """The output of parent_run, also for a run that has begun, so that its inputs stay the same."""
    made = Path(f"{RESULTS}/{wildcards.run}/.parent_trained")
    return [made] if wildcards.run in WAITING or made.exists() else []


def task_files_of(wildcards):
    """The user's own tasks and their data: a change evaluates again."""
    return task_files(RUNS[wildcards.run].evaluate)


def evaluation_files(wildcards):
    """What the target `evaluate` asks for."""
    if not EVALUATED:
        raise refusal(
            f"nothing to evaluate: evaluate.tasks is [] for {', '.join(RUNS)}.\n"
            "Set it in config/config.yaml, such as `evaluate: {tasks: [hellaswag]}`."
        )
    return files_of(EVALUATED, "evaluation.json")


def resumed_files(wildcards):
    """What `train` asks for, of the runs that have a checkpoint."""
    if not RESUMED:
        RESUMED.update(helpers.resumable_steps(RUNS))
        for name, step in RESUMED.items():
            logger.info(f"resume {name}: step {step} of {RUNS[name].goal}")
    if not RESUMED:
        raise refusal(
            f"nothing to resume: none of {', '.join(RUNS)} has {RESULTS}/RUN/checkpoints/latest.\n"
            "Start with the target `train`."
        )
    return files_of(RESUMED, "validated.json", "report.html")


def before_plan(dry):
    # What input functions raise, Snakemake shows with its own traceback.
    for target, files in {
        "resume": resumed_files,
        "evaluate": evaluation_files,
    }.items():
        if target in workflow.dag_settings.targets:
            files(None)
    ended_allocation.remove(
        RUNS.values(), logger.info, submits=PROFILE.submits, dry=dry
    )


def before_first_job():
    # Not in a dry run. Only here is it known where jobs will run.
    profile = replace(PROFILE, executor=workflow.executor_plugin.name)
    submits = profile.submits
    try:
        profile.refuse_plugin()
        refuse_left_over()  # jobs inherit the environment
        cost = check_plan(submits)
        helpers.check_tasks(RUNS, workflow.dag.needrun_jobs())
        if submits:
            helpers.check_submission(
                workflow.dag,
                workflow.dag.needrun_jobs(),
                [RESULTS, DATA],
                logger.warning,
            )
            helpers.keep_for_jobs(RUNS, LAYOUTS)
        helpers.take_over(RUNS, ALLOCATION.machine.slurm, logger.info, submits=submits)
        helpers.write_configs(RUNS, workflow.dag.needrun_jobs())
        helpers.write_down(RUNS)
        helpers.keep_settings(
            RUNS,
            ALLOCATION,
            workflow.resource_settings,
            model_mem_mb,
            submits=submits,
        )
    except ForgeError as err:
        raise refusal(str(err)) from None
    if cost:
        logger.info(cost)
    # A STOP file is removed: who resumes a stopped run wants it to train. Not in a dry run.
    helpers.remove_stop_files({name: RUNS[name] for name in RESUMED}, logger.info)


# In place of `onstart:`, which Snakemake does not call in a module.
as_module.start_with(workflow, before_plan, before_first_job)
