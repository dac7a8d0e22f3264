"""Which checkpoint of a run counts: an incomplete one is never resumed from, and what is read before a
start, under the lock and by each rank agrees. A node whose view of a network file system is some seconds
old must not train from something else."""

import itertools
import shutil
import threading
from types import SimpleNamespace

import pytest
from support.manifests import IDS, manifest_of, names, save, write_as_another_program

from forge.checkpoint import directory, resume
from forge.checkpoint.manifest import FORMAT, MANIFEST
from forge.core import failpoints, json_lines
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, UnfitError
from forge.core.paths import RunPaths

CONFIG = ResolvedConfig(ids=IDS)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results" / "run")


# --- read-only ------------------------------------------------------------------------------------


def test_checkpoint_is_named_by_its_folder_or_by_its_run(paths, tmp_path, monkeypatch):
    save(paths, 10)
    newest = save(paths, 20)
    monkeypatch.chdir(tmp_path)
    for place, step in (
        (paths.root, 20),
        (paths.root.relative_to(tmp_path), 20),
        (paths.latest, 20),
        (paths.checkpoints / "step-00000010", 10),
        (shutil.copytree(newest.folder, tmp_path / "best"), 20),
    ):
        assert resume.named(place).step == step


def test_a_run_may_have_the_name_of_a_checkpoint(tmp_path):
    paths = RunPaths(tmp_path / "step-00000007")
    save(paths, 10)
    assert resume.named(paths.root).step == 10


def test_directory_without_a_checkpoint_is_refused(paths, tmp_path):
    saved = save(paths, 10)
    (saved.folder / MANIFEST).unlink()
    with pytest.raises(DataError, match=f"step-00000010/{MANIFEST} does not exist"):
        resume.named(saved.folder)
    with pytest.raises(DataError, match=f"{tmp_path} has no checkpoint") as caught:
        resume.named(tmp_path)
    assert "train the run first" in str(caught.value)


# --- before a start, and under the lock -----------------------------------------------------------


STEPS = (10, 20, 30)
SOME_CORRUPT = [some for number in range(4) for some in itertools.combinations(STEPS, number)]


@pytest.mark.parametrize("set_back_to", STEPS)
@pytest.mark.parametrize("corrupt", SOME_CORRUPT, ids=str)
def test_check_before_a_start_names_the_checkpoint_that_training_resumes_from(
    paths, set_back_to, corrupt
):
    """They once differed where `latest` was set back to a corrupt checkpoint, or a file truncated."""
    saved = {step: save(paths, step, keep_last=9) for step in STEPS}
    paths.latest.unlink()
    paths.latest.symlink_to(saved[set_back_to].folder.name)
    for step in corrupt:
        cut = saved[step].folder / ("__0_0.distcp" if step % 20 else MANIFEST)
        cut.write_bytes(b"cut")
    said = resume.check_resumable(CONFIG, paths)
    taken = resume.repaired_latest(paths)
    assert (said and said.step) == (taken and taken.step)
    assert taken is None or (taken.step not in corrupt and resume.latest(paths) == taken)


def test_latest_on_a_checkpoint_under_another_steps_name_quarantines_it_and_takes_the_previous(
    paths, capsys
):
    save(paths, 10)
    newest = save(paths, 20)
    wrong = newest.folder.rename(newest.folder.with_name("step-00000030"))
    paths.latest.unlink()
    paths.latest.symlink_to(wrong.name)
    with pytest.raises(DataError, match=r"named for step 30, .* of step 20"):
        resume.latest(paths)
    assert resume.check_resumable(CONFIG, paths).step == 10
    assert resume.repaired_latest(paths).step == resume.latest(paths).step == 10
    assert names(paths.quarantine) == {"step-00000030"}
    assert "named for step 30" in capsys.readouterr().err


def test_latest_on_a_copy_under_another_name_is_resumed_from_and_left_there(paths):
    saved = save(paths, 10)
    saved.folder.rename(saved.folder.with_name("best"))
    paths.latest.unlink()
    paths.latest.symlink_to("best")
    assert resume.repaired_latest(paths).step == resume.latest(paths).step == 10
    save(paths, 20, keep_last=1)
    assert names(paths.checkpoints) == {"latest", "best", "step-00000020"}


