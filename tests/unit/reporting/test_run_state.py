"""Whether people wait, look or start again depends on the judge: it must not guess, and it must say the
same wherever it is asked."""

import json
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest
from support import happenings
from support.manifests import MADE_BY, save
from support.run_states import (
    GOAL,
    KINDS,
    QUEUE,
    dead,
    elsewhere,
    hold,
    new_run,
    queued,
    train,
)

from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core.file_list import FileList
from forge.core.files import read_json, write_json
from forge.core.process import Process
from forge.core.records import Lock
from forge.hosts.lock import WORKFLOW_LOCK
from forge.reporting import logs, run_state, show, status, summary, workflow_output
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import judge
from forge.slurm import jobs, slurm


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    monkeypatch.setattr(slurm, "cluster_name", lambda **_: "forge")


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "base")


def judged(run, queue):
    return judge(RunFiles(run.paths), queue)


def now(found):
    """What a run does, and what a person has to do."""
    return ": ".join(filter(None, (found.reason, found.next)))


# --- one judge ------------------------------------------------------------------------------------


def test_failed_download_is_shown_with_its_own_log(tmp_path):
    run = new_run(tmp_path / "base")
    KINDS["not-downloaded"][0](run)
    found = judged(run, ())
    assert found.log == tmp_path / f"data/logs/inputs-{'a' * 12}.log"
    assert (found.next, found.details) == (f"less {found.log}", ("fix: correct it",))
    # Of a source from a hub, the config of its tokens tells the id of the files.
    ids = {"tokenizer": "c" * 12, "tokens": "d" * 12, "sources": {"web": "b" * 12}}
    data = tmp_path / "data"
    write_json(run.paths.config, {"data": str(data), "ids": ids})
    assert judged(run, ()).state == "not started"
    write_json(data / f"tokens/{'b' * 12}/config.json", {"ids": {"inputs": "a" * 12}})
    assert judged(run, ()) == found
    with found.log.open("a") as log:
        log.write("downloaded 3 files\n")
    assert judged(run, ()).state == "not started"


def test_logs_of_data_are_those_of_the_runs_own_project(tmp_path, monkeypatch):
    """They have the same names in two projects with the same config."""
    own = new_run(tmp_path / "own/results/base")
    ids = {"tokenizer": "c" * 12, "tokens": "d" * 12}
    write_json(own.paths.config, {"results": "results", "data": "data", "ids": ids})
    for project, words in (("own", "error: no space"), ("other", "error: not this one")):
        log = tmp_path / project / f"data/logs/tokenize-{'d' * 12}.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"2026-11-21T04:25:31 {words}\n")
    monkeypatch.chdir(tmp_path / "other")
    assert judged(own, ()).log == tmp_path / f"own/data/logs/tokenize-{'d' * 12}.log"


@contextmanager
def living_command(run):
    """A process that holds the lock of a workflow command; its id."""
    with subprocess.Popen(["sleep", "60"]) as command:
        try:
            process = Process.of(command.pid)
            facts = {"cluster": None, "command": "snakemake", "restart": 0}
            Lock(**process.to_json(), **facts).write(run.paths.root / WORKFLOW_LOCK)
            yield command.pid
        finally:
            command.kill()


def test_run_whose_living_command_makes_what_it_needs_is_running(run):
    assert judged(run, ()).state == "not started"
    with living_command(run) as pid:
        found = judged(run, ())
        assert found.state == "running" and f"pid {pid} on" in found.reason
        assert found.next == ""
    assert judged(run, ()).state == "not started"


def test_run_whose_living_command_waits_for_its_parent_waits_and_nobody_is_needed(run):
    child = new_run(run.paths.root.with_name("child"))
    write_json(child.paths.config, {"parent": "base@20"})
    assert judged(child, ()).next == "run the target train"
    with living_command(child) as pid:
        found = judged(child, ())
        assert (found.state, found.next) == ("waiting", "")
        assert f"base has not ended: its command (pid {pid} on" in found.reason
        run.complete(20)
        assert judged(child, ()).state == "running"


