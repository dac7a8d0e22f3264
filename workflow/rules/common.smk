# What every rule needs: the config of each run, and how files are named.
import json
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from forge.artefacts import freeze
from forge.config import RUN_NAME
from forge.errors import ForgeError
from forge.paths import RunPaths, tokenizer_folder, tokens_folder
from forge.runs import resolve_runs, shared_folders
from forge.store import check_resumable

# Rules call the `forge` that belongs to this snakemake, also where no environment is activated, and a
# verb whose Snakemake was killed stops by itself. Snakemake sets OMP_NUM_THREADS in every rule, so the
# user's own is kept under another name.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["FORGE_IN_WORKFLOW"] = "1"
os.environ.setdefault(
    "FORGE_USER_OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "")
)


def read_runs():
    """Run name -> config with ids, for every row of the sample sheet."""
    base = dict(config)
    sheet = base.pop("runs", "config/runs.tsv")
    try:
        runs = {
            name: freeze(settings)
            for name, settings in resolve_runs(base, sheet).items()
        }
        shared_folders(runs)
        # Refused here, before a rule runs: Snakemake removes a rule's outputs before it starts it.
        for settings in runs.values():
            check_resumable(settings, RunPaths.of(settings))
    except ForgeError as err:
        raise WorkflowError(str(err)) from None
    return runs


RUNS = read_runs()
RESULTS, DATA = shared_folders(RUNS)
# One config for each shared artefact: those that share an id are equal in what matters to it.
TOKENIZERS = {settings.ids.tokenizer: settings for settings in RUNS.values()}
TOKENS = {settings.ids.tokens: settings for settings in RUNS.values()}


wildcard_constraints:
    run=RUN_NAME,
    tokenizer="[0-9a-f]{12}",
    tokens="[0-9a-f]{12}",


def science(settings):
    """The config without the sections of what comes after training, as one line of JSON."""
    values = settings.to_json()
    return json.dumps(
        {name: values[name] for name in values if name not in ("validate", "report")},
        sort_keys=True,
    )


def overrides(settings, *names):
    """Sections of a config as arguments of a verb."""
    values = settings.to_json()
    return [f"--{name}={json.dumps(values[name], sort_keys=True)}" for name in names]


def tokenizer_manifest(wildcards):
    settings = (
        RUNS[wildcards.run] if "run" in wildcards.keys() else TOKENS[wildcards.tokens]
    )
    return tokenizer_folder(DATA, settings.ids.tokenizer) / "manifest.json"


def tokens_manifest(wildcards):
    return tokens_folder(DATA, RUNS[wildcards.run].ids.tokens) / "manifest.json"


RESUMED = {}


def resumed_files(runs):
    """Files that `train` asks for, of the runs whose `checkpoints/latest` resolves."""
    for name, settings in runs.items():
        found = check_resumable(settings, RunPaths.of(settings))
        if found is not None:
            RESUMED[name] = found.step
    if not RESUMED:
        raise WorkflowError(
            f"nothing to resume: none of {', '.join(runs)} has {RESULTS}/RUN/checkpoints/latest.\n"
            "Start with the target `train`."
        )
    for name, step in RESUMED.items():
        logger.info(f"resume {name}: step {step} of {runs[name].train.max_steps}")
    return expand(
        f"{RESULTS}/{{run}}/{{file}}",
        run=RESUMED,
        file=("validated.json", "report.html"),
    )


onstart:
    # `resume` says go on, also to a run that a STOP file has stopped. Not in a dry run.
    for name in RESUMED:
        stop = RunPaths.of(RUNS[name]).stop
        if stop.exists():
            stop.unlink()
            logger.info(f"removed {stop}")


onsuccess:
    finished = [name for name in RUNS if RunPaths.of(RUNS[name]).report.exists()]
    if finished:
        shell(
            "forge show {folders:q}",
            folders=[f"{RESULTS}/{name}" for name in finished],
        )