def test_dangling_latest_is_refused_with_the_command_that_repairs_it(paths):
    save(paths, 10)
    last = save(paths, 20)
    last.folder.rename(paths.root / "moved")
    with pytest.raises(DataError) as caught:
        resume.latest(paths)
    assert f"ln -sfn step-00000010 {paths.latest}" in str(caught.value)
    assert (paths.checkpoints / "step-00000010").is_dir()


def test_training_repairs_a_dangling_or_missing_latest_with_a_warning(paths, capsys):
    save(paths, 10)
    last = save(paths, 20)
    last.folder.rename(paths.root / "moved")
    assert resume.repaired_latest(paths).step == 10
    assert "which does not exist: using step-00000010" in capsys.readouterr().err
    paths.latest.unlink()
    with pytest.raises(DataError, match="is missing"):
        resume.latest(paths)
    assert resume.repaired_latest(paths).step == resume.latest(paths).step == 10


def test_latest_set_back_by_a_user_stays(paths):
    save(paths, 10)
    save(paths, 20)
    paths.latest.unlink()
    paths.latest.symlink_to("step-00000010")
    assert resume.repaired_latest(paths).step == 10


@pytest.mark.parametrize(("point", "step"), [("commit.rename", 10), ("commit.latest", 20)])
def test_interrupted_commit_is_finished_or_undone(paths, monkeypatch, point, step):
    save(paths, 10)
    cut_off_at(monkeypatch, point)
    with pytest.raises(CutOff):
        save(paths, 20)
    monkeypatch.undo()
    assert resume.latest(paths).step == 10
    assert resume.repaired_latest(paths).step == step
    directory.clean(paths)
    assert resume.latest(paths).step == step
    assert names(paths.checkpoints) == {"latest", *(f"step-{n:08}" for n in (10, step))}


def test_interrupted_commit_of_an_existing_step_keeps_the_old_checkpoint(paths, monkeypatch):
    save(paths, 20, content=b"old")
    cut_off_at(monkeypatch, "commit.rename")
    with pytest.raises(CutOff):
        save(paths, 20, content=b"new")
    monkeypatch.undo()
    assert (resume.repaired_latest(paths).folder / "__0_0.distcp").read_bytes() == b"old"


def test_commit_interrupted_before_it_moves_an_abandoned_checkpoint_away_leaves_latest(
    paths, monkeypatch
):
    save(paths, 10)
    abandoned = save(paths, 20).folder
    directory.point_latest(paths, paths.checkpoints / "step-00000010")
    cut_off_at(monkeypatch, "commit.rename")
    with pytest.raises(CutOff):
        save(paths, 20, content=b"new")
    monkeypatch.undo()
    abandoned.with_name(f"{directory.TEMPORARY}replaced-{abandoned.name}").rename(abandoned)
    assert resume.repaired_latest(paths).step == 10


class CutOff(BaseException):
    """As if the process had been killed."""


def cut_off_at(monkeypatch, wanted):
    def hook(point, _path):
        if point == wanted:
            raise CutOff

    monkeypatch.setattr(failpoints, "hook", hook)


@pytest.mark.parametrize(
    "damage", ["manifest", "manifest byte", "manifest key", "file", "missing file"]
)
def test_corrupt_checkpoint_goes_to_quarantine_and_the_previous_one_is_used(paths, damage, capsys):
    save(paths, 10)
    last = save(paths, 20)
    file = last.folder / "__0_0.distcp"
    manifest = last.folder / MANIFEST
    {
        "manifest": lambda: manifest.write_text("{"),
        "manifest byte": lambda: manifest.write_text(
            manifest.read_text().replace('"decay_steps": 200', '"decay_steps": 300')
        ),
        "manifest key": lambda: write_as_another_program(last.folder, world_size=0),
        "file": lambda: file.write_bytes(b"cut"),
        "missing file": file.unlink,
    }[damage]()
    assert resume.repaired_latest(paths).step == 10
    assert resume.latest(paths).step == 10
    assert names(paths.quarantine) == {"step-00000020"}
    assert (paths.quarantine / "step-00000020" / "damage.json").is_file()
    said = capsys.readouterr().err
    assert f"{last.folder} is corrupt" in said and "using step-00000010" in said
    assert [e["checkpoint"] for e in json_lines.read(paths.events)] == ["step-00000020"]