@pytest.fixture(params=KINDS)
def kind(request, tmp_path, monkeypatch):
    """A run of each kind, with its state and its reason, while Slurm's queue has one job."""
    made = new_run(tmp_path / request.param)
    make, state, reason = KINDS[request.param]
    make(made)
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(jobs, "read_queue", lambda *_, **__: QUEUE)
    return made, state, reason


def test_a_run_has_the_same_state_and_reason_whoever_is_asked(kind, capsys):
    run, state, reason = kind
    found = judged(run, QUEUE)
    assert found.state == state and reason in found.reason
    assert summary.summarize(run.paths).state == found
    assert status.look([run.paths])[0][0].state == found
    assert status.status([run.paths], as_json=True) is None
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["run"], row["state"], row["reason"]) == (run.root.name, state, found.reason)
    for shown in (
        lambda: show.show([run.paths]),
        lambda: status.status([run.paths]),
        lambda: workflow_output.print_end([run.paths]),
    ):
        shown()
        text = capsys.readouterr().out
        assert state in text and run_state.clipped(found.reason).rstrip("…") in text


def test_a_run_that_needs_a_person_has_a_next_command_and_no_other_has(kind):
    found = judged(kind[0], QUEUE)
    assert bool(found.next) == (found.state not in ("finished", "validated", "waiting", "running"))


def test_a_lock_of_another_version_is_reported_by_its_file(run):
    hold(run)
    lock = run.paths.root / ".lock"
    write_json(lock, {**read_json(lock), "format": 9})
    found = judged(run, None)
    assert found.state == "unknown" and f"{lock} has format 9" in found.reason


@pytest.mark.parametrize("name", ["events.jsonl", ".lock", "metrics.jsonl"])
def test_a_file_that_cannot_be_read_is_the_reason_and_ends_no_command(run, name):
    train(run)
    path = run.paths.root / name
    path.unlink(missing_ok=True)
    path.mkdir()
    found = judged(run, None)
    assert found.state == "unknown" and f"cannot read {path}: Is a directory" in found.reason


# --- errors that no event tells --------------------------------------------------------------------


def log(run, name, text, at=None):
    run.paths.logs.mkdir(exist_ok=True)
    (run.paths.logs / name).write_text(text)
    if at:
        run_state.os.utime(run.paths.logs / name, (at, at))


def test_an_error_that_is_only_in_a_log_is_the_reason_with_its_fix(run):
    train(run)
    run.event(happenings.stop("SIGUSR1", 40))
    log(run, "stage.log", "forge stage: no space on node02\n  cause: full\n  fix:   free some\n")
    found = judged(run, None)
    assert (found.state, found.reason) == ("failed", "stage: no space on node02")
    assert found.details == ("cause: full", "fix: free some")
    assert found.log == run.paths.logs / "stage.log"


def test_an_error_of_a_log_that_was_overcome_is_none(run):
    train(run)
    log(run, "stage.log", "forge stage: no space on node02\n", at=time.time() - 3600)
    run.event(happenings.stop("SIGUSR1", 40))
    assert judged(run, None).state == "stopped"


def test_a_bug_is_reported_by_its_exception(run):
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 7\n'
    log(run, "report.log", f"{trace}forge report: this is a bug of Forge, please report it\n")
    assert judged(run, None).reason == "report: KeyError: 7"


def test_the_log_of_training_repeats_its_event_and_is_no_second_reason(run):
    train(run)
    run.event(happenings.failed("step 41: loss nan"))
    log(run, "train.log", "forge train: rank 1: step 41: loss nan\n")
    assert judged(run, None).reason == "rank 1: step 41: loss nan"
    log(run, "train.log", "forge train: preflight passed none of n1, training needs 1\n")
    assert judged(run, None).reason == "train: preflight passed none of n1, training needs 1"


def test_error_of_a_tracker_is_no_error_of_the_run(run):
    train(run)
    run.event(happenings.stop("STOP file"))
    before = judged(run, None)
    log(run, "tracking.txt", "forge train: wandb has no key\nTimeoutError: no answer\n")
    assert judged(run, None) == before
    assert "no answer" not in str(logs.read_starts(run.paths))


