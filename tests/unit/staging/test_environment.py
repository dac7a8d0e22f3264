"""What `stage.project` puts on nodes. Here its scripts run on this host, and a copy stands for sbcast;
tests/slurm/test_staging.py does it with real ones."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache, partial
from pathlib import Path

import pytest

import forge
from forge.core.config import Config, checked
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.data.inputs import source_digest
from forge.hosts.placement import Placement
from forge.slurm.slurm import Job
from forge.staging import environment
from forge.staging.environment import EnvironmentPart

JOB = Job("7", "RUNNING", 0, ("n1", "n2"), 1, "partition", "forge", True, None)
PLACEMENT = Placement(("n1", "n2"), JOB)
# Tens of thousands of files, which are listed once.
python_of_this_host = cache(environment._python)


def on_this_host(placement, script, arguments, *_):
    """As `_on_each`, in the locale of a plain node."""
    command = ["sh", "-c", script, "sh", *arguments]
    environ = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return dict.fromkeys(placement.hosts, done.stdout)


def send(placement, archive, temporary):
    """As `_send`."""
    chunks = Path(temporary, "chunks")
    shutil.copytree(archive.folder, chunks, ignore=lambda *_: ["archive.json"], dirs_exist_ok=True)


@pytest.fixture
def put(tmp_path, monkeypatch):
    """As `_put`, on a single node."""
    monkeypatch.setattr(environment, "_on_each", on_this_host)
    monkeypatch.setattr(environment, "_send", send)
    stage = load_machine(None, {"stage.folder": str(tmp_path / "node")}).stage
    return partial(environment._put, tmp_path / "data", stage, PLACEMENT.only(["n1"]))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for name in ("train.py", "my code/größe.py", ".env", "a.pem", ".git/HEAD", "results/p/big.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "elsewhere.py").write_text("elsewhere")
    (folder / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    return folder


def put_source(put, source, blind=("n1",)):
    part = environment._source(source, [str(source / "results")])
    return Path(put(part, blind)) / "source"


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


def test_archive_of_the_source_that_was_put_there_by_another_does_not_run(put, source, tmp_path):
    first = put_source(put, source)
    archive = next((tmp_path / "data/archives").glob("*/*"))
    evil = tmp_path / "train.py"
    evil.write_text("evil")
    with tarfile.open(archive / "001.tar", "w") as tar:
        tar.add(evil, "source/train.py")
    facts = json.loads((archive / "archive.json").read_text())
    digest = hashlib.sha256((archive / "001.tar").read_bytes()).hexdigest()
    facts["digests"]["001.tar"], facts["states"]["001.tar"][0] = digest, 10240
    (archive / "archive.json").write_text(json.dumps(facts))
    shutil.rmtree(first.parent)
    assert (put_source(put, source) / "train.py").read_text() == "train.py"


def test_source_without_files_is_a_directory_to_run_in(put, tmp_path):
    (tmp_path / "empty").mkdir()
    assert put_source(put, tmp_path / "empty").is_dir()


def test_node_that_sees_the_source_has_a_link_in_place_of_a_copy(put, source):
    link = put_source(put, source, blind=[])
    assert link.is_symlink() and link.resolve() == source
    assert put_source(put, source, blind=[]) == link
    assert put_source(put, source) == link  # the node has lost sight of it
    assert not link.is_symlink() and (link / "train.py").read_text() == "train.py"
    assert put_source(put, source, blind=[]) == link and not link.is_symlink()  # good, too


def test_link_that_leads_nowhere_is_replaced(put, source):
    link = put_source(put, source, blind=[])
    link.unlink()
    link.symlink_to("/nowhere")
    assert put_source(put, source, blind=[]).resolve() == source


@pytest.mark.parametrize("blind", [["n1"], []], ids=["copy", "link"])
def test_what_another_run_has_put_there_meanwhile_stays(put, source, monkeypatch, blind):
    copy = put_source(put, source, blind)
    (copy.parent / "mark").touch()
    root = str(copy.parents[2])
    monkeypatch.setattr(environment, "_look", lambda *_: {"n1": [root, str(2**40), "lacks"]})
    assert put_source(put, source, blind) == copy
    assert {path.name for path in copy.parent.iterdir()} == {"source", "mark"}
    assert list(copy.parent.parent.iterdir()) == [copy.parent]


def test_runs_of_two_hosts_that_stage_at_once_do_not_write_into_one_directory(
    put, source, monkeypatch
):
    def send_and_let_another_stage(*given):
        send(*given)
        monkeypatch.setattr(environment, "_send", send)
        monkeypatch.setattr(environment, "hostname", lambda: "other")
        put_source(put, source)

    monkeypatch.setattr(environment, "_send", send_and_let_another_stage)
    copy = put_source(put, source)
    assert (copy / "train.py").read_text() == "train.py"
    assert list(copy.parent.iterdir()) == [copy]
    assert list(copy.parent.parent.iterdir()) == [copy.parent]


def test_project_gets_another_directory_for_another_python(put, source):
    part = environment._source(source, [])
    first = put(part, ["n1"], python="/node/job-7/python-a")
    assert put(part, ["n1"], python="/node/job-8/python-a") == first
    assert put(part, ["n1"], python="/node/job-7/python-b") != first


def test_linked_python_and_project_are_those_that_the_node_sees(put):
    python = put(python_of_this_host(), [])
    code = put(environment._code(), [], python=python)
    asks = "import forge, sys; print(forge.__file__, sys.prefix)"
    done = subprocess.run(
        [f"{code}/python", "-c", asks], check=True, capture_output=True, text=True, cwd="/"
    )
    assert done.stdout.split() == [f"{code}/forge/__init__.py", f"{python}/env"]


@pytest.mark.parametrize("keep", [False, True])
def test_project_is_marked_as_used_by_the_run_unless_it_is_kept(
    source, tmp_path, monkeypatch, keep
):
    root = tmp_path / f"node/forge-{os.getuid()}"
    jobs = root if keep else root / "job-7"
    sent = []

    def put(*given, **_):
        part, blind = given[3:]
        assert blind == ["n1", "n2"]
        assert list(root.glob("job-7/used-by-*"))  # another run that ends does not remove it
        sent.append(part.name)
        return f"{jobs}/{part.name}"

    monkeypatch.setattr(environment, "_on_each", on_this_host)
    monkeypatch.setattr(environment, "_put", put)
    monkeypatch.setattr(environment, "_python", python_of_this_host)
    values = {"run": "mine", "program": {"command": ["x"], "source": str(source)}}
    keys = {"folder": str(tmp_path / "node"), "keep": keep, "project": True}
    machine = load_machine(None, {f"stage.{key}": value for key, value in keys.items()})
    project = environment.stage_project(checked(Config, values, "config"), machine, PLACEMENT)
    assert sent == ["python", "project", "source"]
    assert (project.python, project.source) == (f"{jobs}/project/python", f"{jobs}/source/source")
    assert project.roots == ({} if keep else dict.fromkeys(("n1", "n2"), str(root)))
    assert (root / "job-7/used-by-mine").exists() != keep
    environment.stage_project(Config(), machine, PLACEMENT)
    assert sent[3:] == ["python", "project"]


def test_project_that_cannot_be_put_leaves_nothing_on_the_nodes(tmp_path, monkeypatch):
    root = tmp_path / f"node/forge-{os.getuid()}"

    def put(*_, **__):
        (root / "job-7/writing-project-n0-1").mkdir()
        raise UnfitError("sending the project failed on node n2")

    monkeypatch.setattr(environment, "_on_each", on_this_host)
    monkeypatch.setattr(environment, "_put", put)
    monkeypatch.setattr(environment, "_python", python_of_this_host)
    machine = load_machine(None, {"stage.folder": str(tmp_path / "node"), "stage.project": True})
    with pytest.raises(UnfitError, match="node n2"):
        environment.stage_project(Config(), machine, PLACEMENT)
    assert list(root.iterdir()) == []


# --- only where a node sees none of it ------------------------------------------------------------


@pytest.fixture
def stage_auto(monkeypatch, tmp_path):
    """stage_auto(["/lib"], ["/src"]): what is staged where n1 does not see paths that begin so, and n2
    not those; its parts, each with the nodes that get a copy."""

    def stage(*unseen, **program):
        copied = {}

        def ask(placement, script, arguments, *_):
            assert script == environment.SEES and placement is PLACEMENT
            answers = {}
            for host, paths in zip(placement.hosts, unseen, strict=True):
                seen = ["/nowhere" if path.startswith(tuple(paths)) else path for path in arguments]
                answers |= on_this_host(placement.only([host]), script, seen)
            return answers

        def put(*given, **_):
            copied[given[3].name] = given[4]
            return f"/root/job-7/{given[3].name}"

        monkeypatch.setattr(environment, "_on_each", ask)
        monkeypatch.setattr(environment, "_put", put)
        monkeypatch.setattr(environment, "_mark", lambda *_: {})
        monkeypatch.setattr(
            environment, "_python", lambda: EnvironmentPart("python", "env", Path(), [], "")
        )
        config = checked(Config, {"program": program} if program else {}, "config")
        machine = load_machine(None, {"stage.project": "auto"})
        return environment.stage_project(config, machine, PLACEMENT), copied

    return stage


CODE, PYTHON = str(Path(forge.__file__).parent), sys.prefix
PROGRAM = {"command": ["x"]}


def test_nothing_is_staged_where_every_node_sees_all_of_it(stage_auto, source, capsys):
    assert stage_auto([], []) == (None, {})
    assert "stage: n1, n2: proj=ok pkgs=ok\n" in capsys.readouterr().err
    assert stage_auto([], [], **PROGRAM, source=str(source)) == (None, {})
    assert "stage: n1, n2: proj=ok pkgs=ok source=ok\n" in capsys.readouterr().err


def test_each_node_gets_a_copy_of_what_it_does_not_see(stage_auto, source, capsys):
    program = {**PROGRAM, "source": str(source)}
    project, copied = stage_auto([str(source)], [CODE, PYTHON, str(source)], **program)
    assert copied == {"python": ["n2"], "project": ["n2"], "source": ["n1", "n2"]}
    assert (project.source, project.source_digest) == (
        "/root/job-7/source/source",
        source_digest(source),
    )
    said = capsys.readouterr().err
    assert "stage: n1: proj=ok pkgs=ok source=missing\n" in said
    assert "stage: n2: proj=missing pkgs=missing source=missing\n" in said
    project, copied = stage_auto([], [PYTHON], **program)
    assert copied == {"python": ["n2"], "project": []}
    assert (project.python, project.source) == ("/root/job-7/project/python", "")


def test_program_without_a_source_must_be_seen(stage_auto, source, monkeypatch):
    monkeypatch.chdir(source)
    assert stage_auto([], [], **PROGRAM) == (None, {})
    with pytest.raises(ConfigError, match=f"n2 cannot see {source}, in which the pro") as caught:
        stage_auto([], [str(source)], **PROGRAM)
    assert "set program.source" in caught.value.fix


def test_only_a_virtual_environment_can_be_copied(stage_auto, monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert stage_auto([], [CODE])[1] == {"python": [], "project": ["n2"]}
    with pytest.raises(ConfigError, match="needs a virtual environment"):
        stage_auto([], [PYTHON])
