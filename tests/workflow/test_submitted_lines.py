"""What profiles for GPUs give to sbatch, compared word for word: it takes no GPU to see it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.user_snakefile import DEPLOYED

from forge.flow.batch_steps import BatchSteps

# Writes down how it was called, and refuses: nothing comes after it.
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > "$SBATCH_LINE"
exit 1
"""
ANSWERS = {
    "scontrol": "MaxArraySize = 1001",
    "squeue": "",
    "sacctmgr": "my_account\nmy_kempner_lab",
    "sinfo": "gpu",
}


@pytest.fixture(scope="module")
def submitted(shared_project):
    """submitted(profile): the arguments of sbatch for the run's allocation; submitted(profile, *target):
    for the first job of another target. submitted.said: what the last command printed. submitted.wrap:
    the job's command."""
    project = shared_project
    code, output = project.snakemake("--until", "tokenize")
    assert code == 0, output
    bin_folder, line_file = project.root / "bin", project.root / "line"
    bin_folder.mkdir()
    scripts = {name: f"#!/bin/sh\nprintf '{answer}\\n'\n" for name, answer in ANSWERS.items()}
    for name, text in {**scripts, "sbatch": SBATCH}.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)

    def words(profile, *target):
        config = project.root / "profiles" / profile / "config.yaml"
        config.write_text(config.read_text().replace("EDIT_", "my_"))
        environment = project.environment
        environment |= {
            "PATH": f"{bin_folder}:{environment['PATH']}",
            "SBATCH_LINE": str(line_file),
        }
        command = [sys.executable, "-m", "snakemake", "--profile", f"profiles/{profile}"]
        command += target or ("train",)
        done = subprocess.run(
            command,
            cwd=project.root,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode != 0
        assert line_file.exists(), done.stdout + done.stderr
        text = line_file.read_text()
        line = own(text.splitlines())
        words.wrap = text[text.index("--wrap") :]
        line_file.unlink()
        words.said = done.stdout + done.stderr
        return line

    return words


def own(words):
    """What Forge and the profile decide; not names of this Snakemake and its command."""
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--wrap"):
            skip = False
            continue
        skip = word in ("--job-name", "--output", "-D")
        if not skip:
            kept.append(word)
    return kept


COMMON = ["--parsable", "--export=ALL", "--comment"]
COMMENT = "rule_allocation-base_preflight_run_stage_run_train_run"
ALWAYS = ["--ntasks-per-node=4", "--open-mode=append", "--signal=SIGUSR1@120"]


def test_kempner_asks_for_full_h100_nodes_with_one_task_a_gpu(submitted):
    assert submitted("kempner") == [
        *COMMON,
        COMMENT,
        *("-A", "my_kempner_lab", "-p", "kempner_h100", "-t", "2880", "--mem", "1200000"),
        *("--nodes=2", "--requeue", "--cpus-per-task=16"),
        *ALWAYS,
        "--gres=gpu:4",
    ]


def test_kempner_requeue_asks_for_nodes_of_one_kind_and_seven_days(submitted):
    assert submitted("kempner-requeue") == [
        *COMMON,
        COMMENT,
        *("-A", "my_kempner_lab", "-p", "kempner_requeue", "-t", "10080", "-C", "h100"),
        *("--mem", "1200000", "--nodes=2", "--requeue", "--cpus-per-task=16"),
        *ALWAYS,
        "--gres=gpu:4",
    ]


def test_ethernet_asks_for_gpus_by_node(submitted):
    assert submitted("ethernet") == [
        *COMMON,
        COMMENT,
        *("-A", "my_account", "-p", "my_gpu_partition", "-t", "1440", "--mem", "64000"),
        *("--nodes=2", "--requeue", "--cpus-per-task=8"),
        *("--ntasks-per-node=2", *ALWAYS[1:]),
        "--gres=gpu:2",
    ]


def test_slurm_cpu_asks_for_tasks(submitted):
    assert submitted("slurm-cpu") == [
        *COMMON,
        COMMENT,
        *("-A", "my_account", "-p", "my_partition", "-t", "60", "--mem", "8000"),
        *("--nodes=2", "--requeue", "--ntasks=4", "--cpus-per-task=4"),
        *("--ntasks-per-node=2", *ALWAYS[1:]),
    ]


CHANGED = """
use rule preflight_run from forge with:
    benchmark:
        "results/{run}/preflight.tsv"
"""


@pytest.fixture
def user_snakefile(shared_project):
    """user_snakefile(text): options of Snakemake for this Snakefile of the user."""

    def written(text):
        (shared_project.root / "user.smk").write_text(text)
        return "--snakefile", "user.smk", "--directory", "."

    return written


@pytest.mark.parametrize("is_module", [False, True], ids=["clone", "module"])
def test_job_of_a_run_starts_no_snakemake(submitted, shared_project, user_snakefile, is_module):
    submitted("slurm-cpu", "train", *(user_snakefile(DEPLOYED) if is_module else ()))
    wrap = submitted.wrap
    assert "export FORGE_RULES_IN_BATCH_STEP=1 &&" in wrap
    assert "-m snakemake" not in wrap
    [file] = re.findall(r" -P -m forge\.batch_step (\S+json)", wrap)
    plan = BatchSteps.read(Path(file))
    assert plan.folder == str(shared_project.root)
    assert [step.name for step in plan.steps] == [
        f"{rule} base" for rule in ("stage_run", "preflight_run", "train_run")
    ]
    stage, preflight, train = plan.steps
    assert stage.arguments[:2] == ["stage", "results/base/config.json"]
    assert "--nodes=2" in train.arguments and "--ranks-per-node=2" in train.arguments
    assert {*stage.outputs, *preflight.outputs} < {*train.inputs}
    assert train.outputs == ["results/base/trained.json"]
    assert train.logs == ["results/base/logs/train.log"]


def test_job_of_a_run_whose_rule_the_user_has_changed_starts_snakemake_once(
    submitted, user_snakefile
):
    submitted("slurm-cpu", "train", *user_snakefile(DEPLOYED + CHANGED))
    assert submitted.wrap.count("-m snakemake ") == 1


# A part of an allocation; software of Snakemake; temporary files elsewhere; another job.
@pytest.mark.parametrize(
    "target",
    [
        ("train", "--until", "preflight_run"),
        ("train", "--sdm", "env-modules"),
        ("train", "--default-resources", "tmpdir='/var/tmp'"),
        ("train", "--forcerun", "tokenize", "--until", "tokenize"),
    ],
)
def test_other_jobs_of_forge_start_snakemake_once(submitted, shared_project, target):
    """Not again in a job step of Snakemake, which takes seconds of each start."""
    submitted("slurm-cpu", *target)
    wrap = submitted.wrap
    if "tokenize" in target:
        code, output = shared_project.snakemake("--until", "tokenize")  # whose output is gone
        assert code == 0, output
    assert "export FORGE_RULES_IN_BATCH_STEP=1 &&" in wrap
    assert wrap.count("-m snakemake") == 1
    assert "jobstep" not in wrap and "--mode 'remote'" in wrap


def test_job_of_a_users_rule_has_the_job_step_of_snakemake(submitted, shared_project):
    """It takes the rule's share of the job."""
    snakefile = shared_project.root / "workflow/Snakefile"
    kept = snakefile.read_text()
    rule = 'rule own:\n    output:\n        "own.txt",\n    shell:\n        "touch {output}"\n'
    snakefile.write_text(f"{kept}\n\n{rule}")
    submitted("slurm-cpu", "own.txt")
    snakefile.write_text(kept)
    assert "--executor slurm-jobstep --jobs 1" in submitted.wrap
    assert "FORGE_RULES_IN_BATCH_STEP" not in submitted.wrap


def test_columns_of_the_sample_sheet_are_the_nodes_and_tasks_of_the_run(submitted, shared_project):
    shared_project.write_runs("run\tnodes\ttasks_per_node\nbase\t4\t1\n")
    line = submitted("slurm-cpu")
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1"} <= set(line)


def test_nodes_ranks_and_partition_of_one_command(submitted, shared_project):
    """By --config: the rest stays as the profile has it. GPUs follow the ranks."""
    shared_project.write_runs("run\nbase\n")
    more = ("train", "--config", "nodes=4", "tasks_per_node=2", "partition=kempner_h200")
    assert submitted("kempner", *more) == [
        *COMMON,
        COMMENT,
        *("-A", "my_kempner_lab", "-p", "kempner_h200", "-t", "2880", "--mem", "1200000"),
        *("--nodes=4", "--requeue", "--cpus-per-task=16"),
        *("--ntasks-per-node=2", *ALWAYS[1:]),
        "--gres=gpu:2",
    ]


def test_module_behind_a_rule_of_the_user_submits_the_same_line(submitted, shared_project):
    """Snakemake keeps set-resources as the first rule of all needs them, which is none of Forge's."""
    more = ("train", "--config", "nodes=1", "partition=kempner_h200")
    plain = submitted("kempner", *more)
    snakefile = shared_project.root / "workflow/Snakefile"
    kept = snakefile.read_text()
    snakefile.write_text(f'rule own:\n    shell:\n        "true"\n\n\n{DEPLOYED}')
    as_module = submitted("kempner", *more)
    snakefile.write_text(kept)
    assert as_module == plain and {"--nodes=1", "--gres=gpu:4"} < set(plain)


def tried(project, *arguments):
    """A command with a profile that is edited by now; nothing may be submitted: its exit status, and the
    lines that it printed."""
    line_file = project.root / "line"
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=project.root,
        env=project.environment
        | {"PATH": f"{project.root / 'bin'}:{os.environ['PATH']}", "SBATCH_LINE": str(line_file)},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert not line_file.exists()
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("word", ["-n", "train"])
def test_executor_of_the_plugin_submits_nothing(submitted, shared_project, word):
    executor = ("--profile", "profiles/slurm-cpu", "--executor", "slurm")
    code, lines = tried(shared_project, *executor, word)
    assert code != 0 and "this command has --executor slurm" in lines
    assert "  fix:   write `--executor forge` instead of `--executor slurm`" in lines


def test_option_of_the_executor_is_an_option_of_sbatch(submitted, shared_project):
    line = submitted("slurm-cpu", "train", "--forge-no-requeue", "--forge-qos=high")
    assert {"--no-requeue", "--qos=high"} <= set(line) and "--requeue" not in line


def test_executor_reports_the_jobs_of_a_workflow_that_uses_forge_as_a_module(
    submitted, shared_project
):
    """Snakemake does not run `onstart` of a module."""
    shared_project.write_runs("run\nbase\n")
    (shared_project.root / "other.smk").write_text(
        'module forge:\n    snakefile: "workflow/Snakefile"\n\nuse rule * from forge\n'
    )
    assert "--requeue" in submitted("slurm-cpu", "--snakefile", "other.smk", "train")
    assert "a job (run base) could not be submitted" in submitted.said


def test_set_resources_that_would_submit_nodes_without_gpus_is_refused(submitted, shared_project):
    arguments = ("--profile", "profiles/kempner", "train", "--set-resources", "train_run:nodes=4")
    code, lines = tried(shared_project, *arguments)
    said = "\n".join(lines)
    assert code != 0
    assert "--set-resources leaves train_run without" in said and "gres" in said, said
    assert "`--config nodes=4`" in said


def test_dry_run_ends_with_what_the_runs_cost(submitted, shared_project):
    """Two nodes for 48 hours, 20 minutes of them for stage and preflight; without GPUs for one hour."""
    code, lines = tried(shared_project, "--profile", "profiles/kempner", "-n")
    assert code == 0 and lines[-1] == (
        "1 run to train on 2 nodes x 4 GPUs: at most 384 GPU-hours (96 node-hours) by its time limit, as"
        " much again with each requeue; about 0 GPU-hours (0 node-hours) up to its goal by forge plan's"
        " estimate for H100 GPUs, without restarts"
    )
    code, lines = tried(shared_project, "--profile", "profiles/slurm-cpu", "-n")
    assert code == 0 and lines[-1] == (
        "1 run to train on 2 nodes: at most 2 node-hours by its time limit, as much again with each"
        " requeue"
    )
    code, lines = tried(shared_project, "--profile", "profiles/local", "-n")
    assert code == 0 and "node-hours" not in "\n".join(lines)


def test_more_gpu_hours_than_the_machine_allows_are_submitted_by_no_command(
    submitted, shared_project
):
    """Two nodes of two GPUs that no machine.yaml names, for 24 hours; the limit was another profile's."""
    machine = shared_project.root / "profiles/ethernet/machine.yaml"
    shipped = machine.read_text()
    machine.write_text(f"{shipped}slurm: {{max_gpu_hours: 95.5}}\n")
    refused = (
        "1 run to train needs 96.0 GPU-hours, more than slurm.max_gpu_hours: 95.5"
        " (profiles/ethernet/machine.yaml): base 96 (time limit of 1 d on 2 nodes x 2 GPUs)"
    )
    code, lines = tried(shared_project, "--profile", "profiles/ethernet", "train")
    assert code != 0 and refused in lines
    code, lines = tried(shared_project, "--profile", "profiles/ethernet", "-n")
    assert code == 0 and f"without -n this is refused: {refused}" in lines
    machine.write_text(f"{shipped}slurm: {{max_gpu_hours: 96}}\n")
    assert submitted("ethernet")[-1] == "--gres=gpu:2"
    line = (
        "1 run to train on 2 nodes x 2 GPUs: at most 96 GPU-hours (48 node-hours) by its time limit"
    )
    assert submitted.said.index(line) < submitted.said.index("could not be submitted")
    machine.write_text(shipped)


def test_nodes_in_a_file_are_excluded_and_without_the_file_nothing_is_submitted(
    submitted, shared_project
):
    machine, file = (
        shared_project.root / name for name in ("profiles/ethernet/machine.yaml", "bad")
    )
    shipped = machine.read_text()
    machine.write_text(f"{shipped}slurm: {{exclude: [n1], options: --exclude=./bad}}\n")
    file.write_text("n[7-8]\n")
    assert "--exclude=n7,n8,n1" in submitted("ethernet")
    file.unlink()
    for arguments in (("train",), ("-n",)):
        code, lines = tried(shared_project, "--profile", "profiles/ethernet", *arguments)
        assert code != 0 and "Traceback" not in "\n".join(lines)
        assert any("--exclude=./bad: the file of nodes cannot be read" in line for line in lines)
    # Inside a job, whose node need not have it.
    of_job = (
        "--mode=remote",
        "--set-resources",
        "train_run:machine=profiles/ethernet/machine.yaml",
    )
    code, lines = tried(shared_project, *of_job, "--cores=1", "-n", "--", "train")
    assert code == 0, lines
    machine.write_text(shipped)


def test_copy_of_a_profile_has_the_machine_beside_it_for_preflight_on_other_nodes_too(
    submitted, shared_project
):
    profiles = shared_project.root / "profiles"
    shutil.copytree(profiles / "slurm-cpu", profiles / "mine")
    with (profiles / "mine/machine.yaml").open("a") as file:
        file.write("slurm: {warn_sec: 77, options: --nice=5}\n")
    line = submitted("mine", "preflight", "--config", "nodes=4")
    assert {"--signal=SIGUSR1@77", "--nice=5"} <= set(line)
    assert {"--nodes=4", "--ntasks=8", "--ntasks-per-node=2", "my_partition"} <= set(line)


def trained(project):
    """Arguments that submit the validation of the run, which is trained by now."""
    for name in ("config.json", "trained.json"):
        project.path(name).parent.mkdir(parents=True, exist_ok=True)
        project.path(name).touch()
    return ("--allowed-rules", "validate_run", "--", "results/base/validated.json")


def memory_of_validation(submitted, project, *arguments):
    """What sbatch is asked for."""
    line = submitted("slurm-cpu", *arguments, *trained(project))
    return int(line[line.index("--mem") + 1])


def test_memory_of_validation_is_that_of_the_model_or_of_the_profile(submitted, shared_project):
    """4000 in default-resources is enough for a tiny model. What set-resources says is never raised."""
    assert memory_of_validation(submitted, shared_project) == 4000
    large = {"model": {"dim": 4096, "layers": 32, "heads": 32}, "validate": {"depth": "load"}}
    shared_project.write_config(**large)
    assert 40_000 > memory_of_validation(submitted, shared_project) > 26_000
    own = ("--set-resources", "validate_run:mem_mb=5000")
    assert memory_of_validation(submitted, shared_project, *own) == 5000
    defaults = ("--default-resources", "slurm_account=my_account", "slurm_partition=my_partition")
    more = (*defaults, "mem_mb=50000")
    assert memory_of_validation(submitted, shared_project, *more) == 50_000


def test_example_of_kempner_gives_validation_a_gpu(submitted, shared_project):
    shared_project.write_config()
    path = shared_project.root / "profiles/kempner/config.yaml"
    profile = path.read_text()
    example = "  # validate_run:\n  #   slurm_partition: kempner_h100\n" + '  #   gres: "gpu:1"\n'
    assert example in profile
    path.write_text(profile.replace(example, example.replace("  # ", "  ")))
    line = submitted("kempner", *trained(shared_project))
    path.write_text(profile)
    assert line[len(COMMON) :] == [
        *("rule_validate_run_wildcards_base", "-A", "my_kempner_lab", "-p", "kempner_h100"),
        *("-t", "120", "--mem", "16000", "--requeue", "--cpus-per-task=8", "--gres=gpu:1"),
    ]


def test_reproduction_asks_for_one_node_like_those_that_train(submitted, shared_project):
    shared_project.write_config()
    shared_project.path("exported.json").parent.mkdir(parents=True, exist_ok=True)
    shared_project.path("exported.json").touch()
    line = submitted(
        "kempner", "--allowed-rules", "reproduce_run", "--", "results/base/reproduced.json"
    )
    assert line[len(COMMON) :] == [
        *("rule_reproduce_run_wildcards_base", "-A", "my_kempner_lab", "-p", "kempner_h100"),
        *("-t", "120", "--mem", "16000", "--requeue", "--cpus-per-task=8", "--gres=gpu:4"),
    ]
