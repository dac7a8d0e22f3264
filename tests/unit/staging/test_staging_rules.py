"""What decides where a node reads: never a set that changed, never a file system that is too slow."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from support.shards import make

from forge.core.errors import DataError
from forge.data.shards import ShardSet
from forge.hosts.nodes import NodeFailure, NodesFailed
from forge.slurm import slurm
from forge.staging import on_node, sbcast
from forge.staging.sbcast import COMPRESS_SHARDS_BELOW, Broadcast, blame, is_slower


@pytest.fixture
def shards(tmp_path):
    return make(tmp_path / "shards")


@pytest.fixture
def verified(monkeypatch):
    """Folders whose bytes were read, in order."""
    seen = []
    real = ShardSet.verify
    monkeypatch.setattr(ShardSet, "verify", lambda set_: (seen.append(set_.folder), real(set_)))
    return seen


def test_untouched_set_is_not_read_again(shards, verified):
    assert on_node.is_complete("shards", shards.folder, shards.digest)
    assert on_node.is_complete("shards", shards.folder, shards.digest)
    assert verified == [shards.folder]


def test_touched_set_is_read_again(shards, verified):
    assert on_node.is_complete("shards", shards.folder, shards.digest)
    path = shards.train[0].path
    before = path.stat()
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as cp -p and rsync do
    with pytest.raises(DataError, match="train-00000-000"):
        on_node.is_complete("shards", shards.folder, shards.digest)


def test_set_is_read_again_after_a_boot(shards, verified, monkeypatch):
    assert on_node.is_complete("shards", shards.folder, shards.digest)
    real = Path.read_text

    def read_text(path, *args, **options):
        return "other" if path.name == "boot_id" else real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert on_node.is_complete("shards", shards.folder, shards.digest)
    assert len(verified) == 2


def test_set_with_another_digest_is_not_ours(shards, verified):
    assert not on_node.is_complete("shards", shards.folder, "0" * 64)
    assert not on_node.is_complete("shards", shards.folder.with_name("nothing"), shards.digest)
    assert verified == []


@pytest.mark.parametrize(
    ("reads", "rate", "enough"),
    [(1000, 500, True), (999, 5000, False), (9000, 499, False)],
)
def test_shared_file_system_is_read_in_place_if_it_is_fast(
    shards, monkeypatch, reads, rate, enough
):
    monkeypatch.setattr(on_node, "_measure", lambda _: (reads, rate))
    elsewhere = Path("/proc")  # another file system
    verdict = partial(on_node.shared_verdict, "shards", shards.folder, shards.digest, elsewhere)
    found, why = verdict("auto", goes_away=True)
    assert found == enough
    assert f"{reads} random reads/s and {rate} MiB/s, required are 1000 and 500" in why
    # However slow it is.
    in_place, why = verdict("auto", goes_away=False)
    assert (in_place, why) == (True, "outside of a Slurm job nothing would remove a copy")
    assert verdict("always", goes_away=False)[0] is False


def test_speed_is_measured_on_the_files_themselves(shards):
    reads, rate = on_node._measure(shards.members)
    assert reads > 0 and rate > 0


def test_shared_folder_with_other_or_no_shards_is_never_read(shards, tmp_path):
    verdict = partial(on_node.shared_verdict, "shards", goes_away=True)
    for mode in ("auto", "never"):
        assert verdict(shards.folder, "0" * 64, tmp_path, mode)[0] is False
        assert verdict(tmp_path / "none", shards.digest, tmp_path, mode)[0] is False
    assert verdict(shards.folder, shards.digest, tmp_path, "always")[0] is False
    assert verdict(shards.folder, shards.digest, tmp_path, "never")[0] is True


def test_set_that_came_meanwhile_is_kept(shards, tmp_path):
    """Another run of the job was faster: its ranks may read the folder already."""
    place = tmp_path / "root" / "set"
    shutil.copytree(shards.folder, place)
    inode = (place / "manifest.json").stat().st_ino
    temporary = tmp_path / "root" / "writing"
    shutil.copytree(shards.folder, temporary)
    (temporary / "chunks").mkdir()
    on_node.finish(kind="shards", temporary=str(temporary), folder=str(place), digest=shards.digest)
    assert (place / "manifest.json").stat().st_ino == inode
    assert not temporary.exists()


def test_set_that_arrived_corrupt_is_refused_and_removed(shards, tmp_path):
    temporary = tmp_path / "root" / "writing"
    shutil.copytree(shards.folder, temporary)
    (temporary / "chunks").mkdir()
    (temporary / "val-00000-000.bin").write_bytes(b"\1" * 1200)
    place = tmp_path / "root" / "set"
    with pytest.raises(DataError, match="val-00000-000"):
        on_node.finish(
            kind="shards", temporary=str(temporary), folder=str(place), digest=shards.digest
        )
    assert list(tmp_path.glob("root/*")) == []


def test_slow_links_are_those_of_a_known_speed_below_the_limit():
    assert is_slower([10000, 1000], COMPRESS_SHARDS_BELOW)
    assert not is_slower([10000, 0], COMPRESS_SHARDS_BELOW)
    assert not is_slower([], COMPRESS_SHARDS_BELOW)


def test_nodes_are_read_from_what_sbcast_prints():
    said = (
        "sbcast: error: REQUEST_FILE_BCAST(node03): Unspecified error\n"
        "sbcast: error: REQUEST_FILE_BCAST(node[04-05]): No such file or directory\n"
    )
    hosts = ["node02", "node03", "node04", "node05"]
    assert blame(said, hosts) == {
        "node03": NodeFailure("sbcast: Unspecified error"),
        "node04": NodeFailure("sbcast: No such file or directory"),
        "node05": NodeFailure("sbcast: No such file or directory"),
    }
    lost = "sbcast: error: Slurm job 17.99 lookup error: Invalid job id specified"
    assert blame(lost, hosts) == dict.fromkeys(hosts, NodeFailure(lost))


NO_STEP = "srun: error: Unable to create step for job 7: Memory required by task is not available"
STARTS = (
    'export SLURM_STEP_ID=5; while [ "${1#-}" != "$1" ]; do shift; done\n'
    "echo 'srun: warning: can run on all of them'; echo 'Welcome to node 12'; exec \"$@\""
)


@pytest.fixture
def slurm_that(tmp_path, monkeypatch):
    """slurm_that(srun="exit 1"): Slurm's commands are these scripts; later starts of srun are STARTS."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)

    def write(**scripts):
        first = f"[ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; {scripts['srun']}; }}\n"
        for name, script in {**scripts, "srun": first + STARTS}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return write


