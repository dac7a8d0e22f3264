"""Another training program under `forge train`: what its run ends with, and what it resumes from."""

import contextlib
import os
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from support.counting_program import (
    GOAL,
    LAB,
    TWO_RANKS,
    latest_step,
    make_counting_run,
)
from support.live_run import Run, forge, ranks, wait_until

from forge.core import json_lines
from forge.core.errors import Exit
from forge.core.files import read_json
from forge.core.process import MAX_OPEN_FILES
from forge.reporting.history import read_history

ENDLESS = 10**6  # stopped before


@pytest.fixture(autouse=True)
def launches():
    """Really launched: ranks of a program are processes of their own."""


@pytest.fixture
def program(tmp_path):
    """Makes a run of the counting program: program(arguments, **keys of `program`)."""
    return partial(make_counting_run, tmp_path)


def once(tmp_path):
    return ("--once", tmp_path / "done")


def starts(run, rank=0):
    """The steps at which this rank began, by its logs, in order."""
    logs = sorted(run.paths.logs.glob(f"local.*.{rank}.log"))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return [int(line.split()[-1]) for line in lines if "begins at step" in line]


def is_living(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_run_is_done_when_the_sealed_checkpoint_of_its_goal_is_there(program):
    run = program()
    assert run.forge("train", *TWO_RANKS).code == 0
    assert read_json(run.paths.trained)["step"] == GOAL
    seal = read_json(run.paths.checkpoints / f"checkpoint-{GOAL}.forge.json")
    assert set(seal["files"]) == {"state.json", "part-0.json", "part-1.json"}
    again = run.forge("train", *TWO_RANKS)
    assert (again.code, "nothing to train" in again.text) == (0, True)
    assert len(run.events("launch")) == 1


# Ends when a monitor of its node has written, which has the least priority: 50 s at most.
UNTIL_MONITORED = """
import glob, os, sys, time
end = time.monotonic() + 50
while not glob.glob(os.environ["FORGE_RUN"] + "/monitor/*.jsonl"):
    sys.exit("no monitor") if time.monotonic() > end else time.sleep(0.05)
"""


def test_load_of_the_node_is_recorded_while_a_program_trains(program):
    command = [sys.executable, "-c", UNTIL_MONITORED]
    run = program(command=command, goal=None, checkpoints=None)
    ended = run.forge("train", *TWO_RANKS)
    assert ended.code == 0, ended.text
    [launch] = run.events("launch")
    [loads] = [json_lines.read(path) for path in run.paths.monitor.glob("*.jsonl")]
    assert {line["launch"] for line in loads} == {launch["launch"]}


def test_program_gets_the_variables_of_the_contract(program, tmp_path):
    show = "import os; print('VARIABLES', *(f'{n}={os.environ[n]}' for n in sorted(os.environ)), sep='|')"
    run = program(command=[sys.executable, "-c", show], goal=None, checkpoints=None)
    assert run.forge("train", *TWO_RANKS).code == 0
    (log,) = run.paths.logs.glob("local.*.1.log")
    line = next(line for line in log.read_text().splitlines() if line.startswith("VARIABLES"))
    found = dict(part.partition("=")[::2] for part in line.split("|")[1:])
    expected = {
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"NODE_RANK": "0", "FORGE_RESUME": "", "FORGE_DATA": "", "FORGE_GOAL": "0"},
        **{"FORGE_RESTART": "0", "FORGE_DEADLINE": "", "HF_HUB_OFFLINE": "1"},
        **{"FORGE_RUN": str(run.folder), "FORGE_CHECKPOINTS": f"{run.folder}/checkpoints"},
    }
    assert {name: found[name] for name in expected} == expected
    wanted = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    assert wanted <= {name for name, value in found.items() if value}
    assert Path(found["FORGE_HEARTBEAT"]).name == "1"