def test_without_a_valid_checkpoint_training_starts_at_step_0_with_a_warning_or_is_refused(
    paths, capsys
):
    saved = save(paths, 10)
    (saved.folder / "__0_0.distcp").unlink()
    assert resume.repaired_latest(paths) is None
    assert not paths.latest.is_symlink()
    with pytest.raises(
        DataError, match="no checkpoint to resume from; in quarantine: step-00000010"
    ):
        resume.begin_afresh(paths, refuse=True)
    resume.begin_afresh(paths, refuse=False)
    assert "starts at step 0 with fresh weights" in capsys.readouterr().err


def test_checkpoint_of_another_version_is_refused_and_stays_where_it_is(paths):
    saved = save(paths, 10)
    manifest = saved.folder / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 9'))
    with pytest.raises(DataError, match=f"has format 9, this version of Forge reads {FORMAT}"):
        resume.repaired_latest(paths)
    assert saved.folder.is_dir()


@pytest.mark.parametrize("there", [True, False])
def test_latest_that_links_to_itself_is_reported_and_repaired_by_training(paths, there, capsys):
    if there:
        save(paths, 10)
        paths.latest.unlink()
    paths.checkpoints.mkdir(parents=True, exist_ok=True)
    paths.latest.symlink_to("latest")
    with pytest.raises(DataError, match="latest points to latest, which is not a directory"):
        resume.latest(paths)
    step = 10 if there else None
    assert getattr(resume.check_resumable(CONFIG, paths), "step", None) == step
    directory.prune(paths, 1)
    assert getattr(resume.repaired_latest(paths), "step", None) == step
    assert "which is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "directory", "copy"])
def test_latest_that_is_not_a_link_is_refused_before_anything_is_written_over_it(paths, kind):
    """A copy that follows links (cp -L) leaves a directory, an editor or git on Windows a text file."""
    saved = save(paths, 10)
    paths.latest.unlink()
    {
        "text": lambda: paths.latest.write_text("step-00000010\n"),
        "directory": paths.latest.mkdir,
        "copy": lambda: shutil.copytree(saved.folder, paths.latest),
    }[kind]()
    before = sorted(paths.checkpoints.rglob("*"))
    for action in (
        lambda: resume.latest(paths),
        lambda: resume.repaired_latest(paths),
        lambda: resume.check_resumable(CONFIG, paths),
    ):
        with pytest.raises(DataError, match="latest is not a symbolic link") as caught:
            action()
        assert f"ln -s step-00000010 {paths.latest}" in str(caught.value)
    assert sorted(paths.checkpoints.rglob("*")) == before


def test_checkpoints_that_is_a_file_is_refused_at_once(paths):
    paths.root.mkdir(parents=True)
    paths.checkpoints.write_text("")
    for action in (
        lambda: resume.latest(paths),
        lambda: resume.repaired_latest(paths),
        lambda: resume.check_resumable(CONFIG, paths),
    ):
        with pytest.raises(DataError, match="checkpoints is not a directory"):
            action()


# --- the same checkpoint on all ranks --------------------------------------------------------------

STEP = "step-00000010"


def put_checkpoint(folder, **facts):
    folder.mkdir(parents=True, exist_ok=True)
    manifest_of(10, **facts).write(folder)


class Seen:
    """The world as seen by a rank other than 0: rank 0 chose STEP and read `manifest`."""

    rank = SimpleNamespace(is_main=False)

    def __init__(self, digest):
        self.digest = digest

    def together(self, action, _what):
        return action()

    patiently = together

    def gather_objects(self, value, _kind, _what):
        return [STEP if value == "" else self.digest, value]


def test_checkpoint_that_this_node_does_not_see_yet_is_waited_for(tmp_path):
    folder = tmp_path / STEP
    later = threading.Timer(0.2, put_checkpoint, [folder])
    later.start()
    assert resume._open(folder).step == 10
    later.join()


def test_checkpoint_that_a_node_never_sees_is_unfit_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "NETWORK_CACHE_SEC", 0.0)
    with pytest.raises(UnfitError, match=f"does not see .*{STEP}.*which rank 0 resumes from"):
        resume._open(tmp_path / STEP)


def test_a_node_that_sees_an_older_checkpoint_of_that_name_does_not_train_on(tmp_path):
    paths = RunPaths(tmp_path)
    put_checkpoint(paths.checkpoints / STEP)
    mine = directory.Checkpoint.open(paths.checkpoints / STEP).manifest.digest
    assert resume._chosen(paths, Seen(mine)).step == 10
    with pytest.raises(UnfitError, match="is not the same checkpoint on all nodes"):
        resume._chosen(paths, Seen("another digest"))