def test_tokens_that_cannot_be_made_fail_each_run_that_wants_them(run, tmp_path):
    ids = {"tokenizer": "a1b2c3d4e5f6", "tokens": "0f1e2d3c4b5a"}
    write_json(run.paths.config, {"data": str(tmp_path / "data"), "ids": ids, "train": {}})
    made = tmp_path / "data/logs/tokenize-0f1e2d3c4b5a.log"
    made.parent.mkdir(parents=True)
    made.write_text("forge tokenize: a.txt is not UTF-8\n")
    found = judged(run, None)
    assert (found.state, found.reason) == ("failed", "tokenize: a.txt is not UTF-8")
    assert (found.log, found.next) == (made, f"less {made}")


def test_a_job_that_only_completes_hides_no_end(run):
    train(run, GOAL, job="17")
    run.save(GOAL)
    run.complete(GOAL)
    assert judged(run, [queued("COMPLETING")]).state == "done"


# --- states ---------------------------------------------------------------------------------------


def test_no_step_for_long_is_where_it_hangs(run):
    hold(run)
    train(run, ago=245)
    found = judged(run, None)
    assert now(found) == f"no step for 4 min: forge logs {run.root}"
    assert found.state == "running"


def test_a_run_whose_steps_are_slow_does_not_hang(run):
    hold(run)
    run.time = time.time() - 400
    run.launch(0)
    for step in range(1, 4):
        run.time += 60
        run.metric("train", step, loss=5.0, tokens_per_sec=9.0)
    assert now(judged(run, None)) == "training"


def test_a_long_evaluation_counts_as_progress(run):
    hold(run)
    train(run, ago=100)
    run.evaluate(40, seconds=95)
    assert now(judged(run, None)) == "training"


def test_ranks_that_do_not_come_up_are_seen(run):
    hold(run)
    run.time = time.time() - 20
    run.event(happenings.launch())
    assert now(judged(run, None)) == "starting ranks for 20 s"
    run.paths.events.unlink()
    run.time = time.time() - 700
    run.event(happenings.launch())
    assert now(judged(run, None)) == f"starting ranks for 11 min: forge logs {run.root}"


def test_an_earlier_launch_says_nothing_of_this_start(run):
    train(run, ago=500)
    hold(run, ago=30)
    assert now(judged(run, None)) == "starting for 30 s"


@pytest.mark.parametrize("command", ["preflight", "validate"])
def test_a_command_that_works_on_the_run_is_named(run, command):
    train(run, GOAL)
    hold(run, command=command)
    found = judged(run, None)
    assert found.state == "running" and now(found).startswith(f"{command} for")


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """fake_slurm(sacct=TEXT): commands of Slurm on the PATH that print a text."""

    def make(**texts):
        for name, text in texts.items():
            script = tmp_path / "bin" / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(f"#!/bin/sh\necho '{text}'\n")
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    return make


def test_a_run_whose_process_died_is_cut_off(run):
    train(run)
    hold(run, dead())
    found = judged(run, None)
    assert found.state == "cut off"
    assert now(found) == "its process is gone: rerun the command"


def test_a_process_that_cannot_be_asked_is_not_called_dead(run):
    train(run, ago=30)
    hold(run, elsewhere())
    found = judged(run, None)
    assert found.state == "unknown"
    assert "node07 cannot be asked" in now(found) and "30 s ago" in now(found)


def test_a_run_that_never_began_has_not_started(run):
    found = judged(run, None)
    assert (found.state, found.step) == ("not started", None)


def test_a_child_that_has_not_started_says_what_it_waits_for(run):
    child = new_run(run.paths.root.with_name("child"))
    write_json(child.paths.config, {"parent": "base@20"})
    waits = "nothing has trained yet, it starts from base@20, and base has not ended"
    assert judged(child, None).reason == waits
    run.complete(20)
    assert judged(child, None).reason == waits.rpartition(",")[0]


def test_a_stop_says_its_cause_and_how_to_resume(run):
    train(run)
    run.event(happenings.stop("SIGTERM", 40))
    assert now(judged(run, None)) == "SIGTERM: rerun the command to resume"
    run.paths.stop.touch()
    found = judged(run, None)
    assert found.state == "stopped" and f"rm {run.paths.stop}" in now(found)


