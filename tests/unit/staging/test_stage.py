"""A node's copy of shards or inputs: never a corrupt one, never one that another user could change."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from support import inputs
from support.repository import REPOSITORY as ROOT
from support.shards import make

from forge.core import json_lines
from forge.core.config import Config, Ids, load_config
from forge.core.errors import DataError, UnfitError
from forge.core.machine import load_machine
from forge.core.paths import RunPaths, inputs_folder, tokens_folder
from forge.core.process import hostname
from forge.data import content_ids
from forge.data.content_ids import resolve
from forge.data.inputs import make_inputs
from forge.hosts.placement import Placement, WorldLayout
from forge.slurm import exclude, slurm
from forge.staging import on_node, stage
from forge.staging.stage import program_folders, remove_staged, stage_record

IDS = Ids(tokenizer="a" * 12, tokens="b" * 12)


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_slurm_to_ask(monkeypatch):
    """Its commands may be installed here; there is no controller of the jobs that tests name."""
    monkeypatch.setattr(slurm, "is_here", lambda: False)


@pytest.fixture
def config(tmp_path):
    folders = {"results": str(tmp_path / "results"), "data": str(tmp_path / "data")}
    config = resolve(load_config("/dev/null", {**folders, "ids": IDS}))
    make(tokens_folder(config.data, IDS.tokens))
    return config


@pytest.fixture
def machine(tmp_path):
    return load_machine(None, {"stage.mode": "always", "stage.folder": str(tmp_path / "node")})


@pytest.fixture
def root(tmp_path):
    return tmp_path / "node" / f"forge-{os.getuid()}"


def staged(config, machine):
    return json.loads(stage.stage(config, machine, WorldLayout()).read_text())


def folder_of(facts):
    return Path(facts["folders"][hostname()])


def copies(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".l"))


def test_copy_is_named_by_its_content_and_equal_to_the_source(config, machine, root):
    facts = staged(config, machine)
    source = tokens_folder(config.data, IDS.tokens)
    assert folder_of(facts) == root / facts["digest"][:32]
    assert facts["sent"] == [hostname()]
    for file in source.iterdir():
        assert (root / facts["digest"][:32] / file.name).read_bytes() == file.read_bytes()
    event = json_lines.read(RunPaths.of(config).events)[-1]
    assert (event["event"], event["bytes"], event["folders"]) == ("stage", 7200, facts["folders"])


@pytest.fixture
def in_job(monkeypatch, tmp_path):
    """in_job(): what is in bad_nodes.txt after a stage in a Slurm job that has this node only."""
    here = slurm.Job("7", "RUNNING", 0, (hostname(),), 1, "main", "forge", True, None)
    monkeypatch.setattr(slurm, "this_job", lambda: here)
    monkeypatch.setattr(exclude, "read_partitions", dict)

    def excluded(config):
        return exclude.read(RunPaths.of(config).bad_nodes)

    return excluded


def test_node_whose_own_disk_fails_is_excluded_from_the_next_jobs(
    config, machine, tmp_path, monkeypatch, in_job
):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(on_node.shutil, "disk_usage", lambda _: usage(10 * 2**20))
    with pytest.raises(UnfitError, match=r"GiB free"):
        staged(config, machine)
    assert in_job(config) == [hostname()]


def test_shared_disk_that_fails_excludes_no_node(config, machine, monkeypatch, in_job):
    def broken(files, share):
        raise UnfitError("cannot read /shared/train.bin: Input/output error")

    monkeypatch.setattr(on_node, "_copy_files", broken)
    with pytest.raises(UnfitError, match="Input/output error"):
        staged(config, machine)
    assert in_job(config) == []


def test_complete_copy_is_kept(config, machine, root):
    first = staged(config, machine)
    shard = folder_of(first) / "val-00000-000.bin"
    before = shard.stat()
    second = staged(config, machine)
    assert second == {**first, "sent": []}
    assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("name", ["train-00000-001.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_corrupt_copy_is_replaced(config, machine, name, damage):
    file = folder_of(staged(config, machine)) / name
    good = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(good[:-9] if damage == "cut" else bytes([good[0] ^ 1]) + good[1:])
    assert staged(config, machine)["sent"] == [hostname()]
    assert file.read_bytes() == good


def test_corrupt_source_is_refused_and_leaves_no_copy(config, machine, root):
    shard = tokens_folder(config.data, IDS.tokens) / "train-00000-000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match="train-00000-000"):
        staged(config, machine)
    assert not [name for name in copies(root) if not name.startswith(".writing-")]
    assert not RunPaths.of(config).stage.exists()


def test_leftovers_of_a_killed_stage_are_removed(config, machine, root):
    (root / ".writing-dead").mkdir(parents=True)
    root.chmod(0o700)
    (root / ".writing-dead" / "train-00000-000.bin").write_bytes(b"half")
    facts = staged(config, machine)
    assert copies(root) == [facts["digest"][:32]]


def test_folders_are_closed_to_others(config, machine, root):
    folder = folder_of(staged(config, machine))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, folder)] == [0o700, 0o700]


def test_planted_link_is_refused(config, machine, root, tmp_path):
    root.parent.mkdir()
    (tmp_path / "trap").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "trap")
    with pytest.raises(UnfitError, match="is not a folder") as caught:
        staged(config, machine)
    assert "stage.folder" in caught.value.fix
    assert list((tmp_path / "trap").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_folder_that_lets_others_in_is_refused(config, machine, root, mode):
    root.mkdir(parents=True)
    root.chmod(mode)
    with pytest.raises(UnfitError, match=f"has mode {mode:o}, which lets others in"):
        staged(config, machine)
    assert copies(root) == []


def test_folder_of_another_user_is_refused(config, machine, root, monkeypatch):
    root.mkdir(parents=True, mode=0o700)
    # Only root could make such a folder for real; os.lstat says what another user's looks like.
    Found = namedtuple("Found", "st_mode st_uid")
    real = os.lstat
    foreign = Found(stat.S_IFDIR | 0o700, os.getuid() + 1)
    monkeypatch.setattr(os, "lstat", lambda path: foreign if path == root else real(path))
    with pytest.raises(UnfitError, match=f"belongs to user {os.getuid() + 1}"):
        staged(config, machine)
    assert copies(root) == []


def test_full_disk_is_refused_before_anything_is_written(config, machine, root, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 7199 + 2**28))
    with pytest.raises(
        UnfitError, match=r"has 0\.25 GiB free, the shards need 0\.25 GiB"
    ) as caught:
        staged(config, machine)
    assert "stage.mode to never" in caught.value.fix
    assert copies(root) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 7200 + 2**28))
    assert staged(config, machine)["sent"] == [hostname()]


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_shards_are_read_in_place_when_a_copy_gains_nothing(config, machine, root, mode):
    # auto: source and node folder are both below tmp_path, so on one file system.
    here = load_machine(None, {"stage.mode": mode, "stage.folder": machine.stage.folder})
    facts = staged(config, here)
    assert folder_of(facts) == tokens_folder(config.data, IDS.tokens)
    assert facts["sent"] == []
    assert copies(root) == []


@pytest.mark.parametrize(("reads", "in_place"), [(999, False), (1000, True)])
def test_auto_copies_from_another_file_system_unless_it_is_fast(
    config, machine, monkeypatch, reads, in_place
):
    auto = load_machine(None, {"stage.keep": True, "stage.folder": machine.stage.folder})
    monkeypatch.setattr(Path, "stat", _other_device_below(machine.stage.folder))
    monkeypatch.setattr(on_node, "_measure", lambda _: (reads, 500))
    folder = folder_of(staged(config, auto))
    assert folder.is_relative_to(machine.stage.folder) != in_place
    assert (folder == tokens_folder(config.data, IDS.tokens)) == in_place


def test_outside_of_a_job_auto_leaves_no_copy_behind(config, machine, root, monkeypatch, capsys):
    """Where nothing would ever remove it; who asks for one is told that it stays."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(Path, "stat", _other_device_below(machine.stage.folder))
    monkeypatch.setattr(on_node, "_measure", lambda _: (1, 1))
    auto = load_machine(ROOT / "profiles/local/machine.yaml", {"stage.folder": str(root.parent)})
    assert folder_of(staged(config, auto)) == tokens_folder(config.data, IDS.tokens)
    assert copies(root) == []
    assert "outside of a Slurm job nothing would remove a copy" in capsys.readouterr().err
    staged(config, machine)  # stage.mode: always
    assert "outside of a Slurm job nothing removes it" in capsys.readouterr().err


