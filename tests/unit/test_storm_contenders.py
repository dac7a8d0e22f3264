"""Threat: a contender that loses by a mistake in its script, or by packages that were not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.storm import environments, record
from bench.storm.__main__ import CONTENDERS
from bench.storm.contender import Contender, Layout, SbatchContender
from bench.storm.contenders.snakemake import Rule
from bench.storm.contenders.submitit import Submitit
from forge.core.errors import ConfigError

pytestmark = pytest.mark.tools

CLUSTER: Any = None  # nothing here asks it
SCRIPTS = [kind for kind in CONTENDERS.values() if issubclass(kind, SbatchContender)]
WITH_ENVIRONMENT = [kind for kind in CONTENDERS.values() if kind.environment]


@pytest.mark.parametrize("kind", SCRIPTS, ids=lambda kind: kind.name)
def test_script_of_contender_parses_and_starts_its_program(
    kind: type[SbatchContender], tmp_path: Path
) -> None:
    contender = kind(CLUSTER, tmp_path / "with blank", Layout())
    contender.prepare()
    script = contender.folder / "job.sh"
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert contender.program() in script.read_text() or kind is Submitit
    compile(contender.script_path.read_text(), contender.script_path, "exec")


def test_rule_of_snakemake_is_one_job_that_starts_the_program(tmp_path: Path) -> None:
    contender = Rule(CLUSTER, tmp_path / "rule", Layout())
    contender.prepare()
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "8", "--printshellcmds"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=contender.folder, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "bash train.sh" in done.stdout
    assert "nodes=4" in done.stdout
    train = contender.folder / "train.sh"
    assert contender.program() in train.read_text()
    subprocess.run(["bash", "-n", train], check=True)


def test_task_of_submitit_is_a_rank_and_its_launcher_is_none(tmp_path: Path) -> None:
    contender = Submitit(CLUSTER, tmp_path / "one", Layout())
    task = ["-m", "submitit.core._submit", str(contender.folder / "submitit")]
    assert contender.is_rank(task)
    assert not contender.is_rank([*task[:2], str(tmp_path / "other/submitit")])
    assert not contender.is_rank([str(contender.script_path), *contender.options()])
    assert not contender.is_rank(["-m"])


# --- environments ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_STORM_ENVIRONMENTS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", WITH_ENVIRONMENT, ids=lambda kind: kind.name)
def test_contender_without_its_environment_says_how_to_install_it(
    kind: type[Contender], folder: Path
) -> None:
    name = kind.environment
    command = f"python -m bench.storm.environments {name}"
    assert kind.why_not() == f"its environment is not installed: {command}"
    stamp = folder / name / "packages.txt"
    stamp.parent.mkdir()
    stamp.write_text("torch==2.12.0\n")
    assert kind.why_not() == f"its environment has other versions than those pinned now: {command}"
    stamp.write_text("".join(f"{package}\n" for package in environments.PACKAGES[name]))
    assert kind.why_not() is None


def test_every_package_is_pinned_and_pytorch_is_that_of_forge() -> None:
    forge = Path("constraints.txt").read_text().splitlines()
    for packages in environments.PACKAGES.values():
        assert all(package.count("==") == 1 for package in packages)
        assert set(environments.PYTORCH) <= {*packages} & {*forge}


def test_command_names_the_environments_where_one_is_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["environments", "torhcft"])
    with pytest.raises(SystemExit) as stopped:
        environments.main()
    known = ConfigError("no environment 'torhcft'", fix="there are nvrx, torchft, submitit")
    assert str(stopped.value).startswith(str(known))


def test_environment_for_which_pip_finds_no_release_does_not_count_as_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))  # empty
    (folder / "submitit").mkdir()
    stamp = folder / "submitit/packages.txt"
    stamp.write_text("".join(f"{package}\n" for package in environments.PACKAGES["submitit"]))
    monkeypatch.setattr(sys, "argv", ["environments", "submitit"])
    monkeypatch.setitem(environments.PACKAGES, "submitit", ("no-such-package==1",))
    with pytest.raises(SystemExit) as stopped:
        environments.main()
    said = str(stopped.value)
    assert said.startswith(
        f"pip could not install no-such-package==1 into {folder}/submitit: ERROR"
    )
    assert "Traceback" not in said
    assert environments.why_not("submitit")


# --- samples --------------------------------------------------------------------------------------


def test_sample_that_two_launches_trained_on_counts_once(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text(
        '{"time": 10.0, "resumed": ""}\n'
        '{"time": 10.5, "step": 1, "samples": [0, 1]}\n'
        '{"time": 11.0, "step": 1, "samples": [0, 1]}\n'
        '{"time": 11.5, "step": 2, "samples": [1, 2]}\n'
    )
    assert record.distinct_samples(log, 10.0) == [(0.5, 2), (1.5, 1)]
