"""The agent that runs functions on a node: `python -m forge.node_agent`, JSON Lines in and out.

A request is `{"id": 3, "do": "hello", "with": {}}`, its response `{"id": 3, "value": …}` or
`{"id": 3, "error": …, "cause": …, "fix": …}`. `forge.cluster.nodes` sends the requests. No torch
here: the agent must start fast.

To add a request, write a function with keyword arguments that returns a JSON value, and add it to the
REQUESTS of its module.
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


def hello() -> dict[str, Any]:
    """Host name, pid and Python version of the agent."""
    return {"host": hostname(), "pid": os.getpid(), "python": platform.python_version()}


REQUESTS: dict[str, Callable[..., Any]] = {
    "hello": hello,
    **node_checks.REQUESTS,
    **on_node.REQUESTS,
}


def respond(line: str) -> dict[str, Any]:
    """The response to the request in a line. A bug of Forge ends the process, with a traceback."""
    request = json.loads(line)
    response: dict[str, Any] = {"id": request["id"]}
    try:
        return response | {"value": REQUESTS[request["do"]](**request["with"])}
    except ForgeError as err:
        return response | {"error": err.what, "cause": err.cause, "fix": err.fix}
    except OSError as err:
        return response | {"error": f"{type(err).__name__}: {err}", "cause": "", "fix": ""}


def main() -> None:
    """Respond to requests until the input ends: then the program that sent them has ended."""
    responses = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is not a response
    for line in sys.stdin:
        print(json.dumps(respond(line), allow_nan=False), file=responses, flush=True)


if __name__ == "__main__":
    main()
