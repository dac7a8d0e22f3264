"""`forge reproduce CHECKPOINT`: retrain the steps up to a checkpoint of a run, from the one before.

The run may be training: its lock is not needed. Certificate, statement and result are in `certificates/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from forge.attestation import verify
from forge.checkpoint.directory import refuse_link
from forge.checkpoint.resume import CommittedCheckpoints, is_checkpoint
from forge.core.errors import ConfigError, DataError, ForgeError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths, checkpoint_step
from forge.core.process import hostname
from forge.core.scratch import scratch_directory
from forge.hosts.lock import lock
from forge.plugins.attestation.draw import Draw
from forge.plugins.attestation.places import CERTIFICATES, certificate_at, result_at
from forge.plugins.attestation.records import Certified
from forge.plugins.attestation.reproduce import refuse_bad, retrained, stopped_by_sigterm
from forge.plugins.attestation.reproduce_options import ReproduceOptions, check_values
from forge.plugins.attestation.statement import write_statement
from forge.reporting.history import read_history
from forge.run.forge_trainer import ForgeRun

MOST_NAMED = 12  # steps in one message


def run_of_checkpoint(named: Path) -> RunPaths | None:
    """The run whose checkpoint a user names; None for an export, a run, or anything else."""
    if (named / verify.STATEMENT).exists() or not is_checkpoint(named):
        return None
    return RunPaths.of_checkpoint(named.resolve())


def reproduce_checkpoint(request: ReproduceOptions, run: RunPaths) -> None:
    """Export the checkpoint that the user has named for as long as it takes, train the interval that ends
    with it again, and write certificate, statement and result into the run. request: with the checkpoint
    as its folder.

    Raises as `reproduce`, and UnfitError where somebody else does the same.
    """
    folder = request.folder.resolve()
    step = checkpoint_step(folder.name)
    if step is None or not folder.is_dir():
        raise _not_there(request.folder, run)
    certificates = run.root / CERTIFICATES
    refuse_link(certificates)
    with disk_trouble(certificates):
        certificates.mkdir(exist_ok=True)
    to = request.to or certificate_at(run, step)
    request = replace(request, checkpoint=request.folder, run=None, to=to)
    check_values(request)
    with (
        lock(certificates, "reproduce", name=f".{folder.name}.lock"),
        stopped_by_sigterm(),
        scratch_directory("export") as scratch,
        _recorded(run, step),
    ):
        saved = ForgeRun(RunPaths(folder), None, {"data": str(request.data)})
        export = saved.export(scratch / folder.name, "fp32")
        write_statement(export, saved)
        draw = retrained(replace(request, folder=export))
        _record(draw, run)
    refuse_bad(draw)


def _not_there(folder: Path, run: RunPaths) -> ConfigError:
    steps = [str(step) for step in CommittedCheckpoints(run).by_step()]
    there = ", ".join(steps[-MOST_NAMED:])
    return ConfigError(
        f"{folder} does not exist",
        cause="it was pruned" if there else "the run has no checkpoint, or has another name",
        fix=f"{folder.parent} has those of the steps {there}"
        if there
        else "`forge status` names runs",
    )


@contextmanager
def _recorded(run: RunPaths, step: int) -> Iterator[None]:
    """Record also an error that ends the body before there is a result; never in place of one."""
    try:
        yield
    except ForgeError as err:
        unchecked = Certified(first=None, last=step, result="unchecked", why=err.what, again_on="")
        with suppress(
            DataError
        ):  # a record that cannot be read stays, too: `forge status` names it
            before = Certified.read_if_there(result_at(run, step))
            if before is None or before.result == "unchecked":
                _write(run, unchecked)
        raise


def _record(draw: Draw, run: RunPaths) -> None:
    [interval] = draw.chosen
    result = draw.result
    _write(
        run,
        Certified(
            first=interval.first,
            last=interval.last,
            result="unchecked" if result == "incomplete" else result,
            is_bitwise=draw.results[0].outcome == "bitwise",
            trained_on=_nodes_of(run, interval.first, interval.last),
            again_on=os.environ.get("SLURMD_NODENAME") or hostname(),
        ),
    )


def _write(run: RunPaths, record: Certified) -> None:
    record.write(result_at(run, record.last))


def _nodes_of(run: RunPaths, first: int, last: int) -> list[str]:
    """The nodes that have trained these steps, by the event log; [] without one that can be read."""
    nodes: set[str] = set()
    with suppress(ForgeError):
        for launch in read_history(run).launches:
            begun = launch.begun
            if begun and begun.step < last and launch.last_step > first:
                nodes.update(begun.nodes)
    return sorted(nodes)
