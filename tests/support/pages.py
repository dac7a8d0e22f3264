"""The code blocks and commands of the project's pages, for the tests that run and check them.

A block indented by four spaces holds shell commands; a fenced one names its kind. A comment before it,
`<!-- not run: REASON -->`, says why no test runs its commands; `<!-- not run (make gpu): REASON -->`
is about those that begin so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from markdown_it import MarkdownIt
from support.repository import REPOSITORY as ROOT

PAGES = tuple(
    str(path.relative_to(ROOT))
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/measured/*.md",
        "docs/plugins/*.md",
        "profiles/*.md",
        "config/*.md",
        "config/labs/*/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"  # names commands of earlier versions
)
SHELL = "shell"
MARKER = re.compile(r"<!-- not run(?: \(([^)]+)\))?: (.+?) -->", re.DOTALL)

BERT = "config/labs/bert-cpu/README.md"
RUNNER = "tests/workflow/test_documented_commands.py"
OWN_PLUGINS = "docs/plugins/own.md"  # whose Python tests/workflow/test_own_plugins.py runs
PYTHON_THAT_RUNS = ("docs/huggingface.md",)  # whose Python RUNNER runs, too
# What others run: page, section ("" for all), beginning of the command.
ELSEWHERE = {
    ("README.md", "Your cluster, in four commands", ""): "tests/slurm/test_readme.py",
    ("docs/new-cluster.md", "Try it before the queue", ""): "tests/slurm/test_twin.py",
    ("docs/new-cluster.md", "", ""): "tests/slurm/test_readme.py",
    ("docs/plugins/controller.md", "", ""): "tests/slurm/test_readme.py",
    (BERT, "", "snakemake --profile profiles/local"): "tests/workflow/test_lab_bert.py",
    (BERT, "", ".venv/bin/python"): "tests/workflow/test_lab_bert.py",
    ("docs/data.md", "A directory for a group", ""): "tests/workflow/test_shared_data.py",
    ("docs/gpu.md", "", "python3 -m bench.gpu --quick"): "tests/distributed/test_gpu_bench.py",
}


@dataclass(frozen=True)
class Command:
    """One command of a block. reason: why no test runs it, "" if one does."""

    page: str
    section: str
    line: int
    text: str
    reason: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def bare(self) -> str:
        """Without the comment behind it."""
        return re.sub(r" +#.*", "", self.text)

    @property
    def runner(self) -> str:
        """The test module that runs it."""
        for (page, section, beginning), module in ELSEWHERE.items():
            if (
                self.page == page
                and section in ("", self.section)
                and self.text.startswith(beginning)
            ):
                return module
        return RUNNER

    @property
    def is_planned(self) -> bool:
        """Whether it is Snakemake's for a cluster, of which RUNNER can try a dry run."""
        of_cluster = "--profile profiles/" in self.text and "profiles/local" not in self.text
        return of_cluster and self.runner == RUNNER


@dataclass(frozen=True)
class Block:
    page: str
    section: str
    line: int  # of its first line, from 1
    kind: str  # SHELL, or what the fence says
    text: str
    markers: tuple[tuple[str, str], ...] = field(default=())  # (beginning of commands, reason)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """Of a shell block. Lines that begin with a blank continue the command before."""
        assert self.kind == SHELL, self.where
        for found in re.finditer(r"^\S.*(?:\n[ \t].*)*", self.text, re.MULTILINE):
            reasons = [why for what, why in self.markers if found[0].startswith(what)]
            line = self.line + self.text.count("\n", 0, found.start())
            yield Command(self.page, self.section, line, found[0], "; ".join(reasons))


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text()))


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Raises AssertionError for a marker that no block follows."""
    section, title = "", False
    markers: tuple[tuple[str, str], ...] = ()
    for token in MarkdownIt().parse(text):
        if token.type == "inline" and title:
            section = token.content
        title = token.type == "heading_open"
        if token.type in ("code_block", "fence"):
            assert token.map
            fenced = token.type == "fence"
            kind = token.info.strip() if fenced else SHELL
            yield Block(page, section, token.map[0] + 1 + fenced, kind, token.content, markers)
            markers = ()
        elif token.type == "html_block" and "<!-- not run" in token.content:
            found = MARKER.findall(token.content)
            assert found, f"{page}: not `<!-- not run: REASON -->`: {token.content}"
            markers += tuple(found)
        else:
            assert not markers, f"{page}: no block follows the marker {markers}"
    assert not markers, f"{page}: no block follows the marker {markers}"


def commands() -> list[Command]:
    """Those of all shell blocks."""
    return [command for block in blocks() if block.kind == SHELL for command in block.commands()]


def commands_of(module: str) -> list[Command]:
    """The commands that a test module runs, in the order of the pages; one with .venv/bin/ is
    the same as without."""
    found: dict[str, Command] = {}
    for command in commands():
        if command.runner == module and not command.reason:
            found.setdefault(command.bare.replace(".venv/bin/", ""), command)
    return list(found.values())


def spans() -> Iterator[tuple[str, str]]:
    """(page, text) of each piece of code inside a sentence or a table."""
    for page in PAGES:
        for token in MarkdownIt().enable("table").parse((ROOT / page).read_text()):
            for child in token.children or ():
                if child.type == "code_inline":
                    yield page, child.content
