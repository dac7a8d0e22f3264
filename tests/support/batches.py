"""The batches that ranks train on, as they record them, and which windows of which source these are."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from support.forked import RankStart

from forge.core import json_lines
from forge.core.files import read_json
from forge.core.paths import tokens_folder

PAUSE_AT = 14
PAUSED = "paused"  # file of the run, once a rank is at that step


def record_batches(start: RankStart) -> None:
    """An `Arm`: append step, rank and windows of each batch to batches.jsonl of the run."""
    from forge.data.loader import Loader

    batch = Loader.batch

    def recorded(self: Loader, step: int) -> Any:
        inputs, targets = batch(self, step)
        windows = np.concatenate([inputs.numpy(), targets.numpy()[:, -1:]], axis=1)
        line = {"step": step, "rank": start.rank, "windows": windows.tolist()}
        with open(start.run / "batches.jsonl", "a") as file:  # one write: ranks take turns
            file.write(json.dumps(line) + "\n")
        return inputs, targets

    Loader.batch = recorded  # type: ignore[method-assign]


def record_and_pause(start: RankStart) -> None:
    """As `record_batches`; the first launch waits before a step, until it is killed."""
    record_batches(start)
    from forge.data.loader import Loader

    batch = Loader.batch

    def paused(self: Loader, step: int) -> Any:
        if step == PAUSE_AT and start.launch == 0:
            (start.run / PAUSED).touch()
            time.sleep(3600)
            os._exit(1)
        return batch(self, step)

    Loader.batch = paused  # type: ignore[method-assign]


def batches(run: Path) -> dict[int, list[tuple[int, ...]]]:
    """The windows of each step, over all ranks. Every record of a step must be the same."""
    parts: dict[int, list[dict[int, Any]]] = {}
    for line in json_lines.read(run / "batches.jsonl"):
        launches = parts.setdefault(line["step"], [{}])
        if line["rank"] in launches[-1]:
            launches.append({})
        launches[-1][line["rank"]] = line["windows"]
    found: dict[int, list[tuple[int, ...]]] = {}
    for step, launches in parts.items():
        for ranks in launches:
            rows = [tuple(row) for rank in sorted(ranks) for row in ranks[rank]]
            if step in found and len(rows) == len(found[step]):
                assert rows == found[step], f"step {step} was repeated with other samples"
            if len(rows) >= len(found.get(step, [])):
                found[step] = rows
    return found


def windows_of(data: Path, tokens_id: str, seq_len: int) -> Counter[tuple[int, ...]]:
    """How often each window is in the training split, read from the files as the manifest lists them."""
    folder = tokens_folder(data, tokens_id)
    manifest = read_json(folder / "manifest.json")
    found: Counter[tuple[int, ...]] = Counter()
    for entry in manifest["splits"]["train"]:
        ids = np.fromfile(folder / entry["file"], np.dtype(manifest["dtype"]))
        found.update(
            tuple(ids[start : start + seq_len + 1].tolist())
            for start in range(0, len(ids) - seq_len, seq_len)
        )
    return found
