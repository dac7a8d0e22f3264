"""Which rank verifies which shard at a start: each file that is read is verified by one rank that reads
the same file, and one on a disk of its own by a rank of that node."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.shards import make

from forge.core import file_list, files
from forge.core.errors import DataError, DiskFull
from forge.data import copy_stamp
from forge.data.copy_stamp import CopyStamp
from forge.data.shards import ShardSet
from forge.launch.process_group import PeerFailed, World
from forge.launch.rank_records import TrainTask
from forge.trainer import shard_check

SHARDS = {"train-00000-000.bin", "train-00000-001.bin", "train-00000-002.bin", "val-00000-000.bin"}
NFS = "36 35 {} / /data rw shared:1 - {} {} rw,vers=4.2\n"


class Gathered(Exception):
    """Ends the first part of a rank, when the others would have to be asked."""


class Launch:
    """Ranks, one after another, on nodes that mount the file system of these files as `kind`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, task: TrainTask, kind: str) -> None:
        self._patch, self._task, self._kind = monkeypatch, task, kind
        self.read: dict[int, Counter[str]] = {}  # rank -> files digested
        self.boot = 1
        self._failed = False

    def verify(self, nodes: list[str]) -> list[ShardSet | DataError | PeerFailed]:
        """What each rank gets. nodes: of each rank."""
        table: list[object] = [self._rank(nodes, rank, None) for rank in range(len(nodes))]
        self._failed = False
        # The last first: those that leave stamps end when the others of their node have.
        outcomes = [self._rank(nodes, rank, table) for rank in reversed(range(len(nodes)))]
        return outcomes[::-1]

    def _rank(self, nodes: list[str], rank: int, table: list[object] | None):
        """What the rank gives to the table of all; with the table, what it gets."""
        read: Counter[str] = Counter()
        self._on(nodes[rank], read)

        def gathered(own: object, *_: object) -> list[object]:
            if table is None:
                raise Gathered(own)
            return table

        world: World = SimpleNamespace(
            rank=SimpleNamespace(rank=rank, is_main=rank == 0),
            gather_objects=gathered,
            patiently=self._patiently,
        )  # type: ignore[assignment]
        try:
            outcome = shard_check.verified_tokens(self._task, world)
        except (DataError, PeerFailed) as err:
            outcome = err
        except Gathered as given:
            return given.args[0]
        self.read[rank] = read
        return outcome

    def _patiently(self, action: Callable[[], object], what: str) -> object:
        """Fail where this or another rank has failed to verify."""
        try:
            outcome = action()
        except DataError:
            self._failed = True
            raise
        if self._failed and outcome is None:
            raise PeerFailed(what)
        return outcome

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
        for module in (files, copy_stamp):
            self._patch.setattr(module, "boot_id", lambda: f"boot {self.boot} of {node}")
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
        copies = {node: str(copied(shared, tmp_path / node)) for node in staged}
        task = TrainTask(step=0, started=0.0, staged=copies, shared=str(shared))
        return Launch(monkeypatch, task, kind)

    (tmp_path / "shared").mkdir()
    return launched


def copied(shared: Path, disk: Path) -> Path:
    """A copy in the user's private directory on the disk of a node."""
    root = disk / f"forge-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True)
    shutil.copytree(shared, root / "copy").chmod(0o700)
    return root / "copy"


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
    assert all(Path(path).parent.name == "copy" for read in own for path in read)
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


# --- copies that ranks of the same job have verified --------------------------------------------------

NODES = ["node0", "node0", "node1", "node1"]


@pytest.fixture
def restarted(launch, monkeypatch, capsys):
    """A launch in job 7 on two nodes with a copy each, all of which its ranks have verified."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    started = launch("ext4", "node0", "node1")
    started.verify(NODES)
    assert sum(map(names, started.read.values()), Counter()) == Counter([*SHARDS, *SHARDS])
    assert capsys.readouterr().err == ""
    return started


def read_by_node(started: Launch) -> list[int]:
    reads = [started.read[rank].total() for rank in range(4)]
    return [sum(reads[:2]), sum(reads[2:])]


def test_copies_that_ranks_of_the_job_have_verified_are_not_read_again_and_the_log_says_so(
    restarted, capsys
):
    restarted.verify(NODES)
    assert read_by_node(restarted) == [0, 0]
    [said] = capsys.readouterr().err.splitlines()
    assert said == (
        "2 of 2 copies of the shards are not verified again: ranks of job 7 have done so in this boot of"
        " their nodes, and no file has changed"
    )


def test_another_job_or_a_reboot_verifies_all_copies(restarted, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    restarted.verify(NODES)
    assert read_by_node(restarted) == [4, 4]
    restarted.boot = 2
    restarted.verify(NODES)
    assert read_by_node(restarted) == [4, 4]
    assert capsys.readouterr().err == ""


def test_byte_that_was_flipped_between_two_launches_is_found_and_the_other_copy_not_read(
    restarted, capsys
):
    path = Path(restarted._task.staged["node1"]) / "train-00000-001.bin"
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    outcomes = restarted.verify(NODES)
    assert read_by_node(restarted)[0] == 0
    [error] = [outcome for outcome in outcomes if isinstance(outcome, DataError)]
    assert error.what.startswith(f"{path} has digest ")
    assert "1 of 2 copies of the shards are not" in capsys.readouterr().err
    again = restarted.verify(NODES)  # the copy that was found corrupt has no new stamp
    assert str(error) in map(str, again)


def test_shared_directory_is_verified_at_every_launch(launch, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    started = launch()
    for _ in range(2):
        started.verify(NODES)
        assert read_by_node(started) == [2, 2]
    assert not list(Path(started._task.shared).glob(".stamp*"))


def test_ranks_that_see_the_stamp_of_another_run_only_in_part_all_read(restarted, monkeypatch):
    """Else some would read their shares alone, and nobody the rest."""
    looks = iter([True, False, True, True])
    monkeypatch.setattr(CopyStamp, "is_there", property(lambda _: next(looks, True)))
    restarted.verify(NODES)
    assert read_by_node(restarted) == [4, 0]


def test_copy_on_a_disk_that_takes_no_stamp_is_read_at_each_launch(launch, monkeypatch):
    def full(*_: object) -> None:
        raise DiskFull("cannot write .stamp.json: No space left on device")

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(copy_stamp, "write_json", full)
    started = launch("ext4", "node0", "node1")
    for _ in range(2):
        assert not [one for one in started.verify(NODES) if isinstance(one, DataError)]
        assert read_by_node(started) == [4, 4]


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
