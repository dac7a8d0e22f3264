"""When a checkpoint is sealed: never while a rank may still write it."""

import errno
import os
import threading
from pathlib import Path

import pytest
from support.manifests import MADE_BY
from test_sealed import write

from forge.checkpoint import directory
from forge.checkpoint.sealed import ProgramCheckpoints
from forge.checkpoint.sealer import Sealer, SealProgress
from forge.core import events
from forge.core.errors import UnfitError
from forge.core.paths import RunPaths
from forge.core.program_settings import Checkpoints


class Ranks:
    """How far two ranks are, as their files would say."""

    def __init__(self):
        self.steps, self.running, self.saved = [None, None], [0, 0], [None, None]

    def __call__(self):
        return SealProgress(list(self.steps), list(self.running), list(self.saved))


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def sealer(tmp_path, ranks):
    checkpoints = ProgramCheckpoints(RunPaths(tmp_path), Checkpoints(settle_sec=30), world_size=2)
    return Sealer(checkpoints, ranks, MADE_BY)


@pytest.fixture
def started(sealer, monkeypatch):
    """The sealer after its start, which looks only when the test does."""
    monkeypatch.setattr("forge.checkpoint.sealer.SCAN_SEC", 3600.0)
    yield sealer.start
    sealer._ended.set()


def scan(sealer, orderly=False):
    """The steps that are sealed after one look."""
    sealer._scan(orderly=orderly)
    return sorted(found.step for found in sealer.checkpoints.sealed())


def test_checkpoints_that_cannot_be_read_are_an_error_and_not_waited_for_forever(
    sealer, monkeypatch
):
    asked, over = threading.Event(), threading.Event()

    def progress():
        asked.set()
        over.wait(60)  # as a file system that does not answer
        return SealProgress([], [], [])

    sealer.progress = progress
    monkeypatch.setattr("forge.checkpoint.sealer.SCAN_SEC", 0.01)
    monkeypatch.setattr("forge.checkpoint.sealer.SEAL_SEC", 0.1)
    sealer.start()
    assert asked.wait(30)
    with pytest.raises(UnfitError, match=r"has not ended .* after the program") as caught:
        sealer.finish(orderly=True)
    over.set()
    assert "rerun the command" in caught.value.fix


def test_it_waits_until_the_heartbeats_of_all_ranks_are_beyond_its_step(sealer, ranks):
    write(sealer.checkpoints, 5)
    ranks.steps = [6, 5]
    assert scan(sealer) == []
    ranks.steps = [6, 6]
    assert scan(sealer) == [5]
    [save] = events.read(sealer.checkpoints.paths.events)
    assert isinstance(save, events.Save) and save.step == 5


def test_without_heartbeats_it_waits_until_nothing_changes_while_all_ranks_run(sealer, ranks):
    write(sealer.checkpoints, 5)
    assert scan(sealer) == []
    ranks.running = [20, 20]
    write(sealer.checkpoints, 5, ("late.bin",))  # a rank that saves 20 s later than the others
    assert scan(sealer) == []
    ranks.running = [49, 49]
    assert scan(sealer) == []
    ranks.running = [50, 50]
    assert scan(sealer) == [5]


def test_program_that_tells_its_saves_may_train_on_while_it_writes(sealer, ranks):
    """As with a save in the background: heartbeats and silence say nothing about it."""
    write(sealer.checkpoints, 5)
    ranks.saved = [5, 3]
    ranks.steps, ranks.running = [9, 9], [0, 0]
    assert scan(sealer) == []
    ranks.running = [600, 600]
    assert scan(sealer) == []
    assert scan(sealer, orderly=True) == []
    ranks.saved = [5, 5]
    assert scan(sealer) == [5]


def test_while_a_rank_is_dead_nothing_is_sealed(sealer, ranks):
    write(sealer.checkpoints, 5)
    for seconds in range(0, 600, 10):
        ranks.running = [seconds, 3]
        assert scan(sealer) == []


def test_when_all_ranks_have_exited_with_0_what_is_complete_is_sealed_at_once(sealer):
    write(sealer.checkpoints, 5)
    assert scan(sealer) == []
    assert scan(sealer, orderly=True) == [5]


def test_file_that_comes_after_the_seal_is_added_to_it_once_no_rank_writes(sealer, ranks, capsys):
    folder = write(sealer.checkpoints, 5)
    ranks.steps = [6, 6]
    assert scan(sealer) == [5]
    seal = sealer.checkpoints.seal_of(folder)
    first = seal.read_bytes()
    ranks.steps = [None, None]
    (folder / "late.bin").write_text("late")
    assert scan(sealer) == [5]
    assert seal.read_bytes() == first
    ranks.steps = [7, 7]
    assert scan(sealer) == [5]
    assert list(sealer.checkpoints.latest().bad_files()) == []
    assert "checkpoint-5 has changed" not in capsys.readouterr().err
    assert [save.step for save in events.read(sealer.checkpoints.paths.events)] == [5]


def test_file_that_is_added_to_a_checkpoint_of_another_launch_leaves_what_made_it(
    sealer, ranks, started
):
    """As an evaluation: nobody tells when it is complete, so it counts once nothing changes any more."""
    folder = write(sealer.checkpoints, 5)
    made_by = MADE_BY.model_copy(update={"world_size": 4})
    sealer.checkpoints.seal(folder, 5, made_by)
    started()
    for seconds in (0, 20):
        (folder / "eval.json").write_text(f"{seconds}")
        ranks.steps, ranks.saved, ranks.running = [9, 9], [9, 9], [seconds, seconds]
        assert scan(sealer) == [5]
        assert "eval.json" not in sealer.checkpoints.latest().manifest.files
    ranks.running = [50, 50]
    assert scan(sealer) == [5]
    sealed = sealer.checkpoints.latest()
    assert (sealed.manifest.lineage, list(sealed.bad_files())) == (made_by, [])
    assert "eval.json" in sealed.manifest.files
    assert not sealer.checkpoints.paths.events.exists()