def test_a_failure_says_why_and_where_to_read(run):
    train(run)
    run.event(happenings.failed("step 41: loss nan\n  fix:   lower train.lr"))
    found = judged(run, None)
    assert (found.state, now(found)) == (
        "failed",
        f"rank 1: step 41: loss nan: forge logs {run.root}",
    )


def test_a_run_that_diverged_is_not_to_be_run_again_as_it_is(run):
    train(run)
    run.event(happenings.failed("loss nan", diverged=True))
    assert judged(run, None).next.startswith("change the config under a new run name")


def test_a_failed_preflight_names_its_checks(run):
    run.event(happenings.preflight(status="failed", failed=["disk", "clock"]))
    found = judged(run, None)
    assert found.state == "failed" and "disk, clock" in now(found)


def test_a_passed_preflight_hides_no_earlier_end(run):
    train(run)
    run.event(happenings.stop("Ctrl-C", 40))
    run.preflight()
    assert judged(run, None).state == "stopped"


def test_a_finished_run_is_done_then_validated_or_invalid(run):
    train(run, GOAL)
    run.save(GOAL)
    run.complete(GOAL)
    found = judged(run, None)
    assert found.state == "done" and "forge validate" in now(found)
    run.validate(GOAL)
    found = judged(run, None)
    assert found.state == "validated" and now(found).startswith("validation loss ")
    run.validate(GOAL, "a bit has flipped")
    found = judged(run, None)
    assert (found.state, found.reason) == ("invalid", "a bit has flipped")
    assert found.next == f"forge validate {run.root} --all"


def remove_all(run):
    shutil.rmtree(run.paths.checkpoints)


def remove_step(run):
    shutil.rmtree(run.paths.checkpoints / "step-00000100")


def remove_manifest(run):
    (run.paths.latest / "checkpoint.json").unlink()


def cut_file(run):
    (run.paths.latest / "__0_0.distcp").write_bytes(b"")


def remove_link(run):
    run.paths.latest.unlink()


def set_back(run):
    save(run.paths, 50)
    run.paths.latest.unlink()
    run.paths.latest.symlink_to("step-00000050")


AGAIN = "restore it, or to retrain: rm -f {run}/{{trained,validated}}.json, then rerun the command"
EXAMINE = "forge validate {run} --all"
RELINK = "ln -sfn step-00000100 {run}/checkpoints/latest"


@pytest.mark.parametrize(
    ("happens", "reason", "following"),
    [
        (remove_all, "{run}/checkpoints/step-00000100 is missing", AGAIN),
        (remove_step, "{run}/checkpoints/step-00000100 is missing", AGAIN),
        (remove_manifest, "checkpoint.json does not exist", EXAMINE),
        (cut_file, "__0_0.distcp has 0 bytes, the manifest says 7", EXAMINE),
        (remove_link, "{run}/checkpoints/latest is missing", RELINK),
        (set_back, "{run}/checkpoints/latest points to step-00000050", RELINK),
    ],
)
def test_a_run_without_the_checkpoint_that_was_validated_is_not_validated(
    run, happens, reason, following, capsys
):
    train(run, GOAL)
    save(run.paths, GOAL)
    run.complete(GOAL)
    run.validate(GOAL)
    assert judged(run, None).state == "validated"
    happens(run)
    found = judged(run, None)
    assert found.state == "checkpoint missing" and found.tone == "open"
    assert found.reason.startswith("it was validated; ")
    assert reason.format(run=run.root) in found.reason
    assert found.next == following.format(run=run.root)
    show.show([run.paths])
    assert "its checkpoint is valid" not in capsys.readouterr().out
    run.paths.validated.unlink()
    found = judged(run, None)
    assert found.state == "checkpoint missing" and "it was validated" not in found.reason


