"""One project from its first start: trained once, never again without a reason, and only what changed.

A run that starts from another one is refused until it can, then trained like any row.
"""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from support.clone import started, started_rules
from support.run_directory import unnamed

from forge.core import json_lines
from forge.core.errors import Exit
from forge.core.files import read_json
from forge.core.paths import WORKFLOW_RUNS
from forge.core.records import WorkflowRuns

TASKS = Path(__file__).parents[1] / "plugins/evaluation/distributed/tasks"
BASE = "run\tparent\ttrain.lr\nbase\t\t\n"


def test_a_row_with_a_parent_is_refused_before_anything_is_made_where_there_is_none(shared_project):
    shared_project.one_rank()
    shared_project.write_runs(f"{BASE.splitlines()[0]}\ncooler\tbase@4\t1e-3\n")
    code, output = shared_project.snakemake("train")
    assert code != 0
    assert "there is no run base in results" in output
    assert "train base first" in output
    assert "Traceback" not in output
    assert not (shared_project.root / "results").exists()


def test_one_command_gives_a_validated_checkpoint_and_a_report(shared_project):
    shared_project.write_runs(BASE)
    code, output = shared_project.snakemake("train")
    assert code == 0, output
    assert shared_project.read("trained.json")["step"] == 12
    assert shared_project.read("validation.json")["status"] == "valid"
    assert shared_project.read("validated.json")["status"] == "valid"
    report = shared_project.path("report.html").read_text()
    assert "<svg" in report and "http://" not in report.replace("http://www.w3.org", "")
    assert shared_project.path("checkpoints/latest").resolve().name == "step-00000012"
    # Also after training: the sections that are read later are no part of a run's config.
    assert not {"validate", "report"} & shared_project.read("config.json").keys()
    assert "NODE " in output
    # A line when a job starts, a line when it is done, those of `forge`, and eight of the whole.
    rules = ["stage_run", "preflight_run", "train_run", "validate_run", "report_run", "train"]
    assert sorted(started_rules(output)[:3]) == ["config_run", "tokenize", "tokenizer"]
    assert started_rules(output)[3:] == rules
    ended = re.findall(r"^\[\S+ \S+\] (.+): done \((\d) of 9\)$", output, re.MULTILINE)
    assert sorted(job for job, _ in ended) == sorted(started(output))
    assert [int(number) for _, number in ended] == list(range(1, 10))
    assert not re.search(r"\b(reason|resources|input|jobid):|Provided|Select|Execute", output)
    assert len(output.splitlines()) < 50, output
    # All that Snakemake has to say is in its own log, which the command names.
    log = re.search(r"^Complete log\(s\): (.*)$", output, re.MULTILINE)
    complete = Path(log[1]).read_text()
    assert complete.count("    reason: ") == 9 and "    resources: " in complete
    *_, head, row = output.splitlines()
    assert head.split() == ["run", "state", "reason", "log", "next"]
    assert row.split()[:2] == ["base", "validated"] and "report.html" in row
    found = WorkflowRuns.read(shared_project.root / WORKFLOW_RUNS)
    assert found.folders == {"base": "results/base"}


def test_allocation_files_are_gone_and_what_people_read_is_kept(shared_project):
    assert not shared_project.path(".allocation/stage.json").exists()
    for name in ("metrics.jsonl", "events.jsonl", "preflight.json", "preflight.tsv", "logs"):
        assert shared_project.path(name).exists()
    assert unnamed(shared_project.path("")) == set()


def test_the_same_command_on_a_finished_run_does_nothing(shared_project):
    before = shared_project.path("trained.json").stat().st_mtime_ns
    code, output = shared_project.snakemake("train")
    assert code == 0
    assert "Nothing to be done" in output
    assert output.splitlines()[-1].startswith("base  validated")
    assert shared_project.path("trained.json").stat().st_mtime_ns == before


def test_another_profile_and_other_ranks_train_nothing_again(shared_project):
    profiles = shared_project.root / "profiles"
    shutil.copytree(profiles / "local", profiles / "other")
    config = profiles / "other/config.yaml"
    config.write_text(config.read_text().replace("tasks_per_node: 1", "tasks_per_node: 2"))
    (profiles / "other/machine.yaml").write_text("launcher: torchrun\n")
    code, output = shared_project.snakemake("train", profile="profiles/other")
    assert code == 0
    assert "Nothing to be done" in output
    of_command = ("--config", "tasks_per_node=4", "partition=other")
    code, output = shared_project.snakemake("train", *of_command, profile="profiles/other")
    assert code == 0
    assert "Nothing to be done" in output