def test_file_that_is_added_hides_no_other_that_is_corrupt(sealer, ranks, started):
    folder = write(sealer.checkpoints, 5)
    sealer.checkpoints.seal(folder, 5, MADE_BY)
    (folder / "state.json").write_text("STATE.JSON at 5")  # as long as before
    started()
    (folder / "eval.json").write_text("{}")
    ranks.steps = [6, 6]
    assert scan(sealer) == [5]
    [bad] = sealer.checkpoints.latest().bad_files()
    assert bad.startswith("state.json has digest")


def test_file_that_comes_while_the_seal_is_made_opens_it_again(sealer, ranks, monkeypatch):
    folder = write(sealer.checkpoints, 5)
    ranks.steps = [6, 6]
    point_latest = directory.point_latest

    def write_meanwhile(paths, newest):
        (folder / "late.bin").write_text("late")
        point_latest(paths, newest)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "point_latest", write_meanwhile)
        assert scan(sealer) == [5]
    assert scan(sealer) == [5]
    assert list(sealer.checkpoints.latest().bad_files()) == []


def test_checkpoint_of_an_earlier_launch_that_is_written_again_is_sealed_again(
    sealer, ranks, capsys
):
    folder = write(sealer.checkpoints, 5)
    sealer.checkpoints.seal(folder, 5, MADE_BY)
    ranks.steps = [6, 6]
    sealer.start()
    (folder / "state.json").write_text("of this launch")
    sealer.finish(orderly=True)
    assert "checkpoint-5 has changed since it was sealed" in capsys.readouterr().err
    assert list(sealer.checkpoints.latest().bad_files()) == []


def test_checkpoint_of_which_only_the_times_are_new_keeps_its_seal(sealer, ranks, capsys):
    """As `touch` leaves it, against a purge of old files: the seal is of the launch that made it."""
    folder = write(sealer.checkpoints, 5)
    sealer.checkpoints.seal(folder, 5, MADE_BY)
    sealed = sealer.checkpoints.seal_of(folder).read_bytes()
    sealer.start()
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
    sealer.finish(orderly=True)
    assert "has changed" not in capsys.readouterr().err
    assert sealer.checkpoints.seal_of(folder).read_bytes() == sealed


def test_older_checkpoint_that_is_sealed_again_does_not_become_the_latest(sealer, ranks):
    older = write(sealer.checkpoints, 5)
    write(sealer.checkpoints, 9)
    ranks.steps = [10, 10]
    assert scan(sealer) == [5, 9]
    (older / "late.bin").write_text("late")
    assert scan(sealer) == [5, 9]
    assert "late.bin" in sealer.checkpoints.sealed()[1].manifest.files
    assert sealer.checkpoints.latest().step == 9


def test_checkpoint_that_the_program_is_removing_is_not_sealed_as_what_is_left(sealer, ranks):
    folder = write(sealer.checkpoints, 5)
    ranks.steps = [6, 6]
    assert scan(sealer) == [5]
    (folder / "deep/weights.bin").unlink()
    assert scan(sealer) == [5]
    assert list(sealer.checkpoints.latest().bad_files()) == ["deep/weights.bin is missing"]


def test_changed_times_of_sealed_checkpoints_hold_up_no_new_one(
    sealer, ranks, started, monkeypatch
):
    """As `touch` leaves them: their digests may take hours."""
    for step in (1, 2, 3):
        sealer.checkpoints.seal(write(sealer.checkpoints, step), step, MADE_BY)
    started()
    for file in sealer.checkpoints.paths.checkpoints.rglob("*"):
        os.utime(file, (1, 1))
    write(sealer.checkpoints, 9)
    ranks.steps = [10, 10]
    looks, seal, read = [], ProgramCheckpoints.seal, ProgramCheckpoints.open_complete
    monkeypatch.setattr(
        ProgramCheckpoints, "seal", lambda *given: looks.append("seal") or seal(*given)
    )
    monkeypatch.setattr(
        ProgramCheckpoints,
        "open_complete",
        lambda own, path: looks.append(path.name) or read(own, path),
    )
    scan(sealer)
    assert looks == ["seal", "checkpoint-3"]
    scan(sealer)
    assert looks == ["seal", "checkpoint-3", "checkpoint-2"]
    sealer.finish(orderly=True)
    assert looks == ["seal", "checkpoint-3", "checkpoint-2"]


@pytest.mark.parametrize("bad", [5, 9])
def test_checkpoint_on_a_bad_disk_keeps_no_other_from_being_sealed(
    sealer, ranks, capsys, monkeypatch, bad
):
    for step in (5, 9):
        write(sealer.checkpoints, step)
    ranks.steps = [10, 10]
    fsync = os.fsync

    def failing(fd):
        if f"/checkpoint-{bad}/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    assert scan(sealer) == scan(sealer) == [14 - bad]
    assert capsys.readouterr().err.count("could not be sealed") == 1


def test_disk_that_refuses_the_seal_is_a_warning_and_the_next_scan_tries_again(
    sealer, ranks, capsys, monkeypatch
):
    write(sealer.checkpoints, 5)
    ranks.steps = [6, 6]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        for _ in range(3):
            assert scan(sealer) == []
    assert capsys.readouterr().err.count("could not be sealed") == 1
    assert scan(sealer) == [5]


def no_space(_fd):
    raise OSError(28, "No space left on device")
