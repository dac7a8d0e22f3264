"""What `forge stage` has copied to the nodes of this allocation (stage.json), and its removal."""

from __future__ import annotations

import sys

from forge.cluster import slurm
from forge.cluster.nodes import Crew, Trouble
from forge.cluster.placement import Place
from forge.core.files import read_object
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.core.terminal import say
from forge.staging import on_node

REMOVE_SEC = 60.0


def staged_folders(paths: RunPaths) -> dict[str, str]:
    """Where `stage` put the shards, by node; empty where it was not asked."""
    return dict(read_object(paths.stage, "folders")["folders"]) if paths.stage.exists() else {}


def staged_python(paths: RunPaths) -> str:
    """What runs the ranks: the Python that `stage.project` put on the nodes, else this one."""
    facts = read_object(paths.stage) if paths.stage.exists() else {}
    return str(facts.get("python") or sys.executable)


def remove_staged(paths: RunPaths, place: Place) -> None:
    """Remove what `stage` put on the nodes of this job for this run, unless it is to be kept.

    What another run of the same job still reads stays. Trouble is told, never raised: what is left
    goes with the next `stage` on that node.
    """
    facts = read_object(paths.stage) if paths.stage.exists() else {}
    job = place.job.id if place.job else slurm.this_job_id()
    if not facts.get("roots") or facts["job"] != job:
        return
    run = paths.root.name
    wanted = {host: {"root": root, "job": job, "run": run} for host, root in facts["roots"].items()}
    if set(wanted) == {hostname()}:
        on_node.unmark(**wanted[hostname()])
        return
    nodes = Place(tuple(wanted), place.job)
    with Crew(nodes, python=staged_python(paths), start_sec=10) as crew:
        answers = crew.ask("unmark", timeout_sec=REMOVE_SEC, each=wanted)
    for host, reply in answers.items():
        if isinstance(reply, Trouble):
            say(f"stage: could not remove the shards from {host}: {reply.message}")
