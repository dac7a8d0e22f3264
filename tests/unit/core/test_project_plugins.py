"""Plugins of a project. Threats: code of a stranger's directory that is imported, other bytes than those
that were digested, an edit that changes a job in the queue, and a command that ends in a traceback."""

from __future__ import annotations

import json
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.project_plugin import HOOKS, LAYERS, fresh_process, write_plugin
from support.repository import REPOSITORY

from forge.core import hooks, project_plugins
from forge.core.config import Config, ResolvedConfig, checked, load_config
from forge.core.errors import ConfigError
from forge.data.content_ids import used_plugins
from forge.trainer.models.decoder import make_decoder

IDS = {"tokenizer": "a" * 12, "tokens": "b" * 12}
MODEL = {"architecture": "twin", "dim": 16, "heads": 2, "layers": 1}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the plugin `twin`, in which no plugin was used yet."""
    monkeypatch.chdir(tmp_path)
    write_plugin(tmp_path / "plugins/twin")
    with fresh_process():
        yield tmp_path


def config_file(project: Path, **values: Any) -> Path:
    path = project / "config.yaml"
    path.write_text(json.dumps({"plugins": ["plugins/twin"], "model": MODEL, **values}))
    return path


def recorded(digest: str, **values: Any) -> dict[str, Any]:
    """A config.json that names the plugin."""
    return {"model": MODEL, "ids": {**IDS, "plugins": {"twin": digest}}, **values}


def test_project_brings_an_architecture_and_an_optimizer(project):
    config = load_config(config_file(project, train={"optimizer": "adam2"}))
    assert (config.model.dim, config.train.optimizer) == (16, "adam2")
    assert config.to_json()["model"]["architecture"] == "twin"
    assert used_plugins(config) == project_plugins.used()
    assert type(make_decoder(config.model, 32)).__name__ == "TwinDecoder"


def test_plugin_of_one_file_is_its_hooks(project):
    text = HOOKS.replace('f"{__package__}.layers"', '"forge.trainer.models.llama_decoder"')
    (project / "plugins/small.py").write_text(text)
    config = load_config(config_file(project, plugins=["plugins/small.py"]))
    assert list(used_plugins(config)) == ["small"]


def test_config_that_does_not_need_a_plugin_is_not_bound_to_it(project):
    config = load_config(config_file(project, model={}))
    assert used_plugins(config) == {}
    assert "plugins" not in ResolvedConfig(**{**config.to_json(), "ids": IDS}).to_json()["ids"]


def test_recorded_config_imports_the_copy_of_its_digest(project):
    """As a job that waited in the queue while the plugin was edited."""
    digest = project_plugins.read(["plugins/twin"])["twin"]
    write_plugin(project / "plugins/twin", HOOKS.replace("class Twin", "BROKEN\nclass Twin"))
    with fresh_process():
        config = checked(ResolvedConfig, recorded(digest), "config.json")
        assert make_decoder(config.model, 32).settings.dim == 16


def test_directory_of_somebody_else_imports_nothing(project):
    marker = project / "executed"
    stranger = write_plugin(
        project / "their-run/plugins/twin", f"open({str(marker)!r}, 'w')\n{HOOKS}"
    )
    files = {path.name: path.read_bytes() for path in stranger.iterdir()}
    digest = project_plugins.digest_of(files)
    with pytest.raises(ConfigError, match=r"plugin twin \(digest .*this project does not have"):
        checked(ResolvedConfig, recorded(digest), "their-run/config.json")
    with pytest.raises(ConfigError, match="unknown key plugins"):
        values = {**recorded(digest), "plugins": [str(stranger)], "ids": IDS, "model": {}}
        checked(ResolvedConfig, values, "their-run/config.json")
    assert not marker.exists() and project_plugins.used() == {}


@pytest.mark.parametrize("digest", ["../../their-run", "e" * 63, "E" * 64, ""])
def test_digest_that_is_a_path_is_refused(digest):
    with pytest.raises(ConfigError, match="is no plugin"):
        checked(ResolvedConfig, recorded(digest), "their-run/config.json")


def test_copy_with_other_bytes_is_refused_before_an_import(project):
    digest = project_plugins.read(["plugins/twin"])["twin"]
    marker = project / "executed"
    copy = project_plugins.folder_of(digest) / "hooks.py"
    copy.write_text(f"open({str(marker)!r}, 'w')\n{HOOKS}")
    with fresh_process(), pytest.raises(ConfigError, match="other bytes than its name says"):
        checked(ResolvedConfig, recorded(digest), "config.json")
    assert not marker.exists()


def test_compiled_file_beside_a_copy_is_not_executed(project):
    """The digest is of the source, so the source is what runs."""
    digest = project_plugins.read(["plugins/twin"])["twin"]
    cache = project_plugins.folder_of(digest) / "__pycache__"
    (project / "evil.py").write_text(f"open({str(project / 'executed')!r}, 'w')")
    py_compile.compile(
        str(project / "evil.py"),
        str(cache / f"layers.{sys.implementation.cache_tag}.pyc"),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    with fresh_process():
        config = checked(ResolvedConfig, recorded(digest), "config.json")
        make_decoder(config.model, 32)
    assert not (project / "executed").exists()
    assert len([*cache.iterdir()]) == 1


def test_another_digest_than_the_one_in_use_is_refused_by_name(project):
    old = project_plugins.read(["plugins/twin"])["twin"]
    with fresh_process():
        write_plugin(project / "plugins/twin", layers=f"{LAYERS}# edited\n")
        new = project_plugins.read(["plugins/twin"])["twin"]
        with pytest.raises(ConfigError, match=f"plugin twin has digest {old[:12]}.*{new[:12]}"):
            checked(ResolvedConfig, recorded(old), "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_this", r"ModuleNotFoundError.*\(hooks.py, line 1\)"),
        ("\n\ndef broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (HOOKS.replace("def architectures():", "def architectures(unknown):"), "unknown"),
        (HOOKS.replace("def optimizers", "def optimiser"), "optimiser"),
        (
            f"{HOOKS}\n\n@hook\ndef run_files():\n    return []\n",
            "run_files: a plugin of a project has",
        ),
        (HOOKS.replace('{"twin": Twin}', '{"llama": Twin}'), "llama"),
        (HOOKS.replace('{"twin": Twin}', "{'twin': 3}"), "twin is 3"),
        (HOOKS.replace('{"twin": Twin}', "7"), "architectures"),
        (
            f"{HOOKS}\n\n@hook\ndef trackers():\n    return {{'mine': Twin}}\n",
            "no method `tracker`",
        ),
        (f"{HOOKS}\n\n@hook\ndef trackers():\n    return {{'../mine': Twin}}\n", "or no name"),
        (f"{HOOKS}\n\n@hook\ndef node_checks():\n    return [3]\n", "3 is no function"),
        (
            f"{HOOKS}\n\n@hook\ndef rule_file():\n    return '/etc/passwd'\n",
            "no file beside its hooks",
        ),
    ],
)
def test_plugin_that_does_not_work_is_told_by_name(project, text, message):
    write_plugin(project / "plugins/twin", text)
    with pytest.raises(ConfigError, match=f"(?s)plugin twin cannot be imported: .*{message}"):
        load_config(config_file(project))
    assert project_plugins.used() == {} and hooks.architectures() == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["plugins/none"], "neither a file nor a directory"),
        (["none.py"], "neither a file nor a directory"),
        (["none"], "no installed package has a plugin of this name, and it is no directory here"),
        (["plugins"], "has no hooks.py"),
        (["plugins/twin", "plugins/twin"], "names twin twice"),
        ("plugins/twin", "must be a list"),
        ([7], "must be a list"),
        (["plugins/Twin-2"], "cannot name a plugin"),
        (["plugins/pages"], "a plugin of Forge itself"),
    ],
)
def test_value_that_names_no_plugin_is_refused(project, value, message):
    write_plugin(project / "plugins/Twin-2")
    write_plugin(project / "plugins/pages")
    with pytest.raises(ConfigError, match=message):
        load_config(config_file(project, plugins=value))


def test_key_that_lets_code_change_is_one_of_the_users_config_alone(project):
    with pytest.raises(ConfigError, match="plugins_may_change is 'yes': must be true or false"):
        load_config(config_file(project, plugins_may_change="yes"))
    digest = project_plugins.read(["plugins/twin"], may_change=True)["twin"]
    with pytest.raises(ConfigError, match="unknown key plugins_may_change"):
        checked(ResolvedConfig, recorded(digest, plugins_may_change=True), "their-run/config.json")
    # With the key set here, other code of somebody else's run is refused all the same.
    with pytest.raises(ConfigError, match="plugin twin has digest eeeeeeeeeeee"):
        checked(ResolvedConfig, recorded("e" * 64), "their-run/config.json")


def test_data_beside_the_code_is_refused(project):
    (project / "plugins/twin/weights.bin").write_bytes(bytes(project_plugins.MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="has data beside the code"):
        load_config(config_file(project))


def test_unknown_architecture_names_those_of_plugins(project):
    with pytest.raises(ConfigError, match="must be one of twin, llama, gpt2"):
        load_config(config_file(project, model={"architecture": "pythia"}))
    with pytest.raises(ConfigError, match="must be one of adam2, adamw, muon"):
        load_config(config_file(project, train={"optimizer": "lion"}))


def test_bad_key_of_a_plugins_architecture_is_named(project):
    with pytest.raises(ConfigError, match="dim is 'wide'"):
        load_config(config_file(project, model={**MODEL, "dim": "wide"}))
    with pytest.raises(ConfigError, match="must be an even integer, got 15 / 2"):
        load_config(config_file(project, model={**MODEL, "dim": 15}))


def test_config_with_a_plugin_imports_no_torch(project):
    path = config_file(project)
    code = (
        "import sys; from forge.core.config import load_config\n"
        f"load_config({str(path)!r}); assert 'torch' not in sys.modules"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project, env=environment)


def test_first_of_two_plugins_with_one_name_is_kept_and_the_second_refused(project):
    write_plugin(project / "plugins/other")
    with pytest.raises(ConfigError, match="name twin is taken"):
        load_config(config_file(project, plugins=["plugins/twin", "plugins/other"]))


def test_default_config_needs_no_plugin_and_writes_nothing(project):
    Config()
    load_config(config_file(project, plugins=[], model={}))
    assert not project_plugins.COPIES.exists()


def test_new_clone_makes_the_copies_that_a_recorded_config_needs(project):
    """`forge validate` of a run may be the first command there."""
    (project / "config").mkdir()
    digest = project_plugins.digest_of(
        {path.name: path.read_bytes() for path in (project / "plugins/twin").iterdir()}
    )
    config_file(project).rename(project / "config/config.yaml")
    assert checked(ResolvedConfig, recorded(digest), "config.json").model.dim == 16


def test_copies_go_along_to_where_commands_run(project):
    digest = project_plugins.read(["plugins/twin"])["twin"]
    project_plugins.bring_along(project / "scratch")
    assert (project / "scratch" / project_plugins.COPIES / digest / "hooks.py").read_text() == HOOKS


# --- an installed package -------------------------------------------------------------------------


def install(site: Path, hooks_text: str = HOOKS, value: str = "lab_models.twin") -> Path:
    """A package with the plugin in a directory of packages, which leaves a file when it is imported
    itself; the directory of the plugin."""
    plugin = write_plugin(site / "lab_models/twin", hooks_text)
    leaves = f"open({str(site / 'IMPORTED')!r}, 'a').close()"
    for folder in (site / "lab_models", plugin):
        (folder / "__init__.py").write_text(f"if 'forge_plugin' not in __name__: {leaves}")
    info = site / "lab_models-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[forge]\ntwin = {value}\n")
    return plugin


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of installed packages, none of which is imported in the end."""
    site = project / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    yield site
    assert not (site / "IMPORTED").exists() and "lab_models" not in sys.modules


