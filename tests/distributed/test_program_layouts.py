"""The configs of the labs kempnerforge and torchtitan, with a program that behaves as these two do.

Threat: a config that was written by reading their sources, and that Forge cannot run. Everything in
`program` is the lab's own, apart from command, source and goal. The program stands in for theirs, which
need GPUs.
"""

import signal
import sys
from pathlib import Path

import pytest
import yaml
from support.live_run import TWO_RANKS, Run, wait_until
from support.repository import REPOSITORY
from test_programs import starts

from forge.core.errors import Exit
from forge.core.files import read_json

LABS = REPOSITORY / "config/labs"
STAND_IN = Path(__file__).parents[1] / "support/programs/dcp_layouts.py"
GOAL = 15
ENDLESS = 10**6  # stopped before
PREFIX = {"kempnerforge": "step_", "torchtitan": "step-"}  # of a checkpoint's name


@pytest.fixture(autouse=True)
def launches():
    """Really launched: ranks of a program are processes of their own."""


@pytest.fixture
def lab_run(tmp_path):
    """Makes a run of a lab's config: lab_run(lab, *arguments of the stand-in, goal)."""

    def make(lab, *arguments, goal=GOAL):
        values = yaml.safe_load((LABS / lab / "config.yaml").read_text())
        del values["runs"]
        command = [sys.executable, str(STAND_IN), lab, "--steps={goal}", "--folder={checkpoints}"]
        values["program"] |= {"command": [*command, *arguments], "source": None, "goal": goal}
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({**values, "results": str(tmp_path), "run": lab}))
        return Run(config, tmp_path / lab)

    return make


@pytest.mark.parametrize(
    ("lab", "arguments"),
    [("kempnerforge", ["--async-save"]), pytest.param("torchtitan", [], marks=pytest.mark.weekly)],
)
def test_kill_in_a_save_is_resumed_from_the_checkpoint_before(lab_run, tmp_path, lab, arguments):
    run = lab_run(lab, *arguments, "--kill-in-save=10", f"--once={tmp_path / 'once'}")
    outcome = run.forge("train", *TWO_RANKS)
    assert outcome.code == 0, outcome.text
    assert "rank 1: its program was killed by SIGKILL" in outcome.text
    assert starts(run) == [0, 5]
    half_written = run.paths.quarantine / f"{PREFIX[lab]}10"
    assert [path.name for path in half_written.glob("*.distcp")]
    assert not (half_written / ".metadata").exists()
    seals = sorted(path.name for path in run.paths.checkpoints.glob("*.forge.json"))
    assert seals == sorted(f"{PREFIX[lab]}{step}.forge.json" for step in (5, 10, GOAL))
    assert read_json(run.paths.trained)["step"] == GOAL
    outcome = run.forge("validate")
    assert outcome.code == 0, outcome.text
    assert "16 tensors in 2 files, all finite" in outcome.text


def test_kempnerforge_saves_when_it_is_stopped_and_resumes_there(lab_run):
    run = lab_run("kempnerforge", "--sleep=0.2", goal=ENDLESS)
    started = run.start("train", *TWO_RANKS)
    wait_until((run.paths.checkpoints / "step_5/metadata.json").exists, "its first checkpoint")
    started.process.send_signal(signal.SIGTERM)
    outcome = started.end()
    assert outcome.code == Exit.STOPPED, outcome.text
    step = int(run.paths.latest.readlink().name.removeprefix("step_"))
    assert f"stopped at step {step} of {ENDLESS} (SIGTERM)" in outcome.text
    assert "the program gets SIGTERM, and is killed after" in outcome.text
    assert run.forge("train", *TWO_RANKS, f"--program.goal={step + 2}").code == 0
    assert starts(run) == [0, step]


@pytest.mark.weekly
def test_torchtitan_is_killed_when_it_is_stopped_and_resumes_from_its_last_sealed_checkpoint(
    lab_run,
):
    run = lab_run("torchtitan", "--sleep=0.5", goal=ENDLESS)
    started = run.start("train", *TWO_RANKS)
    wait_until(run.paths.latest.is_symlink, "a sealed checkpoint")
    started.process.send_signal(signal.SIGTERM)
    outcome = started.end()
    assert outcome.code == Exit.STOPPED, outcome.text
    assert "the program is killed, since it cannot be asked to save" in outcome.text
    step = int(run.paths.latest.readlink().name.removeprefix("step-"))
    assert run.forge("train", *TWO_RANKS, f"--program.goal={step + 2}").code == 0
    assert starts(run) == [0, step]


def test_kempnerforge_that_gives_up_with_status_0_has_failed(lab_run):
    run = lab_run("kempnerforge", "--give-up-at=7")
    outcome = run.forge("train", *TWO_RANKS)
    assert outcome.code == Exit.FAILED
    assert f"ended by itself at step 5 of {GOAL}, with exit status 0" in outcome.text
