"""Trackers of a project's plugins. Threats: a tracker of a stranger's run that is imported, a key that is
not understood, and one that hides a tracker of Forge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_run import forge
from support.project_plugin import fresh_process, write_documented

from forge.core import project_plugins
from forge.core.config import load_config
from forge.core.errors import ConfigError
from forge.core.records import RunSettings
from forge.plugins.tracking.settings import Tracking

PLUGIN = "plugins/lab_file.py"


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tracker of the page for users, in the project in the current directory."""
    monkeypatch.chdir(tmp_path)
    with fresh_process():
        yield write_documented(tmp_path, PLUGIN)


def config_file(**tracking: object) -> Path:
    path = Path("config.yaml")
    path.write_text(json.dumps({"plugins": [PLUGIN], "tracking": tracking}))
    return path


def test_settings_of_a_run_have_the_tracker_that_the_config_sets():
    config = load_config(config_file(lab_file={"path": "all.jsonl"}))
    RunSettings(**config.of_plugins).write(Path("settings.json"))
    given = project_plugins.hand_on()[project_plugins.GIVEN]
    with fresh_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(project_plugins.GIVEN, given)
        project_plugins.use_given()
        read = RunSettings.read(Path("settings.json")).of(Tracking)
    assert read.trackers == ("lab_file",)
    assert read.of_plugins["lab_file"].tracker().path == "all.jsonl"


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        (
            {"lab_fil": {}},
            "unknown key tracking.lab_fil .*valid keys of tracking: lab_file, mlflow,",
        ),
        ({"lab_file": {"paht": "x"}}, r"unknown key tracking.lab_file.paht \(did you mean path"),
        ({"lab_file": {"path": 3}}, "tracking.lab_file.path is 3"),
        ({"lab_file": True}, "tracking.lab_file is True"),
    ],
)
def test_key_that_is_none_is_named_with_those_of_the_plugin(tracking, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file(**tracking))


def test_key_of_a_tracker_that_no_plugin_has_is_unknown():
    Path("config.yaml").write_text(json.dumps({"tracking": {"lab_file": {}}}))
    with pytest.raises(ConfigError, match=r"unknown key tracking\.lab_file"):
        load_config("config.yaml")


def test_name_of_a_tracker_of_forge_is_refused(plugin: Path):
    also = '{"lab_file": LabFile, "wandb": LabFile}'
    plugin.write_text(plugin.read_text().replace('{"lab_file": LabFile}', also))
    with pytest.raises(ConfigError, match="tracker wandb has the name of one of Forge"):
        load_config(config_file(lab_file={}))


def test_run_of_somebody_else_brings_no_tracker(plugin: Path):
    marker = Path("RAN").absolute()
    gift = Path("gift/base")
    plugin.write_text(f"open({str(marker)!r}, 'a').close()\n{plugin.read_text()}")
    digest = project_plugins.digest_of({"hooks.py": plugin.read_bytes()})
    for place in (
        gift / PLUGIN,
        gift / project_plugins.COPIES / digest / "hooks.py",
        gift / "lab_file.py",
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(plugin, place)
    ids = {"tokenizer": "a" * 12, "tokens": "b" * 12}
    tracking = {"lab_file": {"path": str(marker)}}
    values = {"run": "base", "ids": ids, "tracking": tracking, "plugins": [str(gift / PLUGIN)]}
    (gift / "config.json").write_text(json.dumps(values))
    done = forge("sync", str(gift))
    assert done.code == 78 and "Traceback" not in done.text, done.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(project_plugins.GIVEN, f"lab_file={digest}")
        with pytest.raises(ConfigError, match="FORGE_PLUGINS was made with the plugin lab_file"):
            project_plugins.use_given()
    assert not marker.exists() and project_plugins.used() == {}