def test_a_step_that_the_parent_has_not_is_refused_with_those_it_has(shared_project):
    shared_project.write_runs(f"{BASE}cooler\tbase@5\t1e-3\n")
    code, output = shared_project.snakemake("train")
    assert code != 0
    assert "has the steps 4, 8, 12" in output


def test_a_new_row_trains_only_the_new_run_from_its_parent_on_the_shared_tokens(shared_project):
    first = shared_project.path("trained.json").stat().st_mtime_ns
    shared_project.write_runs(f"{BASE}cooler\tbase@4\t1e-3\n")
    code, output = shared_project.snakemake("train")
    assert code == 0, output
    assert "tokenize" not in started_rules(output)
    assert shared_project.path("trained.json").stat().st_mtime_ns == first
    base, cooler = (shared_project.read("trained.json", run) for run in ("base", "cooler"))
    assert cooler["step"] == 12
    assert base["weights_digest"] != cooler["weights_digest"]
    parent = cooler["parent"]
    assert (parent["run"], parent["step"]) == ("base", 4)
    lines = json_lines.read(shared_project.path("metrics.jsonl", "cooler"))
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(5, 13))
    assert shared_project.read("validated.json", "cooler")["status"] == "valid"
    shown = shared_project.forge("show", "results/cooler").stdout
    assert f"base@4 (digest {parent['digest']})" in shown

    code, output = shared_project.snakemake("train")
    assert code == 0
    assert "Nothing to be done" in output


def test_tokens_lie_beside_the_config_that_makes_them(shared_project):
    [path] = shared_project.root.glob("data/tokens/*/config.json")
    done = shared_project.forge("tokenize", str(path.relative_to(shared_project.root)))
    assert done.returncode == 0, done.stderr
    assert f"tokens {path.parent.name}: nothing to do" in done.stdout + done.stderr


def test_a_row_with_other_tokens_shares_the_tokenizer(shared_project):
    """A tokenizer that is made again has a new date, and every finished run would train again."""
    shared_project.write_runs("run\ttokenize.val_fraction\nbase\t\nother\t0.2\n")
    code, output = shared_project.snakemake("-n", "train")
    assert code == 0, output
    assert "rule tokenize:" in output and "results/other/trained.json" in output
    assert "rule tokenizer:" not in output and "results/base/trained.json" not in output
    shared_project.write_runs(BASE)


def test_new_prompts_validate_again_and_train_nothing(shared_project):
    shared_project.write_config(report={"prompts": ["while "]})
    code, output = shared_project.snakemake("-n", "train")
    assert code == 0
    assert "rule validate_run" in output and "    reason: " in output
    assert "rule train_run" not in output
    assert "validated" not in output.splitlines()[-1]  # nothing was done: no table
    shared_project.write_config()


def test_reproduction_is_recorded_and_a_negative_certificate_survives(shared_project):
    code, output = shared_project.snakemake("reproduce")
    assert code == 0, output
    assert started_rules(output) == ["export_run", "reproduce_run", "reproduce"]
    assert "  ok    steps 5 to 8: bitwise equal" in output
    log = shared_project.path("logs/reproduce.log").read_text()
    assert "reproduced: 12 of 12 steps retrained" in log
    assert "on a machine that has trained the run, too" in log
    record = shared_project.read("reproduced.json")
    certificate = shared_project.path(record["file"])
    assert read_json(certificate)["predicate"]["sha256"] == record["certificate"]
    code, output = shared_project.snakemake("-n", "reproduce")
    assert "Nothing to be done" in output

    [tensors] = shared_project.path("checkpoints/step-00000008").glob("__0_0.distcp")
    data = tensors.read_bytes()
    tensors.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    code, output = shared_project.snakemake("--forcerun=reproduce_run", "reproduce")
    tensors.write_bytes(data)
    assert code != 0
    assert "2 of 3 intervals could not be retrained" in output
    assert not shared_project.path("reproduced.json").exists()
    assert read_json(certificate)["predicate"]["result"] == "incomplete"


