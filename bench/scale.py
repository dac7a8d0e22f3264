"""What grows with the number of ranks: the plan of a save, reads of shards, looks of the launcher.

python -m bench.scale [--quick]    about 3 min; needs 4 GiB of memory, and strace for the looks

Ranks are simulated in one process: rank 0 gets the pickles that so many ranks would send it. Network and
disks are not part of it.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from forge.checkpoint import save_plan, storage
from forge.checkpoint.plan_pickles import PlanUnpickler
from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.process import Process
from forge.launch.launcher import register
from forge.launch.rank_output import BAR, MESSAGES
from forge.launch.rank_records import LaunchSpec, PreflightTask, reserve
from forge.launch.torch_private import StorageInfo, split_by_size_and_type
from forge.trainer.models.decoder import make_decoder

GB = 1e9
SEVEN_B = Llama(dim=4096, layers=32, heads=32, ffn_dim=11008, tie_embeddings=False)
SMALL = Llama(dim=64, layers=2, heads=4, tie_embeddings=False)
FILE_CALLS = "%file,%desc"  # of strace: calls with a path or a file descriptor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 ranks and a small model")
    options = parser.parse_args()
    gc.disable()  # as training does
    model, worlds, sec = (SMALL, [8], 2) if options.quick else (SEVEN_B, [8, 64, 256], 10)
    with torch.device("meta"):
        parameters = dict(make_decoder(model, 50_304).named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for ranks in worlds:
        report_save(shapes, ranks)
    for nodes in (1, 8, 64, 1024):
        print(
            f"shards of 400 GB, shared, {nodes} nodes: {400 * nodes:,.1f} GB read before, 400.0 GB now"
        )
    for ranks in worlds:
        print(
            f"launcher, {ranks} ranks: {file_operations(ranks, sec):.1f} file operations a second"
        )


# --- the plan of a save ---------------------------------------------------------------------------


def report_save(shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    """Print CPU seconds of rank 0, and bytes that it gets and sends, with a new and a kept plan."""
    plans = [SavePlan(list(parts_of(shapes, rank, ranks))) for rank in range(ranks)]
    print(f"save, {ranks} ranks with {len(plans[0].items):,} parts each:")
    new, index = exchange(plans)
    print(
        f"  new plan: {new.seconds:.2f} s of Python on rank 0, {new.bytes / 1e6:.1f} MB of pickles"
    )
    kept, _ = exchange([SavePlan([])] * ranks)
    layout = save_plan._layout(plans[0])
    same, _ = timed(lambda: save_plan._layout(plans[0]) == layout)
    seconds, size = kept.seconds + same, kept.bytes / 1e6
    print(f"  kept plan: {seconds:.2f} s, {size:.1f} MB; index.json has {len(index) / 1e6:.1f} MB")


def parts_of(shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Iterator[WriteItem]:
    """What a rank tells of its state: weights and moments by rows, as FSDP2 shards them, and steps."""
    for name, shape in shapes.items():
        yield part(f"model.{name}", shape, rank, ranks)
        yield part(f"optimizer.{name}.step", (), rank, ranks)
        for moment in ("exp_avg", "exp_avg_sq"):
            yield part(f"optimizer.{name}.{moment}", shape, rank, ranks)


def part(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> WriteItem:
    kind, offset, size = WriteItemType.TENSOR, torch.Size(shape), torch.Size(shape)
    if shape:
        rows = math.ceil(shape[0] / ranks)
        first, end = (min(number * rows, shape[0]) for number in (rank, rank + 1))
        kind, offset = WriteItemType.SHARD, torch.Size((first, *[0] * (len(shape) - 1)))
        size = torch.Size((end - first, *shape[1:]))
    properties = TensorProperties(dtype=torch.float32)
    data = TensorWriteData(ChunkStorageMetadata(offset, size), properties, torch.Size(shape))
    return WriteItem(MetadataIndex(name, offset), kind, tensor_data=data)


def exchange(plans: list[SavePlan]) -> tuple[SimpleNamespace, bytes]:
    """The work of rank 0 in a save with these plans of all ranks, and the index.

    As DCP does it: read the plans, make the global one, send the shares, read the results.
    """
    sent = [pickle.dumps(plan) for plan in plans]
    seconds, (shares, metadata) = timed(lambda: global_plan([loaded(data) for data in sent]))
    back, answers = timed(lambda: [pickle.dumps(share) for share in shares])
    results = [pickle.dumps(results_of(rank, share)) for rank, share in enumerate(shares)]
    last, index = timed(
        lambda: (
            storage._index_of(metadata, [loaded(data) for data in results])
            if metadata.state_dict_metadata
            else b""
        )
    )
    size = sum(map(len, (*sent, *answers, *results)))
    return SimpleNamespace(seconds=seconds + back + last, bytes=size), index


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    if not any(plan.items for plan in plans):
        return plans, Metadata({})
    planner = save_plan.DefaultSavePlanner(flatten_state_dict=False)
    return planner.create_global_plan(plans)


def results_of(rank: int, plan: SavePlan) -> list[WriteResult]:
    results = []
    for number, items in enumerate(split_by_size_and_type(storage.WRITER_THREADS, plan.items)):
        start = 0
        for item in items:
            assert item.tensor_data
            length = 4 * math.prod(item.tensor_data.chunk.sizes)
            where = StorageInfo(f"__{rank}_{number}.distcp", start, length)
            results.append(WriteResult(item.index, length, where))
            start += length
    return results


def loaded(data: bytes) -> Any:
    return PlanUnpickler(io.BytesIO(data)).load()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and the result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


# --- looks of the launcher ------------------------------------------------------------------------

WATCH = """
import subprocess, sys
from pathlib import Path
from forge.launch import launcher
from forge.launch.rank_records import LaunchSpec
spec = LaunchSpec.read(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", sys.argv[2]])
launcher._watch(child, spec, [], 60, None)
"""


def file_operations(ranks: int, sec: int) -> float:
    """Calls of the launcher with a path or a file, a second, while so many ranks run; counted by strace
    as the difference of a watch of sec and one of 2 * sec. nan without strace."""
    if not shutil.which("strace"):
        return math.nan
    with tempfile.TemporaryDirectory() as folder:
        spec = LaunchSpec(
            task=PreflightTask(patience_sec=5, nccl_file=""),
            **{"run": folder, "launch": "20260101T000000-1", "machine": Machine()},
            **{"nodes": ranks // 4, "ranks_per_node": 4, "launcher": Process.current()},
        )
        spec.write(spec.path)
        reserve(spec)
        for rank in range(ranks):
            register(spec, f"rank-{rank}", spec.launcher.pid)
        (spec.directory / MESSAGES).write_text("step 1\n")
        bar = '{"label": "train", "total": 9, "unit": "steps", "done": 1, "note": ""}'
        (spec.directory / BAR).write_text(bar)
        return (calls(spec.path, 2 * sec) - calls(spec.path, sec)) / sec


def calls(spec: Path, sec: int) -> int:
    with tempfile.NamedTemporaryFile("r") as table:
        line = ["strace", "-c", "-o", table.name, "-e", f"trace={FILE_CALLS}"]
        program = [sys.executable, "-c", WATCH, str(spec), str(sec)]
        subprocess.run([*line, *program], check=True, capture_output=True)
        # Its last line: 100.00 0.012 3 4021 12 total
        total = table.read().rstrip().rpartition("\n")[2].split()
    return int(total[3])


if __name__ == "__main__":
    main()