def test_a_program_without_the_checkpoint_that_it_ended_with_is_not_validated(run):
    program = {"command": ["x"], "checkpoints": {"pattern": "{step}.pt"}, "goal": GOAL}
    write_json(run.paths.config, {"run": "base", "program": program})
    file = run.paths.checkpoints / f"{GOAL}.pt"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    checkpoints = ProgramCheckpoints(run.paths, RunFiles(run.paths).program.checkpoints, 1)
    checkpoints.seal(file, GOAL, MADE_BY)
    run.launch(0)
    run.complete(GOAL)
    run.validate(GOAL)
    assert judged(run, None).state == "validated"
    file.write_bytes(b"")
    found = judged(run, None)
    assert found.state == "checkpoint missing" and "has 0 bytes, its seal says 7" in found.reason
    assert found.next == EXAMINE.format(run=run.root)
    file.unlink()
    found = judged(run, None)
    assert f"the checkpoint of step {GOAL}" in found.reason
    assert found.next == AGAIN.format(run=run.root)


def test_step_is_that_of_the_newest_checkpoint_of_two_that_were_sealed_newest_first(run):
    run.launch(0)
    run.save(40)
    run.save(20)
    assert RunFiles(run.paths).step == 40
    run.launch(20)
    assert RunFiles(run.paths).step == 20
    run.save(30)
    assert RunFiles(run.paths).step == 30


def test_a_checkpoint_that_may_not_be_read_is_unknown(run, monkeypatch):
    train(run, GOAL)
    save(run.paths, GOAL)
    run.complete(GOAL)

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(run.paths.latest))

    monkeypatch.setattr(FileList, "check_sizes", refuse)
    found = judged(run, None)
    assert found.state == "unknown" and "Permission denied" in found.reason


def test_a_raised_goal_is_not_done(run):
    train(run)
    run.complete(40)
    found = judged(run, None)
    assert found.state == "stopped" and "now it is 100" in now(found)


# --- jobs -----------------------------------------------------------------------------------------


def test_a_waiting_job_says_for_what_and_how_long(run):
    at = time.time()
    job = queued("PENDING", reason="Priority", submitted=at - 600, start=at + 7205)
    found = judged(run, [job])
    assert (found.state, found.job) == ("waiting", "17")
    assert now(found) == "PENDING (Priority) for 10 min, expected to start in 2 h 0 min"


def test_a_job_that_never_starts_by_itself_says_what_to_do(run):
    found = judged(run, [queued("PENDING", reason="PartitionTimeLimit")])
    assert "PENDING (PartitionTimeLimit)" in now(found) and "lower runtime" in now(found)


def test_a_job_that_has_too_few_nodes_left_names_those_that_the_run_excludes(run):
    run.paths.bad_nodes.write_text("n1   # 2999-01-01T00:00:00 does not start a process\nn2\n")
    found = judged(run, [queued("PENDING", reason="BadConstraints")])
    assert f"{run.paths.bad_nodes} excludes n1, n2: remove" in found.next
    assert "scancel 17" in found.next
    assert "excluded: n1   # 2999-01-01T00:00:00 does not start a process" in found.details
    found = judged(run, [queued("PENDING", reason="Priority")])
    assert (found.next, found.details) == ("", ())


def test_a_job_of_this_run_runs_on_nodes(run):
    train(run)
    hold(run, elsewhere("17"))
    found = judged(run, [queued()])
    assert (found.state, found.job, now(found)) == ("running", "17 on node[01-02]", "training")


@pytest.mark.parametrize(
    ("state", "who", "following"),
    [
        ("SUSPENDED", "a job of higher priority", "scontrol resume 17"),
        ("STOPPED", "by a signal", "scancel --signal=CONT 17"),
    ],
)
def test_a_suspended_job_is_not_called_running_and_says_who_may_have_done_it(
    run, state, who, following
):
    train(run)
    hold(run, elsewhere("17"))
    found = judged(run, [queued(state)])
    assert found.state == "suspended"
    assert state in found.reason and who in found.reason and following in found.next


def test_a_job_that_slurm_keeps_without_its_first_node_is_cut_off_and_can_be_requeued(run):
    headless = queued(nodes="node02")
    train(run, ago=run_state.STALL_SEC + 1)
    hold(run, elsewhere("17"))
    found = judged(run, [headless])
    assert (found.state, found.next) == ("cut off", "scontrol requeue 17")
    assert found.reason.startswith("Slurm keeps job 17 on node02 without node01")
    assert judged(run, [queued(run=None, batch_host="login")]).state == "running"  # of salloc
    train(run)
    assert judged(run, [headless]).state == "running"  # its ranks do not know it yet