def test_tasks_score_every_kept_checkpoint_on_this_machine_and_train_nothing(
    shared_project, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(shared_project.root / "tmp/hub"))
    tasks = shared_project.root / "tasks"
    tasks.mkdir()
    shutil.copy(TASKS / "words.jsonl", tasks)
    task = (TASKS / "words.yaml").read_text().replace("DATA", "tasks/words.jsonl")
    (tasks / "words.yaml").write_text(task)
    evaluate = {"tasks": ["words"], "include_path": "tasks", "every": 8}
    shared_project.write_config(evaluate=evaluate)
    code, output = shared_project.snakemake("evaluate", "compare")
    assert code == 0, output
    assert "evaluate_data base" in started(output) and "train_run" not in started_rules(output)
    found = shared_project.read("evaluation.json")
    assert [one["step"] for one in found["evaluations"]] == [8, 12]
    page = (shared_project.root / "results/compare.html").read_text()
    assert "words acc (0-shot, 8 documents)" in page

    code, output = shared_project.snakemake("-n", "evaluate", "compare")
    assert "Nothing to be done" in output
    shared_project.write_config()
    code, output = shared_project.snakemake("-n", "evaluate")
    assert code != 0
    assert "nothing to evaluate: evaluate.tasks is [] for base" in output


def test_without_snakemakes_record_a_finished_run_is_done_and_a_changed_config_is_seen(
    shared_project,
):
    """As after `make clean`, or in a project that was copied."""
    plan = ("-n", "train", "evaluate", "compare")
    evaluate = {"tasks": ["words"], "include_path": "tasks", "every": 8}
    shutil.rmtree(shared_project.root / ".snakemake")
    shared_project.write_config(evaluate=evaluate)
    code, output = shared_project.snakemake(*plan)
    assert code == 0, output
    due = {"compare", "compare_runs"}  # the page does not say which runs it should have
    assert due == set(re.findall(r"rule (\w+):", output))

    for changed, rule in (
        ({"train": {"max_steps": 20}}, "train_run"),
        ({"report": {"prompts": ["while "]}}, "validate_run"),
        ({"evaluate": {**evaluate, "limit": 4}}, "evaluate_run"),
    ):
        shutil.rmtree(shared_project.root / ".snakemake")
        shared_project.write_config(**{"evaluate": evaluate, **changed})
        code, output = shared_project.snakemake(*plan)
        assert code == 0, output
        first = re.findall(r"rule (\w+_run):", output)
        assert rule in first and ("train_run" in first) == (rule == "train_run"), output
    shared_project.write_config()


def test_a_run_needs_its_text_no_more_once_its_tokens_are_made(shared_project):
    corpus = shared_project.root / "corpus"
    corpus.rename(shared_project.root / "away")
    code, output = shared_project.snakemake("-n", "train")
    assert code == 0, output
    assert "base goes on with the data that it has: tokenize.inputs: 'corpus'" in output
    assert "Nothing to be done" in output
    shared_project.write_config(train={"max_steps": 20})
    code, output = shared_project.snakemake("-n", "train")
    assert code == 0 and "rule train_run:" in output and "rule tokenize" not in output, output

    shared_project.write_config(tokenize={"val_fraction": 0.2})
    code, output = shared_project.snakemake("-n", "train")
    assert code != 0 and "tokenize.inputs: 'corpus'" in output
    [tokens] = shared_project.root.glob("data/tokens/*/manifest.json")
    tokens.rename(tokens.with_name("moved"))
    shared_project.write_config()
    code, output = shared_project.snakemake("-n", "train")
    assert code != 0 and "tokenize.inputs: 'corpus'" in output
    tokens.with_name("moved").rename(tokens)
    (shared_project.root / "away").rename(corpus)


def test_goal_below_latest_is_refused_before_anything_is_removed(shared_project):
    shared_project.write_config(train={"max_steps": 5})
    code, output = shared_project.snakemake("train")
    assert code != 0
    assert "train.max_steps is 5" in output
    assert "at step 12" in output
    assert shared_project.read("trained.json")["step"] == 12
    assert shared_project.forge("train", "config/config.yaml").returncode == 78


def test_changed_hyperparameter_is_refused_by_key_and_nothing_is_overwritten(shared_project):
    before = shared_project.path("config.json").read_bytes()
    shared_project.write_config(train={"lr": 0.5})
    code, output = shared_project.snakemake("train")
    assert code != 0
    assert "train.lr is 0.5, the checkpoint has 0.003" in output
    assert shared_project.path("config.json").read_bytes() == before
    shared_project.write_config()


