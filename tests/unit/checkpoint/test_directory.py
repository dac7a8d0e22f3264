"""Training never resumes from an incomplete or corrupt checkpoint, nor from another directory."""

import shutil

import pytest
from support.manifests import manifest_of, names, save, stored

from forge.checkpoint import directory, resume
from forge.core import failpoints, file_list
from forge.core.errors import DataError, UnfitError
from forge.core.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results" / "run")


def test_latest_is_the_last_commit(paths):
    save(paths, 10)
    save(paths, 20)
    assert resume.latest(paths).step == 20
    assert paths.latest.readlink().name == "step-00000020"


def test_the_first_checkpoint_is_latest_between_the_renames_of_its_commit(paths, monkeypatch):
    seen = []

    def hook(point, _path):
        if point == "commit.latest":
            seen.append(resume.latest(paths).step)

    monkeypatch.setattr(failpoints, "hook", hook)
    save(paths, 10)
    assert seen == [10]


def test_a_run_without_checkpoints_has_no_latest(paths):
    assert resume.latest(paths) is None


def test_half_written_checkpoint_is_ignored_and_cleaned(paths):
    save(paths, 10)
    half = directory.begin(paths, 20)
    (half / "__0_0.distcp").write_bytes(b"half")
    assert resume.latest(paths).step == 10
    directory.clean(paths)
    assert not half.exists()
    assert resume.latest(paths).step == 10


def test_a_copy_under_another_name_does_not_count_as_a_checkpoint_and_stays(paths):
    first = save(paths, 10)
    copy = first.folder.with_name("step-00000010.bak")
    shutil.copytree(first.folder, copy)
    for step in (20, 30, 40):
        save(paths, step, keep_last=1, keep_every=40)
    assert copy.is_dir()
    assert [folder.name for folder in directory.committed(paths.checkpoints)] == ["step-00000040"]


@pytest.mark.parametrize("name", ["step-00000020", "step-123456789"])
def test_checkpoint_under_another_steps_name_is_refused_with_both_steps(paths, name):
    saved = save(paths, 10)
    folder = saved.folder.rename(saved.folder.with_name(name))
    named = int(name.removeprefix("step-"))
    with pytest.raises(DataError, match=f"{name} is named for step {named}, .* of step 10"):
        directory.Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["best", "step-00000100.bak", "step-0000000100", "latest"])
def test_a_copy_under_a_name_without_a_step_opens(paths, name):
    saved = save(paths, 10)
    copy = shutil.copytree(saved.folder, paths.root / name)
    assert directory.Checkpoint.open(copy).step == 10


def test_steps_of_nine_digits_come_after_those_of_eight(paths):
    """As text, step-100000000 comes before step-99999999."""
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(paths, step, keep_last=2)
    kept = ["step-99999999", "step-100000000"]
    assert [folder.name for folder in directory.committed(paths.checkpoints)] == kept
    paths.latest.unlink()
    assert resume.repaired_latest(paths).step == 100_000_000
    directory.quarantine(paths, paths.checkpoints / kept[-1], ["for the test"])
    assert resume.latest(paths).step == 99_999_999


def test_checkpoints_newer_than_latest_do_not_count_for_keep_last(paths):
    for step in (10, 20, 30):
        save(paths, step, keep_last=3)
    paths.latest.unlink()
    paths.latest.symlink_to("step-00000010")
    save(paths, 15, keep_last=2)
    assert names(paths.checkpoints) == {"latest", *(f"step-{n:08}" for n in (10, 15, 20, 30))}


def test_a_directory_removed_during_the_save_is_not_committed(paths):
    save(paths, 10, keep_last=1)
    folder = directory.begin(paths, 20)
    manifest = manifest_of(20, files={"__0_0.distcp": stored(b"w")})
    shutil.rmtree(folder)
    with pytest.raises(
        UnfitError, match=r"__0_0\.distcp disappeared from .*: nothing was committed"
    ):
        directory.commit(paths, folder, manifest, keep_last=1)
    assert resume.latest(paths).step == 10


def test_old_checkpoints_are_pruned_and_latest_is_kept(paths):
    for step in (10, 20, 30):
        save(paths, step, keep_last=2)
    assert [folder.name for folder in directory.committed(paths.checkpoints)] == [
        "step-00000020",
        "step-00000030",
    ]


def test_a_disk_error_moves_nothing_to_quarantine(paths, monkeypatch):
    saved = save(paths, 10)

    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_list, "digest_file", broken)
    with pytest.raises(UnfitError, match=r"cannot read .*Input/output error"):
        list(saved.bad_files())
    assert saved.folder.is_dir()


def test_last_checkpoint_in_quarantine_leaves_no_latest_where_results_is_relative(
    paths, tmp_path, monkeypatch
):
    saved = save(paths, 10)
    monkeypatch.chdir(tmp_path)
    relative = RunPaths(paths.root.relative_to(tmp_path))
    directory.quarantine(relative, saved.folder.resolve(), ["a test"])
    assert not paths.latest.is_symlink()
    assert names(paths.quarantine) == {"step-00000010"}


def test_readers_share_the_files_and_together_see_all(paths):
    saved = save(paths, 10)
    (saved.folder / "__0_0.distcp").write_bytes(b"Weights")
    (saved.folder / "extra").write_bytes(b"")
    found = [list(saved.bad_files(share=(number, 2))) for number in (0, 1)]
    assert ["has digest" in bad for bad in found[0]] == [True, False]
    assert found[1] == []


def test_flipped_byte_missing_and_extra_files_are_found(paths):
    saved = save(paths, 10)
    assert list(saved.bad_files()) == []
    file = saved.folder / "__0_0.distcp"
    file.write_bytes(b"Weights")
    assert "has digest" in next(saved.bad_files())
    file.write_bytes(b"weight")
    assert "has 6 bytes, the manifest says 7" in next(saved.bad_files())
    file.unlink()
    (saved.folder / "extra").write_bytes(b"")
    assert list(saved.bad_files()) == ["__0_0.distcp is missing", "extra is not in the manifest"]


def test_multiples_of_keep_every_are_never_pruned(paths):
    for step in range(10, 70, 10):
        save(paths, step, keep_last=1, keep_every=30)
    assert names(paths.checkpoints) == {"latest", "step-00000030", "step-00000060"}


def test_save_without_room_is_refused_before_anything_is_written(paths):
    save(paths, 10)
    with pytest.raises(UnfitError, match=r"needs .* MiB in .* are free"):
        directory.begin(paths, 20, size=2**60)
    assert resume.latest(paths).step == 10


def test_full_disk_is_reported_and_keeps_the_last_checkpoint(paths, monkeypatch):
    save(paths, 10)

    def full(*_):
        raise OSError(28, "No space left on device")

    folder = directory.begin(paths, 20)
    (folder / "__0_0.distcp").write_bytes(b"w")
    monkeypatch.setattr(directory, "fsync_folder", full)
    with pytest.raises(UnfitError, match="No space left"):
        manifest = manifest_of(20, files={"__0_0.distcp": stored(b"w")})
        directory.commit(paths, folder, manifest, 2)
    assert resume.latest(paths).step == 10
