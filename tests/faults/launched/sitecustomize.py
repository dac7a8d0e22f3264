"""Arms a rank that was really launched: with this folder on PYTHONPATH, Python imports it at start.

FORGE_FAULT is the fault as JSON; it strikes once, which the file FORGE_FAULT_ONCE tells.
"""

import json
import os
import sys
from pathlib import Path


def _arm() -> None:
    # Not torchrun, which names the module too, behind its own.
    if "forge.worker" not in sys.orig_argv or sys.orig_argv.count("-m") > 1:
        return
    fault = json.loads(os.environ["FORGE_FAULT"])
    if int(os.environ.get("RANK", "0")) != fault["rank"]:
        return
    try:
        Path(os.environ["FORGE_FAULT_ONCE"]).touch(exist_ok=False)
    except FileExistsError:
        return
    sys.path.append(str(Path(__file__).parents[1]))
    from injection import Fault, Injector

    from forge.core import failpoints

    run = Path(sys.orig_argv[-1]).parents[2]  # of RUN/.launch/ID/spec.json
    failpoints.hook = Injector([Fault(**fault)], fault["rank"], run)


if "FORGE_FAULT" in os.environ:
    _arm()