def test_dangling_latest_does_not_stand_in_the_way(shared_project):
    """Training resumes from the newest checkpoint that is there, and says so."""
    target = shared_project.path("checkpoints/latest").resolve()
    target.rename(target.with_name("moved"))
    shared_project.write_config(train={"max_steps": 20})
    code, output = shared_project.snakemake("-n", "train")
    assert code == 0, output
    assert "rule train_run" in output
    target.with_name("moved").rename(target)
    shared_project.write_config()


def test_raised_goal_stages_checks_and_trains_on_when_resume_removes_a_stop_file(shared_project):
    shared_project.write_runs("run\nbase\n")
    shared_project.write_config(train={"max_steps": 20})
    stop = shared_project.path("STOP")
    stop.touch()
    code, output = shared_project.snakemake("train")
    assert code != 0
    assert "STOP asks this run to stop" in output
    assert started_rules(output) == ["config_run", "stage_run", "preflight_run", "train_run"]
    code, output = shared_project.snakemake("resume")
    assert code == 0, output
    assert "resume base: step 12 of 20" in output
    assert not stop.exists()
    assert shared_project.read("trained.json")["step"] == 20
    assert "beyond decay_steps 12" in output
    assert shared_project.read("validation.json")["step"] == 20


def test_verbose_prints_all_of_a_job(shared_project):
    shared_project.path("report.html").unlink()
    code, output = shared_project.snakemake("--verbose", "report")
    assert code == 0, output
    assert "    reason: Missing output files: results/base/report.html" in output
    assert "    resources: " in output and started(output) == []


def test_snakemakes_own_report_has_the_runs_pages(shared_project):
    code, output = shared_project.snakemake("--report", "report.zip", "train")
    assert code == 0, output
    with zipfile.ZipFile(shared_project.root / "report.zip") as archive:
        page = archive.read("report/report.html").decode()
        files = {Path(name).name for name in archive.namelist()}
    assert {"report.html", "validated.json"} <= files
    assert '"results/base/report.html"' in page and "record of the validation" in page
    assert "Each run is a category on the left" in page


@pytest.fixture
def read_only_results(shared_project):
    """The project's results on a read-only file system: root heeds no modes."""
    results = shared_project.root / "results"
    mounts = (
        ["mount", "-o", "bind", results, results],
        ["mount", "-o", "remount,bind,ro", results],
    )
    if os.geteuid() != 0 or any(subprocess.run(line, check=False).returncode for line in mounts):
        pytest.skip("needs permission to mount a read-only file system")
    yield results
    subprocess.run(["umount", "--lazy", results], check=True)


def test_read_only_results_are_read_and_what_must_write_says_so(shared_project, read_only_results):
    code, output = shared_project.snakemake("train")
    assert code == 0, output
    assert "Nothing to be done" in output and "Traceback" not in output
    assert output.splitlines()[-1].startswith("base  validated")
    for command in ("status", "show", "logs base"):
        done = shared_project.forge(*command.split())
        assert done.returncode == 0 and "base" in done.stdout, done.stderr
    for command in ("export base", "validate results/base/config.json"):
        done = shared_project.forge(*command.split())
        assert done.returncode == Exit.UNFIT, done.stderr
        assert "results/base/" in done.stderr and "Read-only file system" in done.stderr
        assert "choose another directory" in done.stderr and "Traceback" not in done.stderr


def test_run_whose_checkpoints_were_removed_is_not_trained_again_and_not_called_validated(
    shared_project,
):
    shutil.rmtree(shared_project.path("checkpoints"))
    before = shared_project.path("trained.json").stat().st_mtime_ns
    code, output = shared_project.snakemake("train")
    assert code == 0, output
    assert "Nothing to be done" in output
    row = output.splitlines()[-1]
    assert row.startswith("base  checkpoint missing at step 20  it was validated; "), row
    assert "rm -f results/base/{trained,validated}.json, then rerun the command" in row
    assert shared_project.path("trained.json").stat().st_mtime_ns == before
    for name in ("trained.json", "validated.json"):
        shared_project.path(name).unlink()
    code, output = shared_project.snakemake("train")
    assert code == 0, output
    assert output.splitlines()[-1].startswith("base  validated")
    assert shared_project.read("trained.json")["step"] == 20
