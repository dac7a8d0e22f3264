"""The plugins of examples/ in a project, by the commands that users type. Threats: a killed run that
resumes to other bits, an export that transformers reads as another model, a certificate that a run with
a plugin cannot have; and results of somebody else, which import the plugin that they name."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.clone import Project, killed_and_resumed, make_project
from support.forked import DEADLINE_SEC, LEFT_OVER
from support.live_run import forge
from support.processes import Outcome
from support.project_plugin import fresh_process
from support.repository import REPOSITORY
from test_sharded_updates import MODEL, VOCAB, sharded, stepped
from transformers import AutoModelForCausalLM

import forge as package
from forge.core import project_plugins
from forge.core.config import load_config
from forge.core.errors import ConfigError
from forge.core.files import read_json, write_json
from forge.trainer.initialize import initialized

EXAMPLES = REPOSITORY / "examples/plugins"
LOGITS = 1e-5  # equal formulas in another order of sums, fp32
# Enough steps that some are left when the command is killed.
SECTIONS: dict[str, Any] = {
    "plugins": ["plugins/pythia", "plugins/lion"],
    "model": {"architecture": "pythia", "dropout": 0.1, "parallel_residual": False},
    "train": {"optimizer": "lion", "lr": 0.003, "max_steps": 80, "checkpoint_every": 10},
}
SECTIONS["train"] |= {"keep_every": 10, "eval_every": 80}


def with_plugins(folder: Path) -> Project:
    """A project whose config names both plugins, and has them."""
    folder.mkdir()
    project = make_project(folder)
    shutil.copytree(EXAMPLES, folder / "plugins")
    project.write_config(**SECTIONS)
    return project


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose run was killed and resumed, with an export."""
    project = with_plugins(tmp_path_factory.mktemp("killed") / "project")
    with killed_and_resumed(project):
        yield project


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """Digest of each plugin, as a user's project has it."""
    return {
        name: project_plugins.digest_of(
            {file.name: file.read_bytes() for file in (EXAMPLES / name).glob("*.py")}
        )
        for name in ("lion", "pythia")
    }


# --- in the project -------------------------------------------------------------------------------


def test_run_that_was_killed_ends_as_one_that_nobody_disturbed(
    killed: Project, tmp_path: Path, digests: dict[str, str]
) -> None:
    other = with_plugins(tmp_path / "other")
    (other.root / "data").symlink_to(killed.root / "data")
    by_hand = ("--run=base", "--machine=profiles/local/machine.yaml", "--ranks-per-node=2")
    done = other.forge("train", "config/config.yaml", *by_hand)
    assert done.returncode == 0, done.stderr
    runs = (killed, other)
    assert [project.steps() for project in runs] == [80, 80]
    first, second = (project.read("trained.json")["weights_digest"] for project in runs)
    assert first == second
    assert killed.read("validation.json")["status"] == "valid"
    recorded = read_json(killed.path("checkpoints/latest") / "checkpoint.json")
    assert recorded["world_size"] == 2
    assert recorded["lineage"]["config"]["ids"]["plugins"] == digests


