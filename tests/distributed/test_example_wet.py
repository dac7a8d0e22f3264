"""The text format of examples/plugins/wet in a project, by the commands that users type. Threats: a
killed run that resumes to other bits, an edited format that goes on with the tokens of the old one, a
file that was cut, and an export of somebody else whose statement names a plugin."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clone import STDLIB, TEXTS, Project, killed_and_resumed, make_project
from support.live_run import forge
from support.project_plugin import fresh_process
from support.repository import REPOSITORY
from support.wet import wet_gz

import forge as package
from forge.core import project_plugins
from forge.core.files import read_json

EXAMPLE = REPOSITORY / "examples/plugins/wet"
TRAIN = {"lr": 0.003, "max_steps": 80, "checkpoint_every": 10, "keep_every": 10, "eval_every": 80}


def write_config(project: Project, **train: int) -> None:
    tokenize = {"inputs": ["crawl"], "format": "wet", "document_separator": None}
    model = {"dropout": 0.1}
    project.write_config(
        plugins=["plugins/wet"], tokenize=tokenize, model=model, train={**TRAIN, **train}
    )


def with_plugin(folder: Path) -> Project:
    """A project with texts as Common Crawl has them, and the plugin."""
    folder.mkdir()
    project = make_project(folder)
    shutil.copytree(EXAMPLE, folder / "plugins/wet")
    (folder / "crawl").mkdir()
    for name in TEXTS:
        pages = (STDLIB / f"{name}.py").read_text().split("\n\n\n")
        (folder / f"crawl/{name}.warc.wet.gz").write_bytes(wet_gz(pages))
    write_config(project)
    return project


@pytest.fixture(scope="module")
def digest() -> str:
    files = {file.name: file.read_bytes() for file in EXAMPLE.glob("*.py")}
    return project_plugins.digest_of(files)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose run was killed and resumed, with an export."""
    project = with_plugin(tmp_path_factory.mktemp("killed") / "project")
    with killed_and_resumed(project):
        yield project


def test_run_that_was_killed_ends_as_one_that_nobody_disturbed(
    killed: Project, tmp_path: Path, digest: str
) -> None:
    other = with_plugin(tmp_path / "other")
    code, output = other.snakemake("train")
    assert code == 0, output
    runs = (killed, other)
    assert [project.steps() for project in runs] == [80, 80]
    first, second = (project.read("trained.json")["weights_digest"] for project in runs)
    assert first == second
    assert killed.read("validation.json")["status"] == "valid"
    recorded = read_json(killed.path("checkpoints/latest") / "checkpoint.json")
    assert recorded["world_size"] == 2
    config = recorded["lineage"]["config"]
    assert config["tokenize"]["format"] == f"wet@wet:{digest}"
    assert "plugins" not in config["ids"]
    tokens = read_json(killed.root / f"data/tokens/{config['ids']['tokens']}/manifest.json")
    assert tokens["settings"]["format"] == f"wet@wet:{digest}"


def test_edited_format_makes_other_tokens_with_which_the_run_does_not_go_on(
    killed: Project, tmp_path: Path, digest: str
) -> None:
    project = Project(tmp_path / "edited")
    shutil.copytree(killed.root, project.root, symlinks=True)
    reader = project.root / "plugins/wet/reader.py"
    reader.write_text(reader.read_text() + "# edited\n")
    write_config(project, max_steps=90)
    code, output = project.snakemake("train")
    assert code == 1, output
    assert f"the checkpoint has 'wet@wet:{digest}'" in output
    assert len([*(project.root / "data/tokens").iterdir()]) == 1
    assert project.steps() == 80