@pytest.mark.parametrize("value", ["lab_models.twin", "lab_models.twin.hooks"])
def test_installed_package_is_copied_and_the_copy_imported(project, site, value):
    plugin = install(site, value=value)
    config = load_config(config_file(project, plugins=["twin"]))
    decoder = make_decoder(config.model, 32)
    copy = project / project_plugins.COPIES / used_plugins(config)["twin"]
    assert Path(str(sys.modules[type(decoder).__module__].__file__)) == copy / "layers.py"
    # Upgraded: a recorded config still imports the copy.
    write_plugin(plugin, "BROKEN")
    with fresh_process():
        assert checked(ResolvedConfig, recorded(copy.name), "config.json").model.dim == 16


def test_package_that_is_installed_is_not_used_unless_the_config_names_it(project, site):
    install(site, "raise RuntimeError('imported')")
    load_config(config_file(project, plugins=[], model={}))
    with pytest.raises(ConfigError, match="made with the plugin twin"):
        checked(ResolvedConfig, recorded("e" * 64), "their-run/config.json")
    assert project_plugins.used() == {} and not project_plugins.COPIES.exists()


def test_module_of_one_file_may_be_installed(project, site):
    install(site, value="lab_twin")
    text = HOOKS.replace('f"{__package__}.layers"', '"forge.trainer.models.llama_decoder"')
    (site / "lab_twin.py").write_text(text)
    assert list(used_plugins(load_config(config_file(project, plugins=["twin"])))) == ["twin"]


