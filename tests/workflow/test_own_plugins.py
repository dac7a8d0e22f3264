"""The plugins of docs/plugins/own.md as a lab types them, in runs. Threats: rows that are lost or sent
twice, a run that is bound to what no weight depends on, and other code than was digested."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.clone import Project, started_rules
from support.project_plugin import LAYERS, documented, write_documented, write_plugin

from forge.core import project_plugins
from forge.core.files import read_json


def configure(project: Project, max_steps: int = 12, **sections: object) -> None:
    """The tiny config with these sections, trained by one rank."""
    project.write_config(**sections)
    path = project.root / "config/config.yaml"
    values = yaml.safe_load(path.read_text())
    values["train"]["max_steps"] = max_steps
    path.write_text(yaml.safe_dump(values))


def trained(project: Project) -> str:
    code, output = project.snakemake("train")
    assert code == 0, output
    assert project.read("validated.json")["status"] == "valid"
    return output


def used(project: Project) -> list[dict[str, str]]:
    """Plugins of each launch that had any."""
    lines = map(json.loads, project.path("events.jsonl").read_text().splitlines())
    return [line["used"] for line in lines if line["event"] == "plugins"]


# --- a tracker ------------------------------------------------------------------------------------


def sent(project: Project) -> list[int]:
    lines = (project.root / "lab.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.all
def test_tracker_has_each_step_once_while_its_code_is_edited_and_left_out(project: Project) -> None:
    project.one_rank()
    plugin = write_documented(project.root, "plugins/lab_file.py")
    with_tracker = {"plugins": ["plugins/lab_file.py"], "tracking": {"lab_file": {}}}
    configure(project, **with_tracker)
    trained(project)
    first = {"lab_file": digest(plugin)}
    assert used(project) == [first]
    assert sent(project) == [*range(13)]
    assert "plugins" not in read_json(project.path("config.json"))["ids"]  # no weight depends on it
    # Edited: the run goes on, the log has the new digest. What runs is the copy, not a module of that
    # name in the directory.
    (project.root / "lab_file.py").write_text("raise RuntimeError('not the plugin')")
    told = "\nopen('imported.txt', 'a').write(__file__ + '\\n')\n"
    plugin.write_text(plugin.read_text() + told)
    configure(project, 16, **with_tracker)
    trained(project)
    assert used(project) == [first, {"lab_file": digest(plugin)}]
    assert sent(project) == [*range(17)]
    copy = project.root / project_plugins.COPIES / digest(plugin) / "hooks.py"
    assert set((project.root / "imported.txt").read_text().split()) == {str(copy)}
    # Gone.
    plugin.unlink()
    configure(project, 20)
    trained(project)
    assert len(used(project)) == 2 and sent(project)[-1] == 16
    write_documented(project.root, "plugins/lab_file.py")
    configure(project, 20, **with_tracker)
    done = project.forge("sync", "base")
    assert done.returncode == 0, done.stderr
    assert sent(project) == [*range(21)]


def digest(path: Path) -> str:
    return project_plugins.digest_of({"hooks.py": path.read_bytes()})


# --- a check of the nodes -------------------------------------------------------------------------


def test_node_that_a_plugin_finds_unfit_does_not_train(project: Project) -> None:
    project.one_rank()
    plugin = write_documented(project.root, "plugins/lab_node.py")
    plugin.write_text(plugin.read_text().replace('"/scratch"', f'"{project.root}/scratch"'))
    configure(project, plugins=["plugins/lab_node.py"])
    code, output = project.snakemake("train")
    assert code != 0, output
    assert f"scratch: {project.root}/scratch is not mounted" in output
    assert "fix: leave this node out, and tell the site" in output
    assert not project.path("metrics.jsonl").exists()
    # Corrected: no run is bound to it.
    plugin.write_text(plugin.read_text().replace("os.path.ismount(SCRATCH)", "True"))
    trained(project)
    checks = read_json(project.path("preflight.json"))["nodes"][0]["checks"]
    assert [check["status"] for check in checks if check["name"] == "scratch"] == ["ok"]


# --- a rule ---------------------------------------------------------------------------------------

RULES = ("hooks.py", "rules.smk", "table.py")


def test_rule_of_a_plugin_makes_what_it_wants_of_each_run_and_training_is_bound_to_none(
    project: Project,
) -> None:
    project.one_rank()
    for name in RULES:
        write_documented(project.root, f"plugins/losses/{name}")
    configure(project, plugins=["plugins/losses"])
    trained(project)
    lines = project.path("losses.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [str(step) for step in range(1, 13)]
    code, output = project.snakemake("train")
    assert code == 0 and started_rules(output) == [], output
    # Without it nothing is retrained; with one that fails the run is what it was.
    configure(project)
    code, output = project.snakemake("train")
    assert code == 0 and started_rules(output) == [], output
    project.path("losses.tsv").unlink()
    script = project.root / "plugins/losses/table.py"
    script.write_text("raise RuntimeError('not today')")
    configure(project, plugins=["plugins/losses"])
    code, output = project.snakemake("train")
    assert code != 0 and started_rules(output) == ["losses"], output
    assert project.read("validated.json")["status"] == "valid"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "hooks.py",
            '["losses.tsv"]',
            '"losses.tsv"',
            "wanted_files: TypeError: it gives 'losses.tsv'",
        ),
        ("hooks.py", "target in", "config.no in", "wanted_files: AttributeError"),
        (
            "hooks.py",
            '"rules.smk"',
            '"rule.smk"',
            "rule_file: .*rule.smk is no file beside its hooks",
        ),
        ("rules.smk", "rule losses", "rule train_run", "The name train_run is already used"),
        ("rules.smk", "output:", "outputs:", r"plugins/[0-9a-f]{64}/rules\.smk"),
    ],
)
def test_rules_that_do_not_work_are_told_by_the_plugin_or_the_file(
    project: Project, file: str, old: str, new: str, message: str
) -> None:
    for name in RULES:
        path = write_documented(project.root, f"plugins/losses/{name}")
        if name == file:
            path.write_text(path.read_text().replace(old, new))
    configure(project, plugins=["plugins/losses"])
    code, output = project.snakemake("train", "-n")
    assert code != 0 and re.search(message, output), output
    assert "Traceback" not in output


def test_rules_beside_a_run_of_somebody_else_are_not_read(project: Project) -> None:
    marker = project.root / "RAN"
    for place in ("results/base/plugins/losses", "results/base", "results"):
        for name in RULES:
            path = write_documented(project.root, f"plugins/losses/{name}")
            (project.root / place).mkdir(parents=True, exist_ok=True)
            leaves = f"open({str(marker)!r}, 'a').close()\n"
            (project.root / place / name).write_text(leaves + path.read_text())
    shutil.rmtree(project.root / "plugins")
    ids = {"tokenizer": "a" * 12, "tokens": "b" * 12, "plugins": {"losses": "c" * 64}}
    values = {"plugins": ["results/base/plugins/losses"], "ids": ids}
    (project.root / "results/base/config.json").write_text(json.dumps(values))
    configure(project)
    code, output = project.snakemake("train", "-n")
    assert code == 0 and "losses" not in output, output
    assert not marker.exists() and not (project.root / project_plugins.COPIES).exists()


# --- an installed package -------------------------------------------------------------------------


def test_package_that_pip_has_installed_brings_its_tracker(
    project: Project, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    module = write_documented(source, "plugins/lab_file.py")
    (source / "lab_trackers").mkdir()
    (source / "lab_trackers/__init__.py").write_text("raise RuntimeError('imported as installed')")
    module.rename(source / "lab_trackers/lab_file.py")
    head = '[project]\nname = "lab-trackers"\nversion = "1.0"\n'
    packages = '[tool.setuptools]\npackages = ["lab_trackers"]\n'
    points = documented("[project.entry-points.forge]")
    (source / "pyproject.toml").write_text(f"{head}\n{points}\n{packages}")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    project.one_rank()
    configure(project, plugins=["lab_file"], tracking={"lab_file": {}})
    trained(project)
    assert sent(project) == [*range(13)]
    assert used(project) == [{"lab_file": digest(source / "lab_trackers/lab_file.py")}]


# --- code that may change -------------------------------------------------------------------------

TWIN = {"plugins": ["plugins/twin"], "model": {"architecture": "twin"}}
MAY_CHANGE = {**TWIN, "plugins_may_change": True}


def edited(project: Project, remark: str) -> str:
    """Edit the layers of the plugin, which compute the same; its digest."""
    folder = write_plugin(project.root / "plugins/twin", layers=f"{LAYERS}# {remark}\n")
    return project_plugins.digest_of({path.name: path.read_bytes() for path in folder.iterdir()})


def ids(project: Project) -> tuple[str, list[str]]:
    """The digest of the plugin in the newest checkpoint and those of before, as in config.json."""
    manifest = read_json(project.path("checkpoints/latest") / "checkpoint.json")
    found = manifest["lineage"]["config"]["ids"]
    of_run = read_json(project.path("config.json"))["ids"]
    keys = ("plugins", "plugins_before")
    assert {key: of_run.get(key) for key in keys} == {key: found.get(key) for key in keys}
    return found["plugins"]["twin"], found.get("plugins_before", {}).get("twin", [])


@pytest.mark.weekly
def test_run_goes_on_with_an_edited_plugin_where_the_key_says_so_and_records_both(
    project: Project,
) -> None:
    project.one_rank()
    first = edited(project, "first")
    configure(project, **TWIN)
    trained(project)
    second = edited(project, "second")
    configure(project, 16, **TWIN)
    code, output = project.snakemake("train")
    assert code != 0 and f"the plugin twin has digest {second[:12]}" in output, output
    assert ids(project) == (first, [])
    configure(project, 16, **MAY_CHANGE)
    output = trained(project)
    assert f"its digest is {second[:12]}, and was {first[:12]} (plugins_may_change)" in output
    assert "resume from step-00000012" in output.replace("results/base/checkpoints/", "")
    assert ids(project) == (second, [first])
    assert [one["twin"] for one in used(project)] == [first, second]
    # Nothing is due without an edit, with the key and without; and the run trains on.
    for sections in (MAY_CHANGE, TWIN):
        configure(project, 16, **sections)
        code, output = project.snakemake("train")
        assert code == 0 and started_rules(output) == [], output
    configure(project, 20, **TWIN)
    assert "plugins_may_change" not in trained(project)
    third = edited(project, "third")
    configure(project, 24, **MAY_CHANGE)
    trained(project)
    assert ids(project) == (third, [first, second])
    # A checkpoint is checked by the code that made it.
    done = project.forge("validate", "results/base/checkpoints/step-00000012")
    assert done.returncode == 0, done.stderr
    # Results of somebody else are read with the plugin that they name, or not at all.
    gift = project.root / "gift/base"
    shutil.copytree(project.path(""), gift, symlinks=True)
    for digest in (first, second):
        shutil.rmtree(project.root / project_plugins.COPIES / digest)
    done = project.forge("validate", "gift/base/checkpoints/step-00000012")
    assert done.returncode == 78 and "plugin twin" in done.stderr, done.stderr