def test_ranks_may_open_as_many_files_as_the_system_allows(program):
    """The limit of the shell may be lower: 300 here."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = MAX_OPEN_FILES if before[1] == resource.RLIM_INFINITY else before[1]
    command = ["sh", "-c", "echo may open $(ulimit -Sn)"]
    run = program(command=command, checkpoints=None, goal=None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    try:
        assert run.forge("train").code == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    [log] = run.paths.logs.glob("local.*.0.log")
    assert f"may open {min(hard, MAX_OPEN_FILES)}\n" in log.read_text()


def test_ranks_read_inputs_from_the_staged_copy_until_it_disappears(program, tmp_path):
    (tmp_path / "in/two words").mkdir(parents=True)
    for name in ("one.txt", "two words/größe.txt"):
        (tmp_path / "in" / name).write_text("text")
    code = "import pathlib, sys; print('READS', *pathlib.Path(sys.argv[1]).glob('*/*.txt'))"
    command = [sys.executable, "-c", code, "{data}"]
    inputs = {"inputs": [str(tmp_path / "in")], "goal": None, "checkpoints": None}
    run = program(command=command, **inputs)
    made, disk = f"--data={tmp_path}/made", f"--machine.stage.folder={tmp_path}/disk"
    assert run.forge("inputs", made).code == 0
    assert run.forge("stage", made, disk, "--machine.stage.mode=always").code == 0
    (copy,) = tmp_path.glob("disk/forge-*/*/data")
    for folder in (copy, tmp_path / "in"):
        outcome = run.forge("train", made)
        assert f"READS {folder}/two words/größe.txt" in outcome.text, outcome.text
        shutil.rmtree(copy, ignore_errors=True)
    assert f"warning: cannot read {copy}, using the shared directories" in outcome.text


def test_program_that_ends_early_with_status_0_is_a_failure(program):
    run = program("--exit-at", 7)
    outcome = run.forge("train")
    assert outcome.code == Exit.FAILED
    assert f"ended by itself at step 5 of {GOAL}, with exit status 0" in outcome.text
    assert not run.paths.trained.exists()


def test_stop_is_passed_on_and_the_same_command_resumes(program):
    run = program(goal=ENDLESS)
    started = run.start("train", *TWO_RANKS)
    wait_until(run.paths.latest.is_symlink, "a sealed checkpoint")
    started.process.send_signal(signal.SIGTERM)
    outcome = started.end()
    assert outcome.code == Exit.STOPPED, outcome.text
    step = latest_step(run)
    assert (
        f"stopped at step {step} of {ENDLESS} (SIGTERM); a checkpoint is committed" in outcome.text
    )
    assert run.forge("train", *TWO_RANKS, f"--program.goal={step + 5}").code == 0
    assert starts(run) == [0, step]


@pytest.mark.parametrize("how", ["stop", "failure"])
def test_trainer_that_a_script_leaves_behind_does_not_train_on_beside_the_next_launch(
    program, tmp_path, how
):
    """bash dies of SIGTERM and passes nothing on."""
    script = tmp_path / "run.sh"
    ending = "wait" if how == "stop" else "sleep 2; exit 3"
    script.write_text(f'"$@" &\necho $! >> {tmp_path}/pids\n{ending}\n')
    run = program(goal=ENDLESS)
    config = yaml.safe_load(run.config.read_text())
    config["program"]["command"] = ["bash", str(script), *config["program"]["command"]]
    run.config.write_text(yaml.safe_dump(config))
    started = run.start("train", "--machine.max_restarts_without_progress=1")
    if how == "stop":
        wait_until(run.paths.latest.is_symlink, "a sealed checkpoint")
        started.process.send_signal(signal.SIGTERM)
    outcome = started.end()
    assert outcome.code == (Exit.STOPPED if how == "stop" else Exit.FAILED), outcome.text
    assert "has ended and left processes, which were killed" in outcome.text
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids
    wait_until(lambda: not any(map(is_living, pids)), "the end of what the script had started")


def test_stop_file_stops_it_and_nothing_starts_while_it_is_there(program):
    run = program(goal=ENDLESS)
    started = run.start("train")
    wait_until(run.paths.latest.is_symlink, "a sealed checkpoint")
    run.paths.stop.touch()
    outcome = started.end()
    assert (outcome.code, "(STOP file)" in outcome.text) == (Exit.STOPPED, True)
    assert run.forge("train").code == Exit.STOPPED
    assert len(run.events("launch")) == 1


def test_rank_that_exits_with_a_status_is_named_and_the_ranks_start_again(program, tmp_path):
    run = program("--exit-at", 7, "--exit-with", 3, *once(tmp_path))
    outcome = run.forge("train", *TWO_RANKS)
    assert outcome.code == 0, outcome.text
    assert "its program exited with 3: rank" in outcome.text
    assert "gives up at step 7); restarting from the last checkpoint" in outcome.text
    assert starts(run) == [0, 5]


def test_status_93_is_never_started_again(program):
    run = program("--exit-at", 7, "--exit-with", 93)
    outcome = run.forge("train")
    assert outcome.code == Exit.FAILED
    assert "its program exited with 93" in outcome.text
    assert len(run.events("launch")) == 1


def test_program_that_makes_no_progress_ends_as_a_crash_loop(program):
    run = program("--exit-at", 0, "--exit-with", 1)
    outcome = run.forge("train", "--machine.max_restarts_without_progress=2")
    assert outcome.code == Exit.FAILED
    assert "2 launches in a row did not get beyond step 0" in outcome.text
    assert outcome.text.count("rank 0 gives up at step 0") > 2


def test_hung_rank_is_named_and_the_ranks_start_again(program, tmp_path):
    heartbeat = {"timeout_sec": 6}
    run = program("--hang-at", 7, *once(tmp_path), heartbeat=heartbeat)
    outcome = run.forge("train", *TWO_RANKS)
    assert outcome.code == 0, outcome.text
    assert "rank 1: no heartbeat for 6 s, the last one at step 7" in outcome.text
    assert starts(run) == [0, 5]
    history = read_history(run.paths)
    assert [(one.resumed_step, one.last_step) for one in history.launches] == [(0, 7), (5, GOAL)]
    assert history.seconds["recomputed"] > 6


PRINTS = """
import os, sys, time
for step in range(int(sys.argv[1])):
    if os.environ["RANK"] == "0":
        print("step", step, flush=True)
    time.sleep(0.5)
