"""The agent that runs functions on a node: `python -m forge.node_agent`, JSON Lines in and out.

A request is `{"id": 3, "do": "hello", "with": {}}`, its response `{"id": 3, "value": …}` or
`{"id": 3, "error": …, "cause": …, "fix": …}`. `forge.hosts.nodes` sends the requests. No torch
here: the agent must start fast.

To add a request, write a function with keyword arguments, and add it to the REQUESTS of its module;
those of a plugin come by the hook `node_requests`. Arguments and values are of the types in its
signature, and travel as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pydantic import validate_call
from pydantic_core import to_jsonable_python

from forge.core import hooks
from forge.core.errors import ForgeError
from forge.hosts.nodes import hello
from forge.preflight import node_checks
from forge.staging import on_node

REQUESTS: dict[str, Callable[..., Any]] = {
    request.__name__: validate_call(request)
    for request in (hello, *node_checks.REQUESTS, *on_node.REQUESTS)
}


def _request(name: str) -> Callable[..., Any]:
    if name not in REQUESTS:  # an agent that is asked for none of a plugin looks for none
        REQUESTS.update({one.__name__: validate_call(one) for one in hooks.node_requests()})
    return REQUESTS[name]


def respond(line: str) -> dict[str, Any]:
    """The response to the request in a line. A bug of Forge ends the process, with a traceback."""
    request = json.loads(line)
    response: dict[str, Any] = {"id": request["id"]}
    try:
        value = _request(request["do"])(**request["with"])
        return response | {"value": to_jsonable_python(value)}
    except ForgeError as err:
        return response | {"error": err.what, "cause": err.cause, "fix": err.fix}
    except OSError as err:
        return response | {"error": f"{type(err).__name__}: {err}", "cause": "", "fix": ""}


# Slurm sends these to all steps of a job, before its time limit or a preemption. They are for the ranks,
# whose files this process has yet to send.
FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Respond to requests until the input ends: then the program that sent them has ended."""
    for number in FOR_RANKS:
        signal.signal(number, lambda *_: None)  # programs that it starts do not inherit this
    responses = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is not a response
    for line in sys.stdin:
        print(json.dumps(respond(line), allow_nan=False), file=responses, flush=True)


if __name__ == "__main__":
    main()
