"""How fast do shards reach four nodes, against the link and the unpacking? Seconds.

python -m bench.stage [--quick]    about 2 min; brings up the test cluster, so needs root and Slurm
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forge.core.config import Ids, load_config
from forge.core.files import digest_file, write_json
from forge.core.paths import RunPaths, tokens_folder
from forge.data.content_ids import resolve
from forge.data.shards import ShardEntry, ShardManifest, ShardSet, Total
from forge.slurm import slurm
from forge.staging.archive import Archive, make_archive
from forge.staging.sbcast import Broadcast

NODES = 4
NUM_SHARDS = 16
VOCAB = 32_000
SLOW_MBIT = 1000


# --- outside of the cluster ------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 MiB instead of 256")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # we, on the login node of the cluster
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(compare(Path(options.inside))))
        return
    from tools.slurm_cluster.cluster import base_folder, why_not
    from tools.slurm_cluster.settings import Settings
    from tools.slurm_cluster.temporary import temporary_cluster

    if reason := why_not():
        print(f"skipped: {reason}")
        return
    with temporary_cluster(base_folder(), f"bench-{os.getpid()}", Settings(nodes=NODES)) as cluster:
        measure(cluster, 32 if options.quick else 256)


def measure(cluster: Any, mib: int) -> None:
    import pandas as pd

    folder = cluster.folder / "scratch" / "bench"
    config = write_run(folder, mib)
    job = cluster.submit(
        *(f"--nodes={NODES}", "--ntasks-per-node=1", "--mem=1000", "--time=20"),
        *("--output=/dev/null", "--wrap=sleep 1200"),
    )
    cluster.wait_for_state(job, "RUNNING")
    in_job = {"SLURM_JOB_ID": job}
    tables = []
    for link in ("full", f"{SLOW_MBIT} Mbit/s"):
        if link != "full":
            for machine in cluster.settings.machine_names:
                cluster.slow_link(machine, SLOW_MBIT)
        inside = (sys.executable, "-m", "bench.stage", "--inside", config.parent)
        rows = json.loads(cluster.run(*inside, env=in_job, timeout=300).stdout)
        verb = (
            *(sys.executable, "-m", "forge", "stage", config, f"--nodes={NODES}"),
            *("--machine.launcher=srun", "--machine.stage.mode=always"),
        )
        for what in ("forge stage", "forge stage again"):
            started = time.perf_counter()
            cluster.run(*verb, env=in_job, timeout=300)
            rows[what] = time.perf_counter() - started
            facts = json.loads((config.parent / ".allocation" / "stage.json").read_text())
            rows |= {f"  {n} of {what}": s for n, s in facts["phase_sec"].items() if s}
        rows["limit: the link, once"] = 0.0 if link == "full" else mib * 2**20 * 8 / SLOW_MBIT / 1e6
        tables.append(pd.Series(rows, name=link))
        for node in cluster.nodes:
            cluster.run("sh", "-c", f"rm -rf /tmp/forge-{os.getuid()}", machine=node)
    cluster.run("scancel", job)
    print(f"{mib} MiB of token ids in {NUM_SHARDS} shards, {NODES} nodes, one machine")
    print(pd.concat(tables, axis=1).to_string(float_format="{:,.2f}".format))


def write_run(folder: Path, mib: int) -> Path:
    """Shards of token ids that are as frequent as words (Zipf), and the run's config.json."""
    shutil.rmtree(folder, ignore_errors=True)
    values = {"results": str(folder / "results"), "data": str(folder / "data"), "run": "bench"}
    ids = Ids(tokenizer="a" * 12, tokens="b" * 12)
    config = resolve(load_config("/dev/null", {**values, "ids": ids}))
    target = tokens_folder(config.data, ids.tokens)
    target.mkdir(parents=True)
    frequency = 1 / (np.arange(VOCAB) + 10)
    steps = np.cumsum(frequency / frequency.sum())
    rng = np.random.default_rng(0)
    entries = []
    for number in range(NUM_SHARDS + 1):
        size = mib * 2**20 // 2 // NUM_SHARDS if number else 2**16
        path = target / f"{'train' if number else 'val'}-00000-{number:03d}.bin"
        tokens = np.searchsorted(steps, rng.random(size, dtype=np.float32)).clip(max=VOCAB - 1)
        tokens.astype("<u2").tofile(path)
        digest = digest_file(path)
        entries.append(ShardEntry(file=path.name, tokens=size, documents=1, digest=digest))
    splits: Any = {"val": entries[:1], "train": entries[1:]}
    manifest = ShardManifest(
        **{"id": "b" * 12, "dtype": "uint16", "vocab_size": VOCAB, "eos_id": 0, "settings": {}},
        **{"tokenizer_id": "a" * 12, "tokenizer_digest": "c" * 64, "inputs": []},
        **{"splits": splits, "totals": {name: Total.of(found) for name, found in splits.items()}},
    )
    manifest.write(target / "manifest.json")
    write_json(RunPaths.of(config).config, config.to_json())
    return RunPaths.of(config).config


# --- on its login node -----------------------------------------------------------------------------


def compare(run: Path) -> dict[str, float]:
    """Seconds of each way to bring the shards to all nodes of this job."""
    source = ShardSet.open(next((run.parents[1] / "data" / "tokens").iterdir()))
    shards = source.members
    archives = run / "archives"
    one = archives / "one" / "all.tar"
    one.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(one, "w") as tar:
        for shard in shards:
            tar.add(shard.path, shard.name)
    chunks = make_archive(archives / "chunks", shards)
    small = make_archive(archives / "zstd", shards, compress=True)
    job = slurm.this_job()
    assert job
    rows = {}
    with Broadcast(job.id, job.nodes) as broadcast:

        def by_itself(*options: str, file: Path = one) -> None:
            target = f"/tmp/{file.name}"
            subprocess.run(["sbcast", "--force", *options, str(file), target], check=True)

        def one_by_one() -> None:
            for shard in shards:
                by_itself(file=shard.path)

        def all_at_once(files: list[Path]) -> None:
            for _ in broadcast.send(files, "/tmp"):
                pass

        def archive(of: Archive) -> list[Path]:
            return [of.folder / name for name in of.chunks]

        ways: dict[str, Callable[[], None]] = {
            "one file, as sbcast does it": by_itself,
            "one file, lz4": lambda: by_itself("--compress=lz4"),
            "one file, fan-out 2": lambda: by_itself("--fanout=2"),
            "the shards, one by one": one_by_one,
            "the shards, 8 at once": lambda: all_at_once([shard.path for shard in shards]),
            f"{len(chunks.chunks)} chunks, 8 at once (Forge)": lambda: all_at_once(archive(chunks)),
            "the same, zstd (Forge, slow links)": lambda: all_at_once(archive(small)),
        }
        for what, way in ways.items():
            with timed(rows, what):
                way()
    with timed(rows, "limit: unpacking on one node"):
        slurm.output_on(job.id, job.nodes[0], ["tar", "-C", "/tmp", "-xf", f"/tmp/{one.name}"])
    for node in job.nodes:
        slurm.output_on(job.id, node, ["sh", "-c", "rm -f /tmp/*.tar /tmp/*.bin /tmp/*.zst"])
    return rows


@contextmanager
def timed(rows: dict[str, float], what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    rows[what] = time.perf_counter() - started


if __name__ == "__main__":
    main()
