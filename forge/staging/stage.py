"""`forge stage`: copy token shards to the nodes' local disks, and verify them there."""

from __future__ import annotations

import time
from pathlib import Path

from forge.cluster.placement import WorldLayout, find_placement
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.machine import Machine
from forge.core.paths import RunPaths, tokens_folder
from forge.data.shards import ShardSet
from forge.staging.to_nodes import stage_for_program, stage_nodes


def stage(config: ResolvedConfig, machine: Machine, layout: WorldLayout) -> Path:
    """Make the run's shards readable from fast storage on every node; the path of stage.json.

    A node that has valid shards keeps them. stage.json has the directory that the ranks of each node
    read. Raises UnfitError for a full disk, a directory that another user could tamper with, and nodes
    that do not respond; DataError for corrupt shards.
    """
    started = time.time()
    paths = RunPaths.of(config)
    placement = find_placement(machine, layout)
    if config.program:
        record = stage_for_program(config, machine, placement)
    else:
        source = ShardSet.open(tokens_folder(config.data, config.ids.tokens))
        record = stage_nodes(source, config, machine, placement, min_nodes=layout.nodes)
    seconds = round(time.time() - started, 3)
    said = record.model_dump(include={"bytes", "digest", "folders", "sent"})
    events.record(paths.events, events.Stage(seconds=seconds, **said))
    record.write(paths.stage)
    return paths.stage
