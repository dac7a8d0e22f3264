"""Threat: commands and fragments of the pages that do not work as they are written.

Each command of a block is run by a test, or its page says why not. Each fragment is read by what reads it
in a run. Each command, also one that is not run or stands in a sentence, fits the parser that it names.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake.cli import get_argument_parser
from support import pages
from support.each import failures, hold_for_each
from support.pages import ROOT, SHELL, Block, blocks_of
from support.user_snakefile import WITH_OWN_RULES

from forge import cli
from forge.core.config import load_config
from forge.core.machine import Machine, load_machine
from forge.core.sample_sheet import run_configs
from forge.hosts.allocation import refuse_unknown

pytestmark = pytest.mark.tools

RULES = {
    name
    for path in (
        ROOT / "workflow/Snakefile",
        *ROOT.glob("workflow/rules/*.smk"),
        *ROOT.glob("forge/plugins/*/*.smk"),
    )
    for name in re.findall(r"^rule (\w+):", path.read_text(), re.MULTILINE)
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FRAGMENTS = [block for block in pages.blocks() if block.kind != SHELL]
MINE = "profiles/mine"  # a copy of another profile, which the pages say how to make


def of_kind(kind: str) -> list[tuple[str, Block]]:
    return [(block.where, block) for block in FRAGMENTS if block.kind == kind]


# --- each block in one way ------------------------------------------------------------------------


def way(command: pages.Command) -> str:
    if command.reason:
        return f"not run: {command.reason}"
    return f"{'planned' if command.is_planned else 'run'} by {command.runner}"


def test_each_block_is_run_or_checked_or_says_why_not() -> None:
    """Prints how many are what (`pytest -s`)."""
    # By the tests below; patches by tests/unit/test_upstream.py.
    kinds = {"yaml", "python", "tsv", "mermaid", "text", "diff", "snakemake"}
    assert [block.where for block in FRAGMENTS if block.kind not in kinds] == []
    assert [block.where for block in FRAGMENTS if block.markers] == []
    for block in pages.blocks():
        for beginning, _ in block.markers:
            said = [command for command in block.commands() if command.text.startswith(beginning)]
            assert said, f"{block.where}: no command begins with {beginning!r}"
    ways = Counter(map(way, pages.commands()))
    assert sum(count for name, count in ways.items() if not name.startswith("not run")) > 50
    ways.update(f"checked: {block.kind}" for block in FRAGMENTS)
    ways["parsed: in sentences"] = len(INLINE)
    print("\n" + "\n".join(f"{count:4d} {name}" for name, count in sorted(ways.items())))


def test_command_that_is_run_on_one_page_is_not_called_not_run_on_another() -> None:
    run = {command.bare for command in pages.commands() if not command.reason}
    not_run = [command for command in pages.commands() if command.reason]
    assert [command.where for command in not_run if command.bare in run] == []


def test_modules_that_run_commands_and_tests_that_reasons_name_are_there() -> None:
    named = {path for c in pages.commands() for path in re.findall(r"tests/\S+\.py", c.reason)}
    named |= {command.runner for command in pages.commands()}
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def stray_lines(page: str, text: str) -> list[str]:
    """`page:line` of what looks like a command outside of every block."""
    inside = {
        number
        for block in blocks_of(page, text)
        for number in range(block.line - 1, block.line + block.text.count("\n") + 1)
    }
    return [
        f"{page}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith("    ") and number not in inside
    ]


def test_no_page_has_a_block_that_the_parser_takes_for_a_paragraph() -> None:
    """Four spaces right below a sentence are no code in Markdown."""
    stray = [line for page in pages.PAGES for line in stray_lines(page, (ROOT / page).read_text())]
    assert not stray, "\n".join(["", *stray])


def test_line_that_is_no_block_is_noticed() -> None:
    assert stray_lines("page.md", "Now:\n\n    make a\n\nThen\n    make b\n") == [
        "page.md:6: make b"
    ]


@pytest.mark.parametrize(
    "text",
    ["<!-- not run: x -->\n\nText.\n", "<!-- not run -->\n\n    make\n", "<!-- not run: x -->"],
)
def test_marker_without_block_or_reason_is_an_error(text: str) -> None:
    with pytest.raises(AssertionError, match=r"no block|REASON"):
        list(blocks_of("page.md", text))


def test_marker_is_about_the_commands_that_it_names() -> None:
    text = "# T\n\n<!-- not run (make b): slow -->\n\n    make a\n    make b &&\n     make c\n"
    [block] = blocks_of("page.md", text)
    assert [(c.line, c.text, c.reason) for c in block.commands()] == [
        (5, "make a", ""),
        (6, "make b &&\n make c", "slow"),
    ]


# --- commands -------------------------------------------------------------------------------------


# A parser takes longer to construct than to parse with.
parser_of_forge = cache(cli._parser)
parser_of_snakemake = cache(partial(get_argument_parser, []))


def forge(words: list[str]) -> None:
    """Options and keys are known, by the parser and the config. Raises SystemExit or ConfigError."""
    options, rest = parser_of_forge().parse_known_args(words)
    snakemake(getattr(options, "of_snakemake", []))
    assert options.takes_overrides or not rest, rest
    overrides, of_machine = cli._overrides(rest)
    load_config(ROOT / "config/config.yaml", overrides)
    load_machine(None, of_machine)
    for path in (word for word in words if word.startswith(("config/", "profiles/"))):
        assert (ROOT / path).exists() or MINE in path or path == "config/theirs.yaml", path


def snakemake(words: list[str]) -> None:
    """Options are known, targets are rules without wildcards or files of a run; files are there."""
    options = parser_of_snakemake().parse_args(words)
    for target in options.targets:
        assert target in RULES or target.startswith("results/"), target
    for path in (options.profile or [], options.configfile or []):
        for name in map(str, path):
            assert (ROOT / name).exists() or name in (MINE, "mine.yaml"), name


@cache
def make_words() -> tuple[set[str], set[str]]:
    """(targets, variables) of the Makefile, and variables of the page of variables."""
    text = (ROOT / "Makefile").read_text()
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    page = (ROOT / "docs/environment.md").read_text()
    return set(phony.split()), set(re.findall(r"`([A-Z][A-Z_]+)`", page)) | {"EXTRAS"}


def make(words: list[str]) -> None:
    targets, variables = make_words()
    if words[:1] == ["-C"]:
        words = words[2:]
    for word in words:
        name, given, value = word.partition("=")
        assert name in (variables if given else targets), word
        if name == "EXTRAS":
            assert set(value.split(",")) <= EXTRAS.keys() | {"NAME"}, word


def python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words
    elif words[0] == "-c":
        ast.parse(words[1])


CHECKED: dict[str, Callable[[list[str]], None]] = {
    "forge": forge,
    "snakemake": snakemake,
    "make": make,
    "python": python,
    "python3": python,
}


def check(text: str) -> None:
    """The words of a command, behind assignments of variables, fit what it starts."""
    for part in re.split(r" (?:&&|\|) ", text):
        words = shlex.split(part, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words and (known := CHECKED.get(words[0].removeprefix(".venv/bin/"))):
            known(words[1:])


def test_each_command_of_a_block_fits_its_parser() -> None:
    hold_for_each(((command.where, command.text) for command in pages.commands()), check)


NAMES_A_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:forge|snakemake|make) ")
INLINE = sorted({span for span in pages.spans() if NAMES_A_COMMAND.match(span[1])})
ANY = {"forge …": "forge train", "COMMAND": "train", "--profile …": "--profile profiles/local"}


def check_inline(text: str) -> None:
    """It may leave out the name at its end, CONFIG or RUN, and say `…` where anything may stand."""
    for written, meant in ANY.items():
        text = text.replace(written, meant)
    text = re.sub(r"\[(.*?) …\]", r"\1", text).replace("[…]", "[x]").replace(" …", "")
    try:
        check(text)
    except SystemExit as err:
        if err.code:
            check(f"{text} NAME")


def test_each_command_in_a_sentence_fits_its_parser() -> None:
    hold_for_each(((f"{page}: {text}", text) for page, text in INLINE), check_inline)


def test_wrong_commands_are_noticed() -> None:
    wrong = {
        "forge train c.yaml --train.max_step=1": "unknown key train.max_step",
        "forge show --nothing": "--nothing",
        "forge shows": "'shows'",
        "make trains": "trains",
        "make setup EXTRAS=all": "EXTRAS=all",
        "snakemake --profile profiles/none train": "profiles/none",
        "X=1 snakemake trains": "trains",
        "snakemake --profiles profiles/local": "--profiles",
        "python -m forge.no": "forge.no",
    }
    assert failures([], check) == ["there is no case to check"]
    found = failures([(text, text) for text in wrong], check)
    assert [line.partition(": ")[0] for line in found] == [*wrong]
    assert all(
        told in line.partition(": ")[2] for line, told in zip(found, wrong.values(), strict=True)
    )


# --- fragments ------------------------------------------------------------------------------------


def merged(values: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """As one writes a fragment into a file: by key, without what the new keys exclude."""
    found = dict(into)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(value, found[key]) if both else value
    if "sources" in values:
        found.pop("inputs", None)
    if "init" in values:  # of `model`: docs/huggingface.md says to remove the others
        found = values
    return found


def as_written(block: Block, values: dict[str, Any]) -> dict[str, Any]:
    """The config with a fragment and those before it on its page. A program stands alone."""
    if "program" in values:
        return values
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    before = [one for one in FRAGMENTS if one.page == block.page and one.line < block.line]
    for one in [*before, block]:
        if one.kind == "yaml":
            config = merged(yaml.safe_load(one.text), config)
    return config


def read_yaml(block: Block, path: Path) -> None:
    """By the reader of machine files, of resources or of configs. path: a file to write it to."""
    values = yaml.safe_load(block.text)
    if values.keys() <= Machine.model_fields.keys():
        path.write_text(block.text)
        load_machine(path)
    elif block.page == "profiles/README.md":
        assert values.keys() <= RULES
        for resources in values.values():
            refuse_unknown(resources, ())
    else:
        path.write_text(yaml.safe_dump(as_written(block, values)))
        load_config(path)


def test_each_yaml_is_accepted_by_what_reads_it(tmp_path: Path) -> None:
    hold_for_each(of_kind("yaml"), partial(read_yaml, path=tmp_path / "file.yaml"))


def test_snakefile_of_a_page_is_the_one_that_a_test_runs() -> None:
    """tests/workflow/test_module.py, on Slurm tests/slurm/test_workflow.py; rules of a plugin by
    tests/workflow/test_own_plugins.py."""
    written = [(block.page, block.text) for block in FRAGMENTS if block.kind == "snakemake"]
    with_one = [(page, text) for page, text in written if page != pages.OWN_PLUGINS]
    assert with_one == [("docs/workflow.md", WITH_OWN_RULES)]


def read_sheet(block: Block, sheet: Path) -> None:
    sheet.write_text(block.text)
    values = merged({"train": {"keep_every": 10000, "schedule": "wsd"}}, as_written(block, {}))
    runs = run_configs(values, sheet)
    head, *lines = (line.split("\t") for line in block.text.splitlines())
    if "parent" in head:
        expected = {line[0]: line[head.index("parent")] or None for line in lines}
        assert {name: config.parent for name, config in runs.items()} == expected


def test_each_sheet_is_read_as_the_workflow_reads_it(tmp_path: Path) -> None:
    hold_for_each(of_kind("tsv"), partial(read_sheet, sheet=tmp_path / "runs.tsv"))


def check_python(block: Block) -> None:
    """A call with `...` leaves out arguments."""
    script = (ROOT / "config/labs/bert-cpu/train.py").read_text()
    here, there = (
        {
            ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom | ast.Call)
        }
        for text in (block.text, script)
    )
    assert here and {text for text in here if "..." not in text} <= there


def test_each_python_has_imports_and_calls_of_the_script_that_runs() -> None:
    """tests/workflow/test_lab_bert.py runs that script, tests/distributed/test_load.py the block with
    forge.load, tests/workflow/test_own_plugins.py those of a lab's plugins."""
    run_elsewhere = {"docs/commands.md", pages.OWN_PLUGINS, *pages.PYTHON_THAT_RUNS}
    told = [one for one in of_kind("python") if one[1].page not in run_elsewhere]
    hold_for_each(told, check_python)


