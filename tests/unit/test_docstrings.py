"""Docstrings begin with a noun or a verb: "Return whether the file is complete" is a sentence,
"Whether the file is complete" is a part of one.
"""

import ast
from collections.abc import Iterator

import pytest
from support.repository import REPOSITORY as ROOT

pytestmark = pytest.mark.tools

FOLDERS = ("forge", "tools", "examples")
# First words that leave out the noun or the verb.
REFUSED = {
    *("Of", "Those", "That", "What", "Whatever", "Whether", "As", "Which", "Where", "When", "How"),
    *("It", "If", "So"),
}

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """(line, docstring) of the module, its classes and its functions."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, DOCUMENTED):
            continue
        if docstring := ast.get_docstring(node):
            yield node.body[0].lineno, docstring


def beginning_with_a_refused_word(sources: dict[str, str]) -> list[str]:
    """File, line and first line of each breach. sources: text by path."""
    return [
        f"{path}:{line}: begins with {word}, not with a noun or a verb: {docstring.splitlines()[0]}"
        for path, text in sources.items()
        for line, docstring in docstrings(text)
        if (word := docstring.split()[0].rstrip(",.:")) in REFUSED
    ]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in files} == set(FOLDERS)
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    if breaches := beginning_with_a_refused_word(sources):
        pytest.fail("\n".join([f"{len(breaches)} breaches:", *breaches]), pytrace=False)


def test_planted_first_word_is_found() -> None:
    planted = '''"""Files of a run."""

class Saved:
    """As `Written`, but read."""

    def is_complete(self):
        """Whether all marks are there.

        What is missing is not named.
        """

async def wait(): """Wait: when all is done, return."""

def read():
    x = """Of no docstring."""
'''
    rule = "not with a noun or a verb"
    assert beginning_with_a_refused_word({"forge/a.py": planted, "tools/b.py": '"""It."""'}) == [
        f"forge/a.py:4: begins with As, {rule}: As `Written`, but read.",
        f"forge/a.py:7: begins with Whether, {rule}: Whether all marks are there.",
        f"tools/b.py:1: begins with It, {rule}: It.",
    ]
