"""Which rank verifies which shard at a start: each file that is read is verified by one rank that reads
the same file, and one on a disk of its own by a rank of that node."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.shards import make

from forge.core import file_list, files
from forge.core.errors import DataError
from forge.data.shards import ShardSet
from forge.launch.process_group import World
from forge.launch.rank_records import TrainTask
from forge.trainer import shard_check

SHARDS = {"train-00000-000.bin", "train-00000-001.bin", "train-00000-002.bin", "val-00000-000.bin"}
NFS = "36 35 {} / /data rw shared:1 - {} {} rw,vers=4.2\n"


class Launch:
    """Ranks, one after another, on nodes that mount the file system of these files as `kind`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, task: TrainTask, kind: str) -> None:
        self._patch, self._task, self._kind = monkeypatch, task, kind
        self.read: dict[int, Counter[str]] = {}  # rank -> files digested

    def verify(self, nodes: list[str]) -> list[ShardSet | DataError]:
        """What each rank gets. nodes: of each rank."""
        identities = [self._rank(nodes, rank, None)[1] for rank in range(len(nodes))]
        return [self._rank(nodes, rank, identities)[0] for rank in range(len(nodes))]

    def _rank(self, nodes: list[str], rank: int, identities: list[str] | None):
        seen, read = [], Counter()
        self._on(nodes[rank], read)

        def gathered(own: str, *_: object) -> list[str]:
            seen.append(own)
            return identities or [own if number == rank else "" for number in range(len(nodes))]

        world: World = SimpleNamespace(
            rank=SimpleNamespace(rank=rank),
            gather_objects=gathered,
            patiently=lambda action, _: action(),
        )  # type: ignore[assignment]
        try:
            outcome = shard_check.verified_tokens(self._task, world)
        except DataError as err:
            outcome = err
        if identities:
            self.read[rank] = read
        return outcome, seen[0]

    def _on(self, node: str, read: Counter[str]) -> None:
        digest = files.digest_file
        device = Path(self._task.shared).stat().st_dev
        mounts = NFS.format(f"{os.major(device)}:{os.minor(device)}", self._kind, "nas:/data")
        read_text = Path.read_text
        self._patch.setattr(
            Path,
            "read_text",
            lambda p, *a, **k: mounts if p.name == "mountinfo" else read_text(p, *a, **k),
        )
        self._patch.setattr(files, "boot_id", lambda: f"boot of {node}")
        self._patch.setattr("forge.launch.rank_records.hostname", lambda: node)

        def counted(path: Path) -> str:
            read[str(path)] += 1
            return digest(path)

        self._patch.setattr(file_list, "digest_file", counted)


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(kind, staged): see Launch; staged: nodes with a copy on a disk of their own."""

    def launched(kind: str = "nfs4", *staged: str) -> Launch:
        shared = make(tmp_path / "shared").folder
        copies = {node: str(shutil.copytree(shared, tmp_path / node)) for node in staged}
        task = TrainTask(step=0, started=0.0, staged=copies, shared=str(shared))
        return Launch(monkeypatch, task, kind)

    (tmp_path / "shared").mkdir()
    return launched


def names(read: Counter[str]) -> Counter[str]:
    return Counter({Path(path).name: times for path, times in read.items()})


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7])
def test_shared_shards_are_read_once_over_all_nodes(launch, num_nodes):
    started = launch()
    started.verify([f"node{number}" for number in range(num_nodes)])
    assert sum(started.read.values(), Counter()).keys() == {
        f"{started._task.shared}/{name}" for name in SHARDS
    }
    assert set(sum(started.read.values(), Counter()).values()) == {1}
    sizes = [read.total() for read in started.read.values()]
    assert max(sizes) - min(sizes) <= 1


def test_every_node_reads_its_own_copy_once_and_the_others_share(launch):
    started = launch("nfs4", "node0")
    nodes = ["node0", "node0", "node1", "node1", "node2", "node2"]
    started.verify(nodes)
    own = [started.read[0], started.read[1]]
    assert sum(map(names, own), Counter()) == Counter(SHARDS)
    assert all(Path(path).parent.name == "node0" for read in own for path in read)
    others = sum((started.read[rank] for rank in range(2, 6)), Counter())
    assert names(others) == Counter(SHARDS)
    assert {Path(path).parent.name for path in others} == {"shared"}


@pytest.mark.parametrize("kind", ["ext4", "overlay", "fuse.unknown"])
def test_directory_that_may_be_on_a_disk_of_each_node_is_read_by_each(launch, kind):
    started = launch(kind)
    started.verify(["node0", "node0", "node1"])
    assert names(started.read[0]) + names(started.read[1]) == Counter(SHARDS)
    assert names(started.read[2]) == Counter(SHARDS)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("bad", sorted(SHARDS))
def test_corrupt_shard_is_found_in_the_share_of_any_rank(launch, num_ranks, bad):
    started = launch()
    path = Path(started._task.shared) / bad
    path.write_bytes(bytes([9]) * path.stat().st_size)
    with pytest.raises(DataError) as of_all:
        ShardSet.open(path.parent).verify()
    outcomes = started.verify([f"node{number}" for number in range(num_ranks)])
    errors = [outcome for outcome in outcomes if isinstance(outcome, DataError)]
    assert [str(error) for error in errors] == [str(of_all.value)]


# --- the identity of files ------------------------------------------------------------------------


def test_copies_are_not_the_same_files_and_a_changed_file_is_another(tmp_path):
    file, copy = tmp_path / "a", tmp_path / "b"
    file.write_text("tokens")
    shutil.copy2(file, copy)
    before = files.identity_of([file])
    assert files.identity_of([file]) == before != files.identity_of([copy])
    file.write_text("nekots")
    assert files.identity_of([file]) != before


def test_device_of_a_shared_file_system_is_found_in_mountinfo(monkeypatch):
    text = NFS.format("0:52", "nfs4", "nas:/data") + NFS.format("8:1", "ext4", "/dev/sda1")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert files._shared_file_systems() == {os.makedev(0, 52): "nfs4 nas:/data"}
