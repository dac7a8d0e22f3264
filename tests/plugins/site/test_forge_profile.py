"""Threat: `forge profile` overwrites what is there, leaves half a profile, or has a traceback for what a
tired person types."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import REPOSITORY

from forge.cli import main
from forge.core.errors import Exit
from forge.core.machine import load_machine
from forge.slurm import slurm
from forge.slurm.site import SiteAnswers

SITES = Path(__file__).parent / "sites"
KEMPNER = str(SITES / "kempner.json")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project's directory, with profiles/there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles/there").mkdir(parents=True)
    return tmp_path


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_profile_is_written_and_ends_with_the_lines_to_try(capsys):
    assert main(["profile", "mine", "--from", KEMPNER]) == Exit.DONE
    said = capsys.readouterr().out
    assert load_machine("profiles/mine/machine.yaml").gpu == "H200"
    assert names(Path("profiles/mine")) == ["config.yaml", "machine.yaml"]
    assert said.splitlines()[-3:] == [
        "  snakemake --profile profiles/mine preflight",
        "  forge plan config/config.yaml --nodes 2 --ranks-per-node 4"
        " --machine profiles/mine/machine.yaml",
        "  snakemake --profile profiles/mine train",
    ]
    for words in (
        "kempner_h200 (8 nodes with 4 H200 140 GiB",
        "kempner_alvarez_lab",
        "not preempted",
    ):
        assert words in said


def test_line_to_plan_that_is_printed_works(capsys):
    assert main(["profile", "mine", "--from", KEMPNER]) == Exit.DONE
    [line] = [s for s in capsys.readouterr().out.splitlines() if s.startswith("  forge plan")]
    config = REPOSITORY / "config/config.yaml"
    words = line.split()[1:]
    shutil.copytree(config.parent, "config")
    assert main([*words, "--train.batch_size=8"]) == Exit.DONE


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], Exit.CONFIG, "no NAME for the profile"),
        (["there"], Exit.CONFIG, "profiles/there exists already, and is left as it is"),
        (["profiles/mine"], Exit.CONFIG, "cannot be the name of a profile"),
        (["../mine"], Exit.CONFIG, "cannot be the name of a profile"),
        (["-mine"], Exit.CONFIG, "unrecognized arguments"),
        ([""], Exit.CONFIG, "no NAME for the profile"),
        (["default"], Exit.CONFIG, "Snakemake reads profiles/default in every command"),
        (["mine", "two"], Exit.CONFIG, "unrecognized arguments: two"),
        (["mine", "--gpus", "four"], Exit.CONFIG, "invalid int value: 'four'"),
        (["mine", "--partition", "h200"], Exit.CONFIG, "no such partition"),
        (["mine", "--nodes", "7"], Exit.CONFIG, "--nodes 4, or --partition"),
        (["mine", "--save", "f.json"], Exit.CONFIG, "are saved already"),
    ],
)
def test_mistake_is_refused_and_nothing_is_written(project, capsys, words, code, message):
    before = names(project)
    try:
        got = main(["profile", *words, "--from", KEMPNER])
    except SystemExit as error:
        got = error.code
    assert got == code
    assert message in capsys.readouterr().err
    assert names(project) == before


def test_link_in_place_of_the_profile_is_not_followed(project, capsys):
    (project / "profiles/mine").symlink_to(project / "elsewhere")
    assert main(["profile", "mine", "--from", KEMPNER]) == Exit.CONFIG
    assert not (project / "elsewhere").exists()
    assert "exists already" in capsys.readouterr().err


def test_directory_without_profiles_is_refused_by_name(project, capsys, monkeypatch):
    (project / "other").mkdir()
    monkeypatch.chdir(project / "other")
    assert main(["profile", "mine", "--from", KEMPNER]) == Exit.CONFIG
    assert "there is no directory profiles/ in" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 1, "source": "x"}', "[1]"])
def test_file_that_has_no_answers_is_refused_by_its_name(project, capsys, text):
    (project / "site.json").write_text(text)
    assert main(["profile", "mine", "--from", "site.json"]) == Exit.DATA
    said = capsys.readouterr().err
    assert "site.json" in said and "Traceback" not in said
    assert not (project / "profiles/mine").exists()


def test_host_without_slurm_is_told_what_to_do(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["profile", "mine"]) == Exit.UNFIT
    assert "scontrol, sinfo not found on" in capsys.readouterr().err


def test_controller_that_does_not_respond_is_69_when_patience_ends(capsys, monkeypatch):
    monkeypatch.setattr(slurm, "refuse_missing", lambda *_: None)
    monkeypatch.setattr(slurm, "PATIENCE_SEC", 0.0)
    silent = ("", f"slurm_load_partitions: {slurm.CONTROLLER_AWAY} slurm controller")
    monkeypatch.setattr(slurm, "run", lambda *_, **__: silent)
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    assert main(["profile", "mine"]) == Exit.UNFIT
    assert slurm.CONTROLLER_AWAY in capsys.readouterr().err


def test_answers_are_saved_without_a_profile_and_no_file_is_overwritten(
    project, capsys, monkeypatch
):
    answers = SiteAnswers.read(Path(KEMPNER))
    monkeypatch.setattr(SiteAnswers, "ask", lambda: answers)
    assert main(["profile", "--save", "site.json"]) == Exit.DONE
    assert SiteAnswers.read(Path("site.json")) == answers
    assert main(["profile", "--save", "site.json"]) == Exit.CONFIG
    assert "site.json exists already" in capsys.readouterr().err
    assert names(project / "profiles") == ["there"]


def test_full_disk_leaves_no_half_profile(project, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    assert main(["profile", "mine", "--from", KEMPNER]) == Exit.UNFIT
    assert names(project / "profiles") == ["there"]


def test_control_characters_of_a_file_do_not_reach_the_terminal(project, capsys):
    text = Path(KEMPNER).read_text().replace("Kempner Computing Handbook", "Kempner\\u001b[31m")
    (project / "site.json").write_text(text)
    assert main(["profile", "mine", "--from", "site.json"]) == Exit.DATA
    streams = capsys.readouterr()
    assert "\x1b" not in streams.out + streams.err
    assert not Path("profiles/mine").exists()


def test_command_needs_no_torch_and_no_slurm_plugin():
    code = (
        "import sys\nfrom forge.plugins.site import profile\n"
        "print([m for m in ('torch', 'snakemake', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
