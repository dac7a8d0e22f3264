"""The agent that runs functions on a node: `python -m forge.node_agent`, JSON Lines in and out.

A call is `{"id": 3, "do": "hello", "with": {}}`, its response `{"id": 3, "value": …}` or
`{"id": 3, "error": …, "cause": …, "fix": …}`. `forge.hosts.nodes` sends the calls. No torch
here: the agent must start fast.

To add a call, write a function with keyword arguments, and add it to the CALLS of its module;
those of a plugin come by the hook `agent_functions`. Arguments and values are of the types in its
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

CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: validate_call(call) for call in (hello, *node_checks.CALLS, *on_node.CALLS)
}


def _call_of(name: str) -> Callable[..., Any]:
    if name not in CALLS:  # an agent that is asked for none of a plugin looks for none
        CALLS.update({one.__name__: validate_call(one) for one in hooks.agent_functions()})
    return CALLS[name]


def respond(line: str) -> dict[str, Any]:
    """The response to the call in a line. A bug of Forge ends the process, with a traceback."""
    call = json.loads(line)
    response: dict[str, Any] = {"id": call["id"]}
    try:
        value = _call_of(call["do"])(**call["with"])
        return response | {"value": to_jsonable_python(value)}
    except ForgeError as err:
        return response | {"error": err.what, "cause": err.cause, "fix": err.fix}
    except OSError as err:
        return response | {"error": f"{type(err).__name__}: {err}", "cause": "", "fix": ""}


# Slurm sends these to all processes of all steps of a job, before its time limit or a preemption. They
# are for the ranks, whose files this process has yet to send. Programs that it starts ignore them, too: a
# check that a signal has killed would blame the node.
FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Respond to calls until the input ends: then the program that sent them has ended."""
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    responses = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is not a response
    for line in sys.stdin:
        print(json.dumps(respond(line), allow_nan=False), file=responses, flush=True)


if __name__ == "__main__":
    main()