def test_step_of_sbcast_is_started_again_while_slurm_itself_starts_none(slurm_that, monkeypatch):
    slurm_that(srun=f"echo '{NO_STEP}'; exit 1")
    with Broadcast("7", ["n1"]) as broadcast:
        assert broadcast._step_id == "5"
    slurm_that(srun=f"rm $(dirname $0)/up; echo '{NO_STEP}'; exit 1")
    (Path(os.environ["PATH"].split(":")[0]) / "up").unlink()
    monkeypatch.setattr(slurm, "PATIENCE_SEC", -1)
    with pytest.raises(slurm.SlurmSilent, match="Memory required"), Broadcast("7", ["n1"]):
        pass


def test_step_of_sbcast_is_found_behind_what_a_site_and_srun_print(slurm_that):
    slurm_that(srun="true")
    with Broadcast("7", ["n1"]) as broadcast:
        assert broadcast._step_id == "5"


def test_step_of_sbcast_that_does_not_start_shows_all_that_was_printed(slurm_that):
    said = "echo Welcome; echo 'srun: error: Task launch failed on node n1' >&2; exit 1"
    slurm_that(srun=said, scontrol="exit 0")
    error = r"starting sbcast failed on node n1: Welcome\nsrun: error: Task launch failed"
    with pytest.raises(NodesFailed, match=error), Broadcast("7", ["n1"]):
        pass


def test_controller_that_is_away_while_sbcast_starts_is_waited_for(slurm_that, monkeypatch):
    monkeypatch.setattr(sbcast, "START_SEC", 2)
    monkeypatch.setattr(sbcast, "END_SEC", 0.1)
    away = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    slurm_that(srun="exec sleep 60", scontrol=away, squeue="exit 0")
    with Broadcast("7", ["n1"]) as broadcast:
        assert broadcast._step_id == "5"
