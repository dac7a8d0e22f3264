"""Tables of docs/messages.md: errors and failed checks that say what to do, from the sources of Forge.

`python -m tools.config_docs` writes the tables into the page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forge

FORGE = Path(forge.__file__).parent
PAGE = Path("docs/messages.md")
GAP = "…"  # stands for names and numbers
# Heading -> packages and modules of forge/ whose errors are below it, in the order of a run.
PHASES = {
    "Config, sample sheet and command line": ("core", "commands", "flow", "cli.py", "notebook.py"),
    "Text and tokens": ("data",),
    "Slurm, nodes and preflight": ("slurm", "hosts", "staging", "preflight", "node_agent.py"),
    "Training": ("launch", "trainer", "run", "worker.py", "program.py"),
    "Checkpoints and validation": ("checkpoint", "validation", "attestation"),
    "Looking at runs": ("reporting",),
    "Plugins": ("plugins",),
}


@dataclass(frozen=True)
class Message:
    """Error, or failed check of preflight, as a user sees it."""

    what: str
    cause: str
    fix: str


def tables() -> str:
    """A heading and a table for each phase, with the errors in the order of their text."""
    parts = []
    for phase, places in PHASES.items():
        found = {message for place in places for message in messages(FORGE / place)}
        rows = (
            f"| {' | '.join(map(_cell, (m.what, m.cause, m.fix)))} |"
            for m in sorted(found, key=lambda m: (m.what.strip(f"{GAP} :'`").lower(), m.fix))
        )
        head = "| message | cause | do |\n|---|---|---|"
        parts.append("\n".join([f"## {phase}\n", head, *rows, ""]))
    return "\n".join(parts)


def messages(place: Path) -> Iterator[Message]:
    """Errors with cause and fix, and checks with a fix, in a module or in the modules below a directory.
    Those whose text is put together elsewhere are left out."""
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        tree = ast.parse(path.read_text())
        named = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (message := _message(node, named)):
                yield message


def _message(call: ast.Call, named: dict[str, ast.expr]) -> Message | None:
    told: dict[str | None, ast.expr] = {k.arg: k.value for k in call.keywords}
    if isinstance(call.func, ast.Name) and call.func.id == "Check":
        told |= dict(zip(("name", "status", "what", "fix", "cause"), call.args, strict=False))
    elif call.args and {"cause", "fix"} <= told.keys():
        told["what"] = call.args[0]
    else:
        return None
    what, cause, fix = (_text(told.get(part), named) for part in ("what", "cause", "fix"))
    fits = _is_told(what) and _is_told(fix) and ("cause" not in told or _is_told(cause))
    return Message(what, cause, fix) if fits else None


def _is_told(text: str) -> bool:
    return sum(map(str.isalpha, text)) > 9


def _text(node: ast.AST | None, named: dict[str, ast.expr]) -> str:
    """A text as the source has it, with gaps for what is filled in; of two, the first."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, named) or GAP for part in parts)
        case ast.BinOp(left=left, right=right):
            return _text(left, named) + _text(right, named)
        case ast.IfExp(body=body):
            return _text(body, named)
        case ast.Name(id=name) if name in named:
            return _text(named[name], {})
    return ""


def _cell(text: str) -> str:
    return " ".join(text.replace(GAP * 2, GAP).split()).replace("|", "\\|")
