"""Threat: commands of the pages that do not work as they are written.

Each one is read from its page and run in a copy of the project, in the order of the pages. One for a
cluster is tried as a dry run, in a project without results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
import yaml
from support import pages
from support.clone import REPOSITORY, Project, kill_tree, make_project

pytestmark = pytest.mark.tools

# What stands for the reader's own, or is too large for a tiny run.
PLACEHOLDERS = {
    "RUN": "base",
    "/shared/their-run": "their-run",
    "base@5000": "base@4",
    "max_steps=1000": "max_steps=16",
    "--data python:stdlib": "--data corpus",
    "--steps 3000,4000,5000": "--steps 4,8,12",
    "step-00005000": "step-00000012",
    "step-00001000.contamination": "step-*.contamination",
    "--texts texts": "--texts corpus",
    "max_steps=6000": "max_steps=20",
    "--step 75": "--step 6",
    "data/notes.txt": "corpus/csv.txt",
}
TASKS = REPOSITORY / "tests/plugins/evaluation/distributed/tasks"


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Project]]:
    """By what is done there: most commands share one run."""
    made = {}
    for name in ("shared", "by hand", "planned", "workflow"):
        made[name] = make_project(tmp_path_factory.mktemp("clone"))
        made[name].with_make()
        if name in ("shared", "workflow"):  # the others name two ranks themselves, or plan
            made[name].one_rank()
    lab = made["shared"].root / "config/labs/six-nodes/config.yaml"
    lab.write_text(lab.read_text().replace("goal: 500", "goal: 60"))
    yield made
    for process in [process for project in made.values() for process in project.processes()]:
        kill_tree(process.pid)


def their_run(project: Project) -> None:
    shutil.copytree(project.root / "results/six-nodes", project.root / "their-run", symlinks=True)
    shutil.copy(
        project.root / "config/labs/six-nodes/config.yaml", project.root / "config/theirs.yaml"
    )


def own_tasks(project: Project) -> None:
    shutil.copytree(TASKS, project.root / "tasks")
    task = project.root / "tasks/words.yaml"
    task.write_text(task.read_text().replace("DATA", "tasks/words.jsonl"))
    project.write_config(evaluate={"tasks": ["words"], "include_path": "tasks"})


def a_trained_run(project: Project) -> None:
    code, output = project.snakemake("train")
    assert code == 0, output


def a_tracker(project: Project) -> None:
    project.write_config(tracking={"tensorboard": True})


def families(project: Project) -> None:
    project.write_runs(sheet_of("docs/families.md"))
    project.write_config(train={"schedule": "wsd", "keep_every": 10000})


def sheet_of(page: str) -> str:
    """The only sample sheet on a page."""
    [sheet] = [block for block in pages.blocks() if (block.page, block.kind) == (page, "tsv")]
    return sheet.text


def conversations(project: Project) -> None:
    """The sources and the sheet of the page, for fewer steps."""
    lines = [
        {"messages": [{"role": "user", "content": f"Add one to {n}"}, answer]}
        for n in range(300)
        for answer in [{"role": "assistant", "content": f"It is {n + 1}."}]
    ]
    (project.root / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    chats = {"inputs": ["chats.jsonl"], "format": "chat", "seq_len": 64}
    train = {"seq_len": 64, "schedule": "wsd", "decay_steps": None, "document_mask": True}
    project.write_config(train=train)
    path = project.root / "config/config.yaml"
    values = yaml.safe_load(path.read_text())
    text = {key: values["tokenize"].pop(key) for key in ("inputs", "document_separator")}
    values["tokenize"]["sources"] = {"text": text, "chats": chats}
    path.write_text(yaml.safe_dump(values))
    sheet = sheet_of("docs/plugins/chat.md")
    project.write_runs(sheet.replace("1000", "12").replace("1200", "16"))


def own_tokenizer(project: Project) -> None:
    ids = json.loads(project.path("config.json").read_text())["ids"]  # of `base`
    made = project.root / "data/tokenizers" / ids["tokenizer"] / "tokenizer.json"
    (project.root / "my").mkdir()
    shutil.copy(made, project.root / "my")


# What a reader of a page has before its first command.
PREPARE = {
    "SECURITY.md": their_run,
    "docs/plugins/attestation.md": a_trained_run,
    "docs/plugins/chat.md": conversations,
    "docs/plugins/evaluation.md": own_tasks,
    "docs/plugins/tracking.md": a_tracker,
    "docs/families.md": families,
    "config/README.md": own_tokenizer,
}

# Pages whose commands train for minutes.
LONG_PAGES = ("docs/plugins/attestation.md", "docs/plugins/chat.md")

# Pages whose commands start from nothing.
OWN_PROJECT = {"docs/commands.md": "by hand", "docs/workflow.md": "workflow"}


@pytest.fixture(scope="module")
def prepared(clones: dict[str, Project]) -> Callable[[pages.Command], Project]:
    """The project for a command, as the reader of its page has it."""
    shutil.copytree(
        clones["planned"].root / "profiles/slurm-cpu", clones["planned"].root / "profiles/mine"
    )
    last: dict[str, str] = {}

    def prepare(command: pages.Command) -> Project:
        name = OWN_PROJECT.get(command.page, "shared")
        name = "planned" if command.is_planned else name
        project = clones[name]
        if last.get(name) != command.page:
            project.write_config()
            project.write_runs("run\nbase\n")
            PREPARE.get(command.page, lambda _: None)(project)
            last[name] = command.page
        return project

    return prepare


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command, id=command.where, marks=[pytest.mark.weekly] * (command.page in LONG_PAGES)
        )
        for command in pages.commands_of(pages.RUNNER)
    ],
)
def test_command_works_as_it_is_written(
    prepared: Callable[[pages.Command], Project], command: pages.Command
) -> None:
    project = prepared(command)
    text = command.bare + " -n" * command.is_planned
    for written, meant in PLACEHOLDERS.items():
        text = text.replace(written, meant)
    home = project.root / "tmp/home"  # `forge key` writes there
    home.mkdir(parents=True, exist_ok=True)
    code, output = project.shell(
        text,
        HF_HOME=f"{project.root}/tmp/hub",
        HOME=str(home),
        PYTHONPATH=str(REPOSITORY),  # `forge init` copies the config beside the package
    )
    print(f"$ {text}\n{output}")
    assert code == 0, f"{command.where}: {text}\n{output}"


def test_python_of_a_page_runs_behind_its_commands(clones: dict[str, Project]) -> None:
    """Without Forge, and without network, as the page says."""
    project = clones["shared"]
    code = [block for block in pages.blocks() if block.kind == "python"]
    code = [block for block in code if block.page in pages.PYTHON_THAT_RUNS]
    assert len(code) == len(pages.PYTHON_THAT_RUNS)
    for block in code:
        file = project.root / "tmp/page.py"
        file.write_text(block.text)
        status, output = project.shell(f"python {file}", HF_HUB_OFFLINE="1")
        print(f"{block.where}:\n{output}")
        assert status == 0, f"{block.where}\n{output}"
        assert "def main():" in output and "forge" not in block.text


def git(project: Project, *words: str) -> str:
    """The output of git, with an identity."""
    of_test = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", *of_test, *words]
    return subprocess.run(
        command, cwd=project.root, check=True, capture_output=True, text=True
    ).stdout


def test_drawing_changes_no_tracked_file_and_nothing_when_the_run_is_finished(
    clones: dict[str, Project],
) -> None:
    """`make dag`; it rewrote the pictures in docs/, in other colors than those that were committed."""
    pictures = []
    for project in (clones["shared"], clones["planned"]):
        project.write_config(train={"max_steps": 16})  # to which a command above has trained
        project.write_runs("run\nbase\n")
        shutil.copytree(REPOSITORY / "docs", project.root / "docs")
        shutil.copy(REPOSITORY / ".gitignore", project.root)
        git(project, "init", "--quiet")
        git(project, "add", "--all")
        git(project, "commit", "--quiet", "--message", "all")
        code, output = project.shell("make dag")
        assert code == 0, output
        assert git(project, "status", "--porcelain") == ""
        drawn = [
            path for kind in ("dag", "rulegraph") for path in project.root.glob(f"build/{kind}.*")
        ]
        pictures.append({path.name: path.read_text() for path in drawn})
    assert {"dag.dot", "rulegraph.dot", "rulegraph.mmd"} <= pictures[0].keys()
    assert pictures[0] == pictures[1]
