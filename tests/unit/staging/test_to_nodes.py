"""A node of an allocation gets shards or inputs as an archive. Here its process runs on this host, and
a copy stands for sbcast; tests/slurm/test_staging.py does it with real ones."""

import os
import shutil
import sys
from functools import partial

import pytest
from support import inputs
from support.shards import make

from forge.core.config import Config
from forge.core.errors import DataError, UnfitError
from forge.core.machine import load_machine
from forge.core.paths import inputs_folder
from forge.core.process import hostname
from forge.data.inputs import InputSet
from forge.hosts.nodes import NodePool
from forge.hosts.placement import Placement
from forge.slurm.slurm import Job
from forge.staging import to_nodes
from forge.staging.to_nodes import stage_nodes

JOB = Job("7", "RUNNING", 0, ("n1",), 1, "partition", "forge", True, None)


class Copies:
    """As Broadcast: puts the files into a folder, here one of this host."""

    def __init__(self, job_id, hosts):
        assert (job_id, hosts) == ("7", ["n1"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def send(self, files, folder):
        for file in files:
            shutil.copy(file, folder)
            yield file.name


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """stage(source, config, keep=True): the record of staging these files on the node n1."""
    monkeypatch.setattr(NodePool, "_command", lambda *_: [sys.executable, "-m", "forge.node_agent"])
    monkeypatch.setattr(to_nodes, "Broadcast", Copies)

    def run(source, config, hosts=("n1",), **keys):
        folder = {"folder": str(tmp_path / "node"), "mode": "always"}
        machine = load_machine(None, {f"stage.{key}": v for key, v in {**folder, **keys}.items()})
        return stage_nodes(source, config, machine, Placement(hosts, JOB), min_nodes=1)

    return run


@pytest.fixture
def staged(tmp_path, stage):
    """staged(keep=True): the record of staging the shards of tmp_path/shards on the node n1."""
    return partial(stage, make(tmp_path / "shards"), Config(data=str(tmp_path / "data")))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "node" / f"forge-{os.getuid()}"


def test_node_gets_the_shards_into_the_folder_of_its_job(staged, root, tmp_path):
    record = staged()
    folder = root / "job-7" / record.digest[:32]
    assert (record.folders, record.sent) == ({"n1": str(folder)}, ["n1"])
    assert (record.job, record.roots) == ("7", {"n1": str(root)})
    assert set(record.phase_sec) == {"archive", "send", "verify"}
    for file in (tmp_path / "shards").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, "used-by-base"]


def test_node_that_has_the_shards_gets_nothing(staged):
    first = staged()
    assert staged() == first.model_copy(update={"sent": [], "phase_sec": {}})


def test_last_node_that_lacks_the_shards_and_fails_is_left_out(
    staged, tmp_path, monkeypatch, capsys
):
    def command(_, host):
        return ["env", f"SLURM_TMPDIR={tmp_path / host}", sys.executable, "-m", "forge.node_agent"]

    monkeypatch.setattr(NodePool, "_command", command)
    first = staged(folder=None)
    root = tmp_path / "n2" / f"forge-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True)
    (root / "job-7").mkdir()
    (root / f"job-7/writing-{hostname()}-{os.getpid()}").touch()  # where a directory shall be
    record = staged(hosts=("n1", "n2"), folder=None)
    assert (record.folders, record.sent) == (first.folders, [])
    assert "stage: continuing without n2: staging failed on node n2" in capsys.readouterr().err


def test_kept_shards_lie_outside_of_the_jobs_folder_and_are_not_to_be_removed(staged, root):
    record = staged(keep=True)
    assert (record.folders, record.roots) == ({"n1": str(root / record.digest[:32])}, {})
    assert not (root / "job-7").exists()


def test_shared_folder_is_read_in_place_where_staging_is_off(staged, tmp_path):
    record = staged(mode="never")
    assert (record.folders, record.sent) == ({"n1": str(tmp_path / "shards")}, [])


def test_node_in_trouble_is_named_and_nothing_is_left_on_it(staged, root, monkeypatch):
    monkeypatch.setattr(to_nodes, "SPARE_BYTES", 2**60)
    with pytest.raises(
        UnfitError, match=r"staging failed on node n1: .* the shards and their archive"
    ):
        staged()
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("link_mbit", [0, 1000], ids=["plain", "compressed"])
def test_node_gets_the_inputs_of_a_program_with_their_directories(
    stage, root, tmp_path, monkeypatch, link_mbit
):
    config = inputs.make(tmp_path, monkeypatch)
    source = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    monkeypatch.setattr(to_nodes, "is_slower", lambda *_: link_mbit > 0)
    record = stage(source, config)
    folder = root / "job-7" / record.digest[:32]
    assert (record.folders, record.sent) == ({"n1": str(folder)}, ["n1"])
    assert inputs.content(folder) == inputs.CONTENT
    assert not (folder / "data/linked.csv").is_symlink()
    assert stage(source, config).sent == []


def test_input_that_has_changed_is_named_before_anything_is_sent(
    stage, root, tmp_path, monkeypatch
):
    config = inputs.make(tmp_path, monkeypatch)
    source = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    (tmp_path / "in/train.csv").write_text("9,z\n")
    with pytest.raises(DataError, match=r"in/train\.csv has digest"):
        stage(source, config)
    assert not list(root.iterdir()) and not list((tmp_path / "made/archives").glob("*/*"))


def test_archive_that_lies_there_ready_is_not_sent(staged, root, tmp_path):
    record = staged()
    own = next((tmp_path / "data/archives").glob("*/*"))
    assert own.parent.name == f"forge-{os.getuid()}" and own.parent.stat().st_mode & 0o77 == 0
    shutil.rmtree(root)
    planted = tmp_path / "data/archives" / own.name
    own.rename(planted)
    (planted / "000.tar").write_bytes(b"not mine")
    assert staged().sent == ["n1"]
    assert (root / "job-7" / record.digest[:32] / "manifest.json").exists()


@pytest.mark.parametrize("planted", ["link", "open to all"])
def test_folder_of_archives_that_another_could_write_is_refused(staged, tmp_path, planted):
    folder = tmp_path / f"data/archives/forge-{os.getuid()}"
    folder.parent.mkdir(parents=True)
    if planted == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(UnfitError, match=f"{folder} (is not a folder|has mode 777)"):
        staged()