def test_a_job_that_is_being_cancelled_is_not_called_running(run):
    train(run)
    hold(run, elsewhere("17"))
    found = judged(run, [queued("COMPLETING")])
    assert (found.state, found.next) == ("stopping", "")
    assert "Slurm is ending job 17" in found.reason


@pytest.mark.parametrize("here", ["another", slurm.silent("away")])
def test_a_job_of_another_cluster_is_not_the_one_of_its_number_here(run, monkeypatch, here):
    def name(**_):
        if isinstance(here, Exception):
            raise here
        return here

    monkeypatch.setattr(slurm, "cluster_name", name)
    train(run)
    hold(run, elsewhere("17"))
    assert judged(run, []).state == "unknown"


def test_a_job_without_a_comment_is_known_by_what_the_run_wrote(run, tmp_path):
    train(run, job="17")
    hold(run, elsewhere("17"))
    assert judged(run, [queued(run=None, folder=tmp_path)]).state == "running"


def test_a_job_of_another_project_is_not_this_runs(run, tmp_path):
    assert judged(run, [queued(folder=tmp_path)]).state == "not started"


def test_a_holder_whose_job_has_left_the_queue_is_gone(run):
    train(run)
    hold(run, elsewhere("17"))
    assert judged(run, [queued(id="18", run="other")]).state == "cut off"
    assert judged(run, None).state == "unknown"  # Slurm was not asked


def test_what_accounting_says_of_a_job_that_left_no_record_is_shown(run, fake_slurm):
    train(run, job="17")
    hold(run, elsewhere("17"))
    fake_slurm(sacct="OUT_OF_MEMORY|0:125")
    said = "Slurm says of job 17: OUT_OF_MEMORY, exit code 0:125"
    assert said in now(judged(run, []))
    fake_slurm(sacct="")  # it forgets jobs, or is not set up
    assert "Slurm says" not in now(judged(run, []))


def test_a_requeued_job_waits_though_its_dead_start_left_its_lock(run):
    train(run, job="17")
    hold(run, elsewhere("17"))
    found = judged(run, [queued("PENDING", reason="BeginTime")])
    assert (found.state, now(found)) == ("waiting", "PENDING (BeginTime)")


def test_a_job_between_two_verbs_says_what_is_behind_it(run):
    job = queued(start=time.time() - 700)
    found = judged(run, [job])
    assert now(found) == f"starting, or staging for 11 min: forge logs {run.root}"
    write_json(run.paths.stage, {})
    assert now(judged(run, [job])) == "staged for 0 s"
    write_json(run.paths.preflight_pass, {})
    assert now(judged(run, [job])) == "preflight passed for 0 s"


def test_a_job_whose_training_is_over_is_not_starting(run):
    train(run, GOAL)
    run.event(happenings.completed(GOAL))
    job = queued(start=time.time() - 50)
    assert now(judged(run, [job])) == "at its goal, finishing for 0 s"
    assert "starting" in now(judged(run, [queued(start=time.time() + 1)])), "it was requeued"


LINE = (
    "17|RUNNING|None|node[01-02]|node01|2026-11-21T04:36:00|2026-11-21T04:37:00|{}|/home/ada/forge"
)


@pytest.mark.parametrize(
    ("comment", "name"),
    [
        ("rule_allocation-base_preflight_run_stage_run_train_run", "base"),
        ("rule_allocation-base_2_train_run", "base_2"),
        ("rule_allocation-base", None),
        ("rule_tokenize_wildcards_0123", None),
        ("(null)", None),
    ],
)
def test_a_line_of_squeue_is_read(comment, name):
    job = jobs.parse_line(LINE.format(comment))
    assert (job.id, job.state, job.nodes) == ("17", "RUNNING", "node[01-02]")
    assert job.start - job.submitted == 60
    assert str(job.folder) == "/home/ada/forge"
    assert job.run == name