@torch.no_grad()
def test_export_has_in_transformers_the_logits_of_forge(
    killed: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(killed.root)
    theirs = AutoModelForCausalLM.from_pretrained("build/base", dtype=torch.float32).eval()
    assert type(theirs).__name__ == "GPTNeoXForCausalLM"
    assert not theirs.config.use_parallel_residual
    for place in ("base", "build/base"):  # of the checkpoint, and of the export itself
        with fresh_process():
            ours, tokenizer = package.load(place)
            ids = torch.tensor([tokenizer.encode("def main(self): return")])
            assert 4 < ids.shape[1] <= 32
            found = ours(ids)
        assert found.std() > 0.1
        assert float((found - theirs(ids).logits).abs().max()) <= LOGITS


def test_reproduction_is_bitwise_where_the_copies_of_the_plugins_are_gone(killed: Project) -> None:
    """As in a new clone: the config names the plugins."""
    shutil.rmtree(killed.root / project_plugins.COPIES)
    options = ("--checkpoints=results/base", "--intervals=1", "--seed=1")
    done = killed.forge("reproduce", "build/base", *options)
    assert done.returncode == 0, done.stderr
    assert "bitwise equal" in done.stdout
    assert "export: its files are those of step 80" in done.stdout


# --- of somebody else -----------------------------------------------------------------------------


@pytest.fixture
def stranger(killed: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory: a project without a plugin, with somebody's results, beside which lie the
    plugins that they name, under every name by which one could be found. Each would leave a file."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("{}\n")
    (tmp_path / "data").symlink_to(killed.root / "data")
    gift = tmp_path / "gift"
    shutil.copytree(killed.path(""), gift / "base", symlinks=True)
    shutil.copytree(killed.root / "build/base", gift / "export")
    leaves = f"open({str(tmp_path / 'RAN')!r}, 'a').close()\n"
    for folder in (gift, gift / "base"):
        shutil.copytree(killed.root / "plugins", folder / "plugins")
        for name in ("lion", "pythia"):
            for copy in (name, f"forge_plugin_{name}"):
                shutil.copytree(EXAMPLES / name, folder / copy)
        for name, digest in read_json(gift / "base/config.json")["ids"]["plugins"].items():
            shutil.copytree(EXAMPLES / name, folder / project_plugins.COPIES / digest)
        for file in folder.rglob("*.py"):
            file.write_text(leaves + file.read_text())
    monkeypatch.chdir(tmp_path)
    with fresh_process():
        yield tmp_path
    assert not (tmp_path / "RAN").exists()
    assert not (tmp_path / project_plugins.COPIES).exists()


def said_by(*arguments: str) -> Outcome:
    """A command in this process: exit code, and both streams."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        done = forge(*arguments)
    return Outcome(done.code, shown.getvalue() + done.text)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("validate", "gift/base"), 78),
        (("validate", "gift/base/config.json"), 78),
        (("validate", "gift/base/checkpoints/step-00000080"), 78),
        (("export", "gift/base", "--to=out"), 78),
        (("evaluate", "gift/base"), 78),
        (("prompt", "gift/base", "def "), 78),
        (("train", "gift/base/config.json"), 78),
        (("plan", "gift/base/config.json"), 78),
        (("reproduce", "gift/export", "--checkpoints=gift/base"), 65),
    ],
)
def test_command_that_needs_the_layers_names_the_plugin_and_its_digest(
    stranger: Path, arguments: tuple[str, ...], code: int, digests: dict[str, str]
) -> None:
    done = said_by(*arguments)
    assert done.code == code, done.text
    wanted = (
        f"was made with the plugin lion (digest {digests['lion'][:12]}), which this project does"
    )
    assert wanted in done.text
    assert "Traceback" not in done.text and not (stranger / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("verify", "gift/export"), "chain: texts > tokenizer"),
        (("show", "gift/base"), "weights digest"),
        (("status", "gift/base"), "validated"),
        (("compare", "gift/base", "gift/base"), "weights digest"),
        (("logs", "gift/base"), "step 80"),
        (("report", "gift/base"), "report.html"),
    ],
)
def test_command_that_reads_records_alone_does_its_work(
    stranger: Path, arguments: tuple[str, ...], text: str
) -> None:
    done = said_by(*arguments)
    assert done.code == 0, done.text
    assert text in done.text and "Traceback" not in done.text
    assert project_plugins.used() == {}


def test_load_of_the_run_and_of_the_export_is_refused(
    stranger: Path, digests: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=rf"plugin lion \(digest {digests['lion'][:12]}\)"):
        package.load("gift/base")
    with pytest.raises(
        ConfigError, match=rf"forge.json .*pythia \(digest {digests['pythia'][:12]}\)"
    ):
        package.load("gift/export")
    assert project_plugins.used() == {}


def test_sync_needs_no_plugin_of_the_run(stranger: Path) -> None:
    """Trackers are of the config that is named, and no number needs the layers."""
    (stranger / "mine.yaml").write_text("tracking: {tensorboard: true}\n")
    done = said_by("sync", "gift/base", "--config=mine.yaml")
    assert done.code == 0 and "sent to tensorboard up to step 80" in done.text, done.text
    assert project_plugins.used() == {}


def test_plugin_that_does_not_work_refuses_no_export_that_needs_none(stranger: Path) -> None:
    facts = read_json(stranger / "gift/export/forge.json")
    write_json(
        stranger / "gift/export/forge.json", {k: v for k, v in facts.items() if k != "plugins"}
    )
    (stranger / "plugins").mkdir()
    (stranger / "plugins/broken.py").write_text("raise RuntimeError('broken')")
    (stranger / "config/config.yaml").write_text("plugins: [plugins/broken.py]\n")
    with pytest.raises(ConfigError, match=r"architectures is \['GPTNeoXForCausalLM'\]"):
        package.load("gift/export")
    assert project_plugins.used() == {}


def test_results_are_taken_once_the_project_names_the_same_plugins(stranger: Path) -> None:
    """What the refusal asks for; the planted files have other bytes, and are none of them."""
    shutil.copytree(EXAMPLES, stranger / "plugins")
    (stranger / "config/config.yaml").write_text(yaml.safe_dump({"plugins": SECTIONS["plugins"]}))
    done = said_by("export", "gift/base", "--to=out")
    assert done.code == 0, done.text
    assert (stranger / "out/model.safetensors").read_bytes() == (
        stranger / "gift/export/model.safetensors"
    ).read_bytes()
    shutil.rmtree(stranger / project_plugins.COPIES)


# --- Lion on ranks --------------------------------------------------------------------------------


def lion_on_a_rank(project: Path, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What `sharded` of test_sharded_updates.py returns, in a process that has read the config."""
    os.chdir(project)
    load_config("config.yaml")
    return sharded(folder, "lion", rank, copies=1, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_that_ranks_share_move_by_lion_as_whole_ones(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LEFT_OVER:
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(EXAMPLES / "lion", tmp_path / "lion")
    (tmp_path / "config.yaml").write_text("plugins: [lion]\n")
    monkeypatch.chdir(tmp_path)
    with fresh_process():
        load_config("config.yaml")
        model = initialized(MODEL, VOCAB)
        first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        stepped(model, "lion")
    starts = [(tmp_path, tmp_path, rank, ranks) for rank in range(ranks)]
    with multiprocessing.get_context("forkserver").Pool(ranks, maxtasksperchild=1) as pool:
        of_ranks = pool.starmap_async(lion_on_a_rank, starts, chunksize=1).get(DEADLINE_SEC)
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, first[name]), name
        for found in of_ranks:
            torch.testing.assert_close(
                torch.from_numpy(found[name]), weight.detach(), rtol=1e-5, atol=1e-6, msg=name
            )