def _other_device_below(folder):
    real = Path.stat

    def patched(path, **options):
        found = real(path, **options)
        if not str(path).startswith(folder):
            return found
        fields = list(found)
        fields[2] += 1  # st_dev
        return os.stat_result(fields, {"st_mtime_ns": found.st_mtime_ns})

    return patched


def test_corrupt_shards_are_refused_in_place_too(config, machine):
    here = load_machine(None, {"stage.mode": "never", "stage.folder": machine.stage.folder})
    shard = tokens_folder(config.data, IDS.tokens) / "val-00000-000.bin"
    shard.write_bytes(bytes([1]) * shard.stat().st_size)
    with pytest.raises(DataError, match="val-00000-000"):
        staged(config, here)


def remove(config):
    remove_staged(stage_record(RunPaths.of(config)), config.run, Placement.here())


def test_copy_of_a_slurm_job_goes_with_the_last_run_that_reads_it(
    config, machine, root, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    other = config.model_copy(update={"run": "other"})
    first, second = staged(config, machine), staged(other, machine)
    assert folder_of(first) == root / "job-7" / first["digest"][:32] == folder_of(second)
    assert second["sent"] == []
    remove(config)
    assert folder_of(second).is_dir()
    remove(other)
    assert not (root / "job-7").exists()


def test_kept_copy_stays_and_serves_the_next_job(config, machine, root, monkeypatch):
    kept = load_machine(None, {"stage": {**machine.stage.model_dump(), "keep": True}})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = staged(config, kept)
    remove(config)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert staged(config, kept)["sent"] == []
    assert folder_of(first) == root / first["digest"][:32]


def test_stage_that_fails_in_a_job_leaves_nothing_of_the_job(config, machine, root, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    shard = tokens_folder(config.data, IDS.tokens) / "train-00000-000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match="train-00000-000"):
        staged(config, machine)
    assert copies(root) == []


def test_what_ended_jobs_have_left_on_this_host_is_removed(config, machine, root, monkeypatch):
    (root / "job-5").mkdir(parents=True)
    (root / "job-6").mkdir()
    root.chmod(0o700)
    waiting = slurm.Job("6", "PENDING", 0, (), 1, "partition", "forge", True, None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "cluster_name", lambda: "north")
    monkeypatch.setattr(slurm, "show_job", {"5": None, "6": waiting}.get)
    staged(config, machine)
    assert copies(root) == ["job-6", "job-7"]


def test_copy_of_another_job_is_not_removed(config, machine, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    facts = staged(config, machine)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    remove(config)
    assert folder_of(facts).is_dir()


def test_runs_that_stage_at_once_on_one_node_wait_for_each_other(config, machine, root, tmp_path):
    code = (
        "import sys, json, time; from forge.staging import on_node, stage\n"
        "from forge.core.config import ResolvedConfig; from forge.core.machine import Machine\n"
        "values = json.loads(sys.argv[1])\n"
        "copy = on_node._copy_file\n"
        "on_node._copy_file = lambda a, b: (time.sleep(0.2), copy(a, b))\n"  # so that both are at it
        "config, machine = ResolvedConfig.model_validate(values[0]), Machine.model_validate(values[1])\n"
        "from forge.hosts.placement import WorldLayout\n"
        "sys.stdin.readline(); stage.stage(config, machine, WorldLayout())\n"
    )
    children = []
    for run in ("one", "two"):
        values = [{**config.to_json(), "run": run}, machine.model_dump(mode="json")]
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(values)],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = []
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        _, said = child.communicate(timeout=30)
        ends.append((child.returncode, said))
    assert [code for code, _ in ends] == [0, 0], ends
    results = [
        json.loads((tmp_path / "results" / run / ".allocation" / "stage.json").read_text())
        for run in ("one", "two")
    ]
    assert sorted(facts["sent"] for facts in results) == [[], [hostname()]]
    assert len(copies(root)) == 1


# --- inputs of a program --------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The config of a program with inputs in directories, from a hub, and with a link among them."""
    return inputs.make(tmp_path, monkeypatch)


def ranks_read(config):
    """What the ranks on this host get as FORGE_DATA and FORGE_HUB."""
    by_host, shared = program_folders(config, config.program, stage_record(RunPaths.of(config)))
    found = by_host.get(hostname(), shared)
    return found.data, found.hub


def test_inputs_are_copied_with_their_directories_and_ranks_read_the_copy(program, machine, root):
    facts = staged(program, machine)
    folder = folder_of(facts)
    assert inputs.content(folder) == inputs.CONTENT
    assert ranks_read(program) == (f"{folder}/data", f"{folder}/hub")
    assert (folder, facts["sent"]) == (root / facts["digest"][:32], [hostname()])
    event = json_lines.read(RunPaths.of(program).events)[-1]
    num_bytes = sum(len(text.encode()) for text in inputs.CONTENT.values())
    assert (event["bytes"], event["folders"]) == (num_bytes, facts["folders"])
    assert staged(program, machine) == {**facts, "sent": []}


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_inputs_are_read_in_place_when_a_copy_gains_nothing(program, machine, root, tmp_path, mode):
    # auto: they and the node folder are on one file system.
    here = load_machine(None, {"stage.mode": mode, "stage.folder": machine.stage.folder})
    facts = staged(program, here)
    shared = inputs_folder(program.data, program.ids.inputs)
    assert (folder_of(facts), facts["sent"], copies(root)) == (shared, [], [])
    assert ranks_read(program) == (f"{tmp_path}/in", f"{shared}/hub")


def test_inputs_on_another_file_system_than_their_manifest_are_measured(
    program, machine, monkeypatch, tmp_path
):
    auto = load_machine(None, {"stage.keep": True, "stage.folder": machine.stage.folder})
    monkeypatch.setattr(Path, "stat", _other_device_below(f"{tmp_path}/in"))
    monkeypatch.setattr(on_node, "_measure", lambda _: (999, 500))
    assert folder_of(staged(program, auto)).is_relative_to(machine.stage.folder)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("name", ["manifest.json", *list(inputs.CONTENT)[1:3]])
def test_corrupt_copy_of_inputs_is_replaced(program, machine, name, damage):
    file = folder_of(staged(program, machine)) / name
    good = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(good[:-9] if damage == "cut" else bytes([good[0] ^ 1]) + good[1:])
    assert staged(program, machine)["sent"] == [hostname()]
    assert file.read_bytes() == good


CHANGES = {"size": "has 6 bytes", "time": "has changed since", "content": "has digest"}


@pytest.mark.parametrize("change", CHANGES)
def test_input_that_has_changed_is_named_and_nothing_is_copied(
    program, machine, root, tmp_path, change
):
    path = tmp_path / "in/train.csv"
    before = path.stat()
    path.write_text("1,b,c\n" if change == "size" else "1,b\n")
    late = 2**62 if change == "time" else before.st_mtime_ns
    os.utime(path, ns=(late, late))
    with pytest.raises(DataError, match=rf"in/train\.csv {CHANGES[change]}"):
        staged(program, machine)
    assert not root.exists() or not [n for n in copies(root) if not n.startswith(".writing-")]
    assert not RunPaths.of(program).stage.exists()


def test_copy_of_inputs_goes_with_the_job(program, machine, root, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert folder_of(staged(program, machine)).parent == root / "job-7"
    remove(program)
    assert copies(root) == []


def test_program_without_inputs_reads_its_directory_only(program, machine, root):
    bare = program.model_copy(
        update={"program": program.program.model_copy(update={"inputs": []}), "ids": Ids()}
    )
    facts = staged(bare, machine)
    assert (facts["bytes"], facts["folders"], root.exists()) == (0, {}, False)
    assert ranks_read(bare) == ("", "")


def test_copy_of_earlier_inputs_is_not_read(program, machine, tmp_path):
    staged(program, machine)
    (tmp_path / "in/more.csv").write_text("4,d\n")
    content_ids._inputs_id.cache_clear()
    later = resolve(Config.model_validate({**program.to_json(), "ids": None}))
    make_inputs(later)
    assert ranks_read(later)[0] == f"{tmp_path}/in"


def test_copy_of_a_run_that_is_stopped_is_named_and_not_waited_for_forever(tmp_path):
    with (
        on_node._alone(tmp_path, 10),
        pytest.raises(UnfitError, match=f"copying into {tmp_path} .*: pid {os.getpid()}\n"),
        on_node._alone(tmp_path, 0.1),
    ):
        pass
    with on_node._alone(tmp_path, 0.1):
        pass