time.sleep(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("log", "steps", "hangs_sec", "code"),
    [("any", 16, 0, 0), (True, 16, 0, Exit.FAILED), ("any", 1, 60, Exit.FAILED)],
)
def test_output_of_one_rank_may_be_the_heartbeat_of_all(program, log, steps, hangs_sec, code):
    """As in KempnerForge, where rank 0 alone prints."""
    command = [sys.executable, "-c", PRINTS, str(steps), str(hangs_sec)]
    heartbeat = {"log": log, "timeout_sec": 3}
    run = program(command=command, goal=None, checkpoints=None, heartbeat=heartbeat)
    outcome = run.forge("train", *TWO_RANKS, "--machine.max_restarts_without_progress=1")
    assert outcome.code == code, outcome.text
    assert ("no heartbeat for 3 s" in outcome.text) == (code != 0)


def test_kill_in_the_middle_of_a_save_leaves_nothing_that_is_resumed_from(program, tmp_path):
    run = program("--kill-in-save", 10, *once(tmp_path))
    outcome = run.forge("train", *TWO_RANKS)
    assert outcome.code == 0, outcome.text
    assert starts(run, rank=1) == [0, 5]
    assert (run.paths.quarantine / "checkpoint-10/part-1.json").stat().st_size < 1000
    assert "never sealed: the program ended before its save" in outcome.text


@pytest.mark.weekly
def test_rank_that_saves_20_s_later_than_the_others_is_waited_for(program):
    run = program("--slow-save", 20, "--save-every", 10, checkpoints={"settle_sec": 1})
    assert run.forge("train", *TWO_RANKS).code == 0
    seal = read_json(run.paths.checkpoints / "checkpoint-10.forge.json")
    assert set(seal["files"]) == {"state.json", "part-0.json", "part-1.json"}


def test_corrupt_checkpoint_is_moved_away_and_the_one_before_is_used(program):
    run = program("--sleep", 0.02)
    assert run.forge("train").code == 0
    part = run.paths.checkpoints / f"checkpoint-{GOAL}/part-0.json"
    part.write_bytes(b"\0" + part.read_bytes()[1:])
    run.paths.trained.unlink()
    outcome = run.forge("train")
    assert outcome.code == 0, outcome.text
    assert "part-0.json has digest" in outcome.text
    assert starts(run) == [0, 15]
    assert (run.paths.quarantine / f"checkpoint-{GOAL}").is_dir()


def test_newest_sealed_checkpoints_are_kept(program):
    run = program(keep_last=2)
    assert run.forge("train").code == 0
    left = sorted(path.name for path in run.paths.checkpoints.glob("checkpoint-*"))
    assert [name for name in left if "forge" not in name] == ["checkpoint-15", "checkpoint-20"]
    assert len(left) == 4


def test_command_that_cannot_start_is_named(program):
    run = program(command=["no-such-program"])
    outcome = run.forge("train")
    assert (outcome.code, "cannot start 'no-such-program'" in outcome.text) == (Exit.CONFIG, True)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (4, Exit.DATA)])
def test_own_check_of_the_program_decides_whether_its_checkpoint_is_valid(
    program, status, code, capsys
):
    check = [sys.executable, "-c", f"import sys; print(sys.argv[1]); sys.exit({status})"]
    run = program(validate=[*check, "{checkpoint}"])
    assert run.forge("train").code == 0
    outcome = run.forge("validate")
    assert outcome.code == code, outcome.text
    assert f"checkpoints/checkpoint-{GOAL}" in outcome.text
    assert run.paths.validated.exists() == (code == 0)
    table = forge("validate", str(run.folder), "--all")
    assert (table.code, capsys.readouterr().out.count("valid")) == (0, 4)


def test_plain_ddp_script_resumes_after_kill_9_of_a_rank(tmp_path):
    values = yaml.safe_load((LAB / "config.yaml").read_text())
    del values["runs"]
    program = values["program"]
    program |= {"goal": 60, "source": str(LAB), "stop": {"grace_sec": 30}}
    program["command"] = [sys.executable, "train.py", "--steps", "{goal}", "--save-every", "10"]
    program["command"] += ["--sleep", "0.1"]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**values, "run": "ddp", "results": str(tmp_path)}))
    run = Run(config, tmp_path / "ddp")
    started = run.start("train", *TWO_RANKS)
    wait_until(run.paths.latest.is_symlink, "a sealed checkpoint")
    os.kill(children_of(ranks()[1])[0].pid, signal.SIGKILL)
    outcome = started.end(180)
    assert outcome.code == 0, outcome.text
    assert "rank 1: its program was killed by SIGKILL" in outcome.text
    assert "resuming from step" in outcome.text
    assert read_json(run.paths.trained)["step"] == 60


def children_of(process):
    return psutil.Process(process.pid).children()
