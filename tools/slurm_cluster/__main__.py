"""The test cluster for people: starts, stops, shows or enters the cluster of this machine's user.

python -m tools.slurm_cluster up [--twin FILE] | down | status | shell | in MACHINE COMMAND...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge.core.errors import DataError, ForgeError
from forge.core.terminal import one_line, print_plain
from forge.slurm.site import SiteAnswers

from .cluster import Cluster, base_folder, why_not
from .machines import REPOSITORY, ClusterError
from .settings import CONTROLLER, MAX_NODES, Settings
from .twin import fit_for_here, twin_of

WELCOME = """\
{nodes} nodes are idle. Next:
  make slurm-shell     a shell on the controller, in this folder; try: sinfo, srun -N2 hostname
  make slurm-down      stop the cluster
Logs: {folder}/machines"""


def main() -> None:
    """The command line. Exits with 1 and a line for what cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.slurm_cluster", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, help="default: `cluster` in FORGE_SLURM_DIR")
    parser.add_argument("--nodes", type=int, help=f"1 to {MAX_NODES}, for a new start (4)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start what does not run")
    up.add_argument(
        "--twin",
        type=Path,
        metavar="FILE",
        help="a small twin of a real cluster, of which `forge profile --save FILE` wrote the file there",
    )
    for verb in ("down", "status", "shell"):
        verbs.add_parser(verb)
    inside = verbs.add_parser("in", help="run a command in a machine")
    inside.add_argument("machine")
    inside.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        if reason := why_not():
            raise ClusterError(reason)
        act(given.folder or base_folder() / "cluster", given)
    except (ClusterError, ForgeError, ValueError) as error:
        sys.exit(str(error))


def act(folder: Path, given: argparse.Namespace) -> None:
    """One verb of the command line."""
    if given.verb == "up":
        start(folder, given)
        return
    cluster = Cluster(folder)
    if given.verb == "down":
        cluster.down()
    elif given.verb == "in":
        cluster.become(*given.command, machine=given.machine, cwd=Path.cwd())
    elif not cluster.is_up():
        raise ClusterError("the Slurm cluster is down; start it with: make slurm-up")
    elif given.verb == "shell":
        cluster.become("bash", "-i", machine=CONTROLLER, cwd=REPOSITORY)
    else:
        print(cluster.run("sinfo", "-a").stdout + cluster.run("squeue", "-a").stdout, end="")


def start(folder: Path, given: argparse.Namespace) -> None:
    """Start the cluster, and say what it is."""
    notes: list[str] = []
    settings = Settings() if given.nodes is None else Settings(nodes=given.nodes)
    if given.twin is not None:
        if given.nodes is not None:
            raise ClusterError("--nodes or --twin: the nodes of a twin are those of its file")
        if Cluster(folder).is_up():
            raise ClusterError(
                f"a cluster is up already (in {folder}); stop it first: make slurm-down"
            )
        try:
            site = SiteAnswers.read(given.twin)
        except DataError as err:
            raise DataError(err.what, cause=err.cause, fix=SiteAnswers.FIX) from None
        made_up = ", written by a person in Slurm's format" if site.synthetic else ""
        settings, of_site = twin_of(site)
        settings, of_here = fit_for_here(settings)
        what = one_line(f"{site.source}{made_up} (Slurm {site.slurm})")
        notes = [f"Twin of {what}:", *of_site, *of_here]
    cluster = Cluster(folder, settings)
    try:
        cluster.up()
    except ClusterError:
        if notes:  # the next start would take a twin without its accounts for a whole one
            cluster.down()
        raise
    for note in notes:
        print_plain(note)
    print(WELCOME.format(nodes=len(cluster.nodes), folder=cluster.folder))


if __name__ == "__main__":
    main()