@pytest.mark.parametrize("line", ["from lab_models.twin import layers", "    import lab_models"])
def test_package_that_imports_itself_as_installed_is_refused(project, site, line):
    install(site, f"def later():\n{line if line[0] == ' ' else '    ' + line}\n{HOOKS}")
    with pytest.raises(ConfigError, match=r"hooks\.py imports lab_models, the package as"):
        load_config(config_file(project, plugins=["twin"]))


def test_directory_here_comes_before_a_package_of_the_same_name(project, site):
    install(site, "raise RuntimeError('imported')")
    write_plugin(project / "twin")
    load_config(config_file(project, plugins=["twin"]))
    assert "twin" in project_plugins.used()


@pytest.mark.parametrize("value", ["no_such_package", "lab_models.none", "..", ""])
def test_entry_point_that_leads_nowhere_is_told(project, site, value):
    install(site, value=value)
    with pytest.raises(ConfigError, match="plugins has "):
        load_config(config_file(project, plugins=["twin"]))


def test_two_packages_with_a_plugin_of_one_name_are_refused(project, site):
    install(site)
    other = site / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[forge]\ntwin = other\n")
    with pytest.raises(ConfigError, match=r"several installed .*: lab_models\.twin, other"):
        load_config(config_file(project, plugins=["twin"]))