def test_cut_file_is_refused_by_its_name(killed: Project, tmp_path: Path) -> None:
    project = Project(tmp_path / "cut")
    shutil.copytree(killed.root, project.root, symlinks=True)
    file = project.root / "crawl/ast.warc.wet.gz"
    file.write_bytes(file.read_bytes()[:-20])
    [made] = project.root.glob("data/tokenizers/*/tokenizer.json")
    other = ("--tokenizer.source=path", f"--tokenizer.path={made}")
    assert project.forge("tokenizer", "config/config.yaml", *other).returncode == 0
    for command in (("tokenizer",), ("tokenize", "--workers=2", *other)):
        done = project.forge(*command, "config/config.yaml")
        assert done.returncode == 65, done.stderr
        assert "crawl/ast.warc.wet.gz is corrupt: Compressed file ended before" in done.stderr
        assert "Traceback" not in done.stderr


# --- of somebody else -----------------------------------------------------------------------------


@pytest.fixture
def stranger(killed: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory: a project without the plugin, with somebody's results, tokens and texts,
    beside which lies the plugin that they name, where it could be found. It would leave a file."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("{}\n")
    gift = tmp_path / "gift"
    shutil.copytree(killed.path(""), gift / "base", symlinks=True)
    shutil.copytree(killed.root / "build/base", gift / "export")
    shutil.copytree(killed.root / "crawl", gift / "crawl")
    shutil.copytree(killed.root / "data", tmp_path / "data")
    [name] = (killed.root / project_plugins.COPIES).iterdir()
    for place in ("plugins/wet", "wet", "forge_plugin_wet", project_plugins.COPIES / name.name):
        for folder in (gift, gift / "base", tmp_path / "data"):
            shutil.copytree(EXAMPLE, folder / place)
    for file in tmp_path.rglob("*.py"):
        file.write_text(f"open({str(tmp_path / 'RAN')!r}, 'a').close()\n" + file.read_text())
    monkeypatch.chdir(tmp_path)
    with fresh_process():
        yield tmp_path
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("validate", "gift/base"), "valid"),
        (("export", "gift/base", "--to=out"), "out"),
        (("show", "gift/base"), "weights digest"),
        (("report", "gift/base"), "report.html"),
        (("verify", "gift/export"), "chain: texts > tokenizer"),
    ],
)
def test_command_that_reads_no_text_works_without_the_plugin(
    stranger: Path, arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = forge(*arguments)
    assert done.code == 0, done.text
    assert text in capsys.readouterr().out + done.text
    assert "Traceback" not in done.text and project_plugins.used() == {}


def test_run_of_somebody_else_loads_without_the_plugin(stranger: Path) -> None:
    package.load("gift/base")
    assert project_plugins.used() == {}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("verify", "gift/export", "--data=gift/crawl"), 65),
        (("reproduce", "gift/export", "--checkpoints=gift/base", "--data=gift/crawl"), 65),
        (("tokenize", "gift/base/config.json"), 78),
        (("tokenizer", "gift/base/config.json"), 78),
    ],
)
def test_command_that_reads_its_text_names_the_plugin_and_its_digest(
    stranger: Path, arguments: tuple[str, ...], code: int, digest: str
) -> None:
    shutil.rmtree("data/tokenizers" if "tokenizer" in arguments else "data/tokens")
    Path("crawl").symlink_to("gift/crawl")
    done = forge(*arguments)
    assert done.code == code, done.text
    assert f"format wet was made with the plugin wet (digest {digest[:12]})" in done.text
    assert "Traceback" not in done.text and project_plugins.used() == {}


def test_texts_give_the_tokens_again_once_the_project_names_the_same_plugin(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE, stranger / "plugins/wet")
    (stranger / "config/config.yaml").write_text("plugins: [plugins/wet]\n")
    done = forge("verify", "gift/export", "--data=gift/crawl")
    assert done.code == 0, done.text
    assert project_plugins.used().keys() == {"wet"}
    options = ("--checkpoints=gift/base", "--data=gift/crawl", "--intervals=1", "--seed=1")
    done = forge("reproduce", "gift/export", *options)
    assert done.code == 0, done.text
    assert "bitwise equal" in capsys.readouterr().out
