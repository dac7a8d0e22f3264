"""`forge stage`: copy token shards, or a program's inputs, to the nodes' local disks, and verify them."""

from __future__ import annotations

import time
from pathlib import Path

from forge.cluster import exclude, slurm
from forge.cluster.nodes import NodesFailed, at_fault
from forge.cluster.placement import WorldLayout, check_source, find_placement
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.machine import Machine
from forge.core.paths import RunPaths, inputs_folder, tokens_folder
from forge.core.process import node_local_folder
from forge.data.input_set import InputSet
from forge.data.shards import FileSet
from forge.data.sources import open_tokens
from forge.staging.to_nodes import stage_nodes


def stage(config: ResolvedConfig, machine: Machine, layout: WorldLayout) -> Path:
    """Make the run's shards, or the inputs of its program, readable from fast storage on every node; the
    path of stage.json.

    A node that has a valid copy keeps it. stage.json has the directory that the ranks of each node read.
    A node whose own disk fails, or that does not respond, is excluded from the run's next jobs. Raises
    UnfitError for a full disk, a directory that another user could tamper with, and nodes that do
    not respond; DataError for corrupt shards, and for inputs that have changed; ConfigError as
    `check_source`.
    """
    started = time.time()
    paths = RunPaths.of(config)
    check_source(machine, layout, config)
    placement = find_placement(machine, layout)
    source = _files(config)
    try:
        record = stage_nodes(source, config, machine, placement, min_nodes=layout.nodes)
    except NodesFailed as err:
        if job := placement.job or slurm.this_job():
            folder = Path(machine.stage.folder or node_local_folder())
            exclude.add(paths.bad_nodes, at_fault(err.failures, placement, folder), job)
        raise
    seconds = round(time.time() - started, 3)
    said = record.model_dump(include={"bytes", "digest", "folders", "sent"})
    events.record(paths.events, events.Stage(seconds=seconds, **said))
    record.keep(paths)
    return paths.stage


def _files(config: ResolvedConfig) -> FileSet | None:
    """The files that the run reads; None for a program without inputs."""
    if config.ids.tokens:
        return open_tokens(tokens_folder(config.data, config.ids.tokens))
    if not config.ids.inputs:
        return None
    inputs = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    inputs.check_unchanged()
    return inputs
