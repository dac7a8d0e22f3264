"""What `stage.project` puts on nodes. Here its scripts run on this host, and a copy stands for sbcast;
tests/slurm/test_staging.py does it with real ones."""

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from forge.cluster.placement import Placement
from forge.cluster.slurm import Job
from forge.core.config import Config, checked
from forge.core.machine import load_machine
from forge.staging import environment

JOB = Job("7", "RUNNING", 0, ("n1", "n2"), 1, "partition", "forge", True, None)
PLACEMENT = Placement(("n1", "n2"), JOB)


def on_this_host(placement, script, arguments, *_):
    """As `_on_each`, in the locale of a plain node."""
    command = ["sh", "-c", script, "sh", *arguments]
    environ = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return dict.fromkeys(placement.hosts, done.stdout)


def send(placement, archive, root):
    """As `_send`."""
    temporary = Path(root) / f"job-{placement.job.id}" / "writing-project"
    shutil.copytree(
        archive.folder, temporary / "chunks", ignore=lambda *_: ["archive.json"], dirs_exist_ok=True
    )
    return str(temporary)


@pytest.fixture
def put(tmp_path, monkeypatch):
    """As `_put`, on a single node."""
    monkeypatch.setattr(environment, "_on_each", on_this_host)
    monkeypatch.setattr(environment, "_send", send)
    stage = load_machine(None, {"stage.folder": str(tmp_path / "node")}).stage
    return partial(environment._put, tmp_path / "archives", stage, PLACEMENT.only(["n1"]))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for name in ("train.py", "my code/größe.py", ".env", "a.pem", ".git/HEAD", "results/p/big.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "elsewhere.py").write_text("elsewhere")
    (folder / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    return folder


def put_source(put, source):
    members = list(environment._source(source, [str(source / "results")]))
    return Path(put("source", members, ready=environment.SOURCE_READY)) / "source"


def test_source_arrives_without_keys_and_outputs_and_with_files_in_place_of_links(put, source):
    copy = put_source(put, source)
    found = {str(path.relative_to(copy)): path for path in copy.rglob("*") if path.is_file()}
    assert set(found) == {"train.py", "my code/größe.py", "linked.py"}
    assert found["linked.py"].read_text() == "elsewhere" and not found["linked.py"].is_symlink()
    assert copy.parent.parent.name == "job-7"


def test_source_that_has_changed_gets_another_directory(put, source):
    first = put_source(put, source)
    assert put_source(put, source) == first
    (source / "train.py").write_text("changed")
    assert (put_source(put, source) / "train.py").read_text() == "changed"
    assert (first / "train.py").read_text() == "train.py"


def test_source_without_files_is_a_directory_to_run_in(put, tmp_path):
    (tmp_path / "empty").mkdir()
    assert put_source(put, tmp_path / "empty").is_dir()


@pytest.mark.parametrize("keep", [False, True])
def test_project_is_marked_as_used_by_the_run_unless_it_is_kept(
    source, tmp_path, monkeypatch, keep
):
    root = tmp_path / "node"
    jobs = root if keep else root / "job-7"
    sent = []

    def put(*given, **_):
        sent.append(given[3])
        return f"{jobs}/{given[3]}"

    monkeypatch.setattr(environment, "_on_each", on_this_host)
    monkeypatch.setattr(environment, "_put", put)
    values = {"run": "mine", "program": {"command": ["x"], "source": str(source)}}
    machine = load_machine(None, {"stage.keep": keep})
    project = environment.stage_project(checked(Config, values, "config"), machine, PLACEMENT)
    assert sent == ["python", "project", "source"]
    assert (project.python, project.source) == (f"{jobs}/project/python", f"{jobs}/source/source")
    assert project.roots == ({} if keep else dict.fromkeys(("n1", "n2"), str(root)))
    assert (root / "job-7/used-by-mine").exists() != keep
    environment.stage_project(Config(), machine, PLACEMENT)
    assert sent[3:] == ["python", "project"]