def check_picture(block: Block) -> None:
    for path in re.findall(r'\["([\w/]+\.?\w+)[":]', block.text):
        assert any((ROOT / part / path).exists() for part in ("", "forge")), path
    for names in re.findall(r"\w+(?: & \w+)+", block.text):
        assert all((ROOT / "forge" / name / "__init__.py").exists() for name in names.split(" & "))


def test_names_in_each_picture_are_there() -> None:
    """Rules and their order: tests/workflow/test_drawn_and_linted.py."""
    hold_for_each(of_kind("mermaid"), check_picture)


# --- samples of output ----------------------------------------------------------------------------

SOURCES = [*(ROOT / "forge").rglob("*.py"), *(ROOT / "config/labs").rglob("*.py")]
VALUE = r"(?<==)[^\s;]*|\S*\d\S*|…\S*"  # numbers, and what has one; what follows an equals sign


@cache
def said() -> str:
    """All that the sources say."""
    return "".join(path.read_text() for path in SOURCES)


def check_sample(block: Block) -> None:
    """Every word of it that is no value is one of the sources."""
    words = set(re.findall(r"[A-Za-z][\w.-]+", re.sub(VALUE, " ", block.text)))
    assert len(words) > 3
    unsaid = [word for word in sorted(words) if not re.search(rf"\b{re.escape(word)}\b", said())]
    assert not unsaid, f"no source says: {', '.join(unsaid)}"


def test_each_sample_of_output_has_the_words_of_the_sources() -> None:
    hold_for_each(of_kind("text"), check_sample)
