"""The process that runs functions on a node: `python -m forge.node_agent`, JSON lines in and out.

A request is `{"id": 3, "do": "hello", "with": {}}`, its response `{"id": 3, "value": …}` or
`{"id": 3, "error": …, "cause": …, "fix": …}`. `forge.cluster.nodes` sends the requests. No torch
here: the agent must start at once.

To add a request, write a function with keyword arguments that returns what JSON can hold, name it
in the QUESTIONS of its module, and that module's table in QUESTIONS here.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from forge.core.errors import ForgeError
from forge.core.process import hostname
from forge.preflight import node_checks
from forge.staging import on_node

Question = Callable[..., Any]


def hello() -> dict[str, Any]:
    """Who answers: host name, pid, Python."""
    return {"host": hostname(), "pid": os.getpid(), "python": platform.python_version()}


QUESTIONS: dict[str, Question] = {
    "hello": hello,
    **node_checks.QUESTIONS,
    **on_node.QUESTIONS,
}


def answer(line: str) -> dict[str, Any]:
    """The answer to one line. An error that is a bug of ours ends the process, with its traceback."""
    question = json.loads(line)
    reply: dict[str, Any] = {"id": question["id"]}
    try:
        return reply | {"value": QUESTIONS[question["do"]](**question["with"])}
    except ForgeError as err:
        return reply | {"error": err.what, "cause": err.cause, "fix": err.fix}
    except OSError as err:
        return reply | {"error": f"{type(err).__name__}: {err}", "cause": "", "fix": ""}


def main() -> None:
    """Answer until the input ends. Then whoever asked is gone, and this process goes too."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(answer(line), allow_nan=False), file=answers, flush=True)


if __name__ == "__main__":
    main()
