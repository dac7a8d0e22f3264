"""A checkpoint is valid or it is not there: half-written, damaged and foreign folders never resume."""

import re
import shutil

import pytest
from support.manifests import manifest_of

from forge.checkpoint import directory
from forge.core import failpoints
from forge.core.config import Ids, load_config
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.event_log import read_lines
from forge.core.files import canonical, digest_bytes
from forge.core.paths import RunPaths
from forge.data.content_ids import resolve


def config_of(**overrides):
    ids = Ids(tokenizer="a" * 12, tokens="b" * 12)
    return resolve(load_config("/dev/null", {**overrides, "ids": ids}))


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results" / "run")


def save(paths, step, *, config=None, keep_last=2, keep_every=None, content=b"weights"):
    config = config or config_of()
    folder = directory.begin(paths, step)
    (folder / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": {"bytes": len(content), "digest": digest_bytes(content)}}
    manifest = manifest_of(step, config, files=files)
    return directory.commit(paths, folder, manifest, keep_last, keep_every)


def test_latest_is_the_last_commit(paths):
    save(paths, 10)
    save(paths, 20)
    assert directory.latest(paths).step == 20
    assert paths.latest.readlink().name == "step-00000020"


def test_the_first_checkpoint_is_latest_between_the_renames_of_its_commit(paths, monkeypatch):
    seen = []

    def hook(point, _path):
        if point == "commit.latest":
            seen.append(directory.latest(paths).step)

    monkeypatch.setattr(failpoints, "hook", hook)
    save(paths, 10)
    assert seen == [10]


def test_a_run_without_checkpoints_has_no_latest(paths):
    assert directory.latest(paths) is None


def test_half_written_checkpoint_is_ignored_and_cleaned(paths):
    save(paths, 10)
    half = directory.begin(paths, 20)
    (half / "__0_0.distcp").write_bytes(b"half")
    assert directory.latest(paths).step == 10
    directory.clean(paths)
    assert not half.exists()
    assert directory.latest(paths).step == 10


def test_a_copy_that_a_person_put_beside_checkpoints_is_none_and_stays(paths):
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
def test_a_copy_under_a_name_that_is_no_steps_opens(paths, name):
    saved = save(paths, 10)
    copy = shutil.copytree(saved.folder, paths.root / name)
    assert directory.Checkpoint.open(copy).step == 10


def test_latest_on_a_checkpoint_under_another_steps_name_quarantines_it_and_takes_the_previous(
    paths, capsys
):
    save(paths, 10)
    newest = save(paths, 20)
    wrong = newest.folder.rename(newest.folder.with_name("step-00000030"))
    paths.latest.unlink()
    paths.latest.symlink_to(wrong.name)
    with pytest.raises(DataError, match=r"named for step 30, .* of step 20"):
        directory.latest(paths)
    assert directory.check_resumable(config_of(), paths).step == 10
    assert directory.newest_whole(paths).step == directory.latest(paths).step == 10
    assert names(paths.quarantine) == {"step-00000030"}
    assert "named for step 30" in capsys.readouterr().err


def test_latest_on_a_copy_under_another_name_is_resumed_from_and_left_there(paths):
    saved = save(paths, 10)
    saved.folder.rename(saved.folder.with_name("best"))
    paths.latest.unlink()
    paths.latest.symlink_to("best")
    assert directory.newest_whole(paths).step == directory.latest(paths).step == 10
    save(paths, 20, keep_last=1)
    assert names(paths.checkpoints) == {"latest", "best", "step-00000020"}


def test_steps_of_nine_digits_come_after_those_of_eight(paths):
    """As text, step-100000000 comes before step-99999999."""
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(paths, step, keep_last=2)
    kept = ["step-99999999", "step-100000000"]
    assert [folder.name for folder in directory.committed(paths.checkpoints)] == kept
    paths.latest.unlink()
    assert directory.newest_whole(paths).step == 100_000_000
    directory.quarantine(paths, paths.checkpoints / kept[-1], ["for the test"])
    assert directory.latest(paths).step == 99_999_999


def test_checkpoints_that_were_left_behind_by_going_back_do_not_count_as_kept(paths):
    for step in (10, 20, 30):
        save(paths, step, keep_last=3)
    paths.latest.unlink()
    paths.latest.symlink_to("step-00000010")
    save(paths, 15, keep_last=2)
    assert names(paths.checkpoints) == {"latest", *(f"step-{n:08}" for n in (10, 15, 20, 30))}


def test_a_folder_that_was_removed_while_it_was_written_is_not_committed(paths):
    save(paths, 10, keep_last=1)
    folder = directory.begin(paths, 20)
    manifest = {"step": 20, "files": {"__0_0.distcp": {"bytes": 1, "digest": ""}}}
    shutil.rmtree(folder)
    with pytest.raises(UnfitError, match=r"has lost __0_0\.distcp: nothing was committed"):
        directory.commit(paths, folder, manifest, keep_last=1)
    assert directory.latest(paths).step == 10


def test_old_checkpoints_are_pruned_and_latest_is_kept(paths):
    for step in (10, 20, 30):
        save(paths, step, keep_last=2)
    assert [folder.name for folder in directory.committed(paths.checkpoints)] == [
        "step-00000020",
        "step-00000030",
    ]


def test_dangling_latest_is_refused_with_the_command_that_mends_it(paths):
    save(paths, 10)
    last = save(paths, 20)
    last.folder.rename(paths.root / "moved")
    with pytest.raises(DataError) as caught:
        directory.latest(paths)
    assert f"ln -sfn step-00000010 {paths.latest}" in str(caught.value)
    assert (paths.checkpoints / "step-00000010").is_dir()


def test_training_mends_a_dangling_or_lost_latest_and_says_so(paths, capsys):
    save(paths, 10)
    last = save(paths, 20)
    last.folder.rename(paths.root / "moved")
    assert directory.newest_whole(paths).step == 10
    assert "which is not there: going on from step-00000010" in capsys.readouterr().err
    paths.latest.unlink()
    with pytest.raises(DataError, match="is gone"):
        directory.latest(paths)
    assert directory.newest_whole(paths).step == directory.latest(paths).step == 10


def test_latest_set_back_by_a_person_stays(paths):
    save(paths, 10)
    save(paths, 20)
    paths.latest.unlink()
    paths.latest.symlink_to("step-00000010")
    assert directory.newest_whole(paths).step == 10


@pytest.mark.parametrize(("point", "step"), [("commit.rename", 10), ("commit.latest", 20)])
def test_commit_that_was_cut_off_is_finished_or_forgotten(paths, monkeypatch, point, step):
    save(paths, 10)
    cut_off_at(monkeypatch, point)
    with pytest.raises(CutOff):
        save(paths, 20)
    monkeypatch.undo()
    assert directory.latest(paths).step == 10
    assert directory.newest_whole(paths).step == step
    directory.clean(paths)
    assert directory.latest(paths).step == step
    assert names(paths.checkpoints) == {"latest", *(f"step-{n:08}" for n in (10, step))}


def test_commit_of_a_step_again_that_was_cut_off_keeps_the_old_one(paths, monkeypatch):
    save(paths, 20, content=b"old")
    cut_off_at(monkeypatch, "commit.rename")
    with pytest.raises(CutOff):
        save(paths, 20, content=b"new")
    monkeypatch.undo()
    assert (directory.newest_whole(paths).folder / "__0_0.distcp").read_bytes() == b"old"


class CutOff(BaseException):
    """As if the process had been killed."""


def cut_off_at(monkeypatch, wanted):
    def hook(point, _path):
        if point == wanted:
            raise CutOff

    monkeypatch.setattr(failpoints, "hook", hook)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("damage", ["manifest", "manifest byte", "file", "missing file"])
def test_damaged_checkpoint_goes_to_quarantine_and_the_one_before_is_taken(paths, damage, capsys):
    save(paths, 10)
    last = save(paths, 20)
    file = last.folder / "__0_0.distcp"
    manifest = last.folder / directory.MANIFEST
    {
        "manifest": lambda: manifest.write_text("{"),
        "manifest byte": lambda: manifest.write_text(
            manifest.read_text().replace('"decay_steps": 200', '"decay_steps": 300')
        ),
        "file": lambda: file.write_bytes(b"cut"),
        "missing file": file.unlink,
    }[damage]()
    assert directory.newest_whole(paths).step == 10
    assert directory.latest(paths).step == 10
    assert names(paths.quarantine) == {"step-00000020"}
    assert (paths.quarantine / "step-00000020" / "damage.json").is_file()
    said = capsys.readouterr().err
    assert f"{last.folder} is damaged" in said and "going on from step-00000010" in said
    assert [e["checkpoint"] for e in read_lines(paths.events)] == ["step-00000020"]


def test_last_damaged_checkpoint_means_fresh_weights_said_aloud_or_refused(paths, capsys):
    saved = save(paths, 10)
    (saved.folder / "__0_0.distcp").unlink()
    assert directory.newest_whole(paths) is None
    assert not paths.latest.is_symlink()
    with pytest.raises(
        DataError, match="no checkpoint to go on from; in quarantine: step-00000010"
    ):
        directory.begin_afresh(paths, refuse=True)
    directory.begin_afresh(paths, refuse=False)
    assert "starts at step 0 with fresh weights" in capsys.readouterr().err


def test_checkpoint_of_another_version_is_refused_and_stays_where_it_is(paths):
    saved = save(paths, 10)
    manifest = saved.folder / directory.MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 9'))
    with pytest.raises(DataError, match="of format 9, not 2"):
        directory.newest_whole(paths)
    assert saved.folder.is_dir()


def test_a_disk_that_cannot_be_read_puts_nothing_into_quarantine(paths, monkeypatch):
    saved = save(paths, 10)

    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(directory, "digest_file", broken)
    with pytest.raises(UnfitError, match=r"cannot read .*Input/output error"):
        list(saved.bad_files())
    assert saved.folder.is_dir()


def test_readers_share_the_files_and_together_see_all(paths):
    saved = save(paths, 10)
    (saved.folder / "__0_0.distcp").write_bytes(b"Weights")
    (saved.folder / "extra").write_bytes(b"")
    found = [list(saved.bad_files(share=(number, 2))) for number in (0, 1)]
    assert ["another digest" in bad for bad in found[0]] == [True, False]
    assert found[1] == []


def test_flipped_byte_missing_and_extra_files_are_found(paths):
    saved = save(paths, 10)
    assert list(saved.bad_files()) == []
    file = saved.folder / "__0_0.distcp"
    file.write_bytes(b"Weights")
    assert "another digest" in next(saved.bad_files())
    file.write_bytes(b"weight")
    assert "has 6 bytes, the manifest says 7" in next(saved.bad_files())
    file.unlink()
    (saved.folder / "extra").write_bytes(b"")
    assert list(saved.bad_files()) == ["__0_0.distcp is missing", "extra is not in the manifest"]


def test_multiples_of_keep_every_stay_for_ever(paths):
    for step in range(10, 70, 10):
        save(paths, step, keep_last=1, keep_every=30)
    assert names(paths.checkpoints) == {"latest", "step-00000030", "step-00000060"}


def test_save_without_room_is_refused_before_anything_is_written(paths):
    save(paths, 10)
    with pytest.raises(UnfitError, match=r"needs .* MiB in .* are free"):
        directory.begin(paths, 20, size=2**60)
    assert directory.latest(paths).step == 10


def test_changed_science_is_refused_by_key_and_value(paths):
    saved = save(paths, 10)
    with pytest.raises(ConfigError) as caught:
        directory.check_compatible(config_of(**{"train.lr": 0.5, "model.layers": 9}), saved)
    assert "train.lr is 0.5, the checkpoint has 0.003" in str(caught.value)
    assert "model.layers is 9, the checkpoint has 4" in str(caught.value)


def test_free_keys_may_change(paths):
    saved = save(paths, 10)
    changed = {"train.max_steps": 900, "train.log_every": 1, "train.parallel": "fsdp2"}
    directory.check_compatible(config_of(**changed), saved)


def test_decay_stays_as_at_the_first_start_when_the_goal_is_raised(paths):
    saved = save(paths, 10, config=config_of(**{"train.max_steps": 100}))
    raised = config_of(**{"train.max_steps": 300})
    assert directory.frozen_decay_steps(raised, saved) == 100
    with pytest.raises(ConfigError, match=r"train\.decay_steps is 300, the checkpoint has 100"):
        directory.check_compatible(
            config_of(**{"train.max_steps": 300, "train.decay_steps": 300}), saved
        )


@pytest.mark.parametrize(
    ("keys", "step", "said"),
    [
        (
            {"warmup_steps": 20, "max_steps": 10, "lr": 0.1},
            None,
            "max_steps 10: .* 0.05, never 0.1",
        ),
        ({"warmup_steps": 20, "max_steps": 10, "decay_steps": 99}, None, "beyond max_steps 10"),
        ({"warmup_steps": 20, "max_steps": 10}, 5, "beyond max_steps 10"),
        ({"warmup_steps": 20, "max_steps": 10}, 10, None),
        ({"warmup_steps": 10, "max_steps": 10}, None, None),
        ({"warmup_steps": 0, "max_steps": 1}, None, None),
    ],
)
def test_warmup_that_never_ends_is_told_until_the_goal_is_reached(paths, keys, step, said):
    """max_steps only stops, so it may be small; but nobody should wonder why the loss is high."""
    config = config_of(**{f"train.{key}": value for key, value in keys.items()})
    saved = save(paths, step, config=config) if step else None
    warnings = directory.schedule_warnings(config, saved)
    assert len(warnings) == (said is not None)
    assert said is None or re.search(said, warnings[0])


def test_schedule_that_is_left_open_never_ends_in_the_warmup():
    """It did, and validation then refused the finished checkpoint: warmup_steps beyond decay_steps."""
    short = config_of(**{"train.max_steps": 10, "train.warmup_steps": 20})
    assert directory.frozen_decay_steps(short, None) == 20
    assert directory.frozen_decay_steps(config_of(**{"train.max_steps": 30}), None) == 30


def test_goal_below_latest_is_refused_and_nothing_is_deleted(paths):
    saved = save(paths, 50)
    with pytest.raises(ConfigError, match=r"max_steps is 20, but .* is at step 50"):
        directory.check_compatible(
            config_of(**{"train.max_steps": 20, "train.decay_steps": 200}), saved
        )
    assert saved.folder.is_dir()


def test_full_disk_is_told_and_keeps_the_last_checkpoint(paths, monkeypatch):
    save(paths, 10)

    def full(*_):
        raise OSError(28, "No space left on device")

    folder = directory.begin(paths, 20)
    (folder / "__0_0.distcp").write_bytes(b"w")
    monkeypatch.setattr(directory, "fsync_folder", full)
    with pytest.raises(UnfitError, match="No space left"):
        directory.commit(paths, folder, {"step": 20, "files": {"__0_0.distcp": {}}}, 2)
    assert directory.latest(paths).step == 10


# --- links and manifests that are none ------------------------------------------------------------

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "10"),
        ("step", -1),
        ("step", True),
        ("step", 10**400),
        ("world_size", 0),
        ("files", ["__0_0.distcp"]),
        ("files", {"../../config.json": {"bytes": 1, "digest": "a"}}),
        ("files", {"a": {"bytes": 10**400, "digest": "a"}}),
        ("files", {"a": 7}),
        ("lineage", None),
        ("lineage", {"config": []}),
        ("probe", {"losses": "none"}),
    ],
)
def test_manifest_of_another_shape_with_the_right_digest_is_no_checkpoint(paths, key, value):
    saved = save(paths, 10)
    text = canonical(directory.sealed({**saved.manifest, key: value}))
    (saved.folder / directory.MANIFEST).write_bytes(text)
    with pytest.raises(DataError, match=rf"is no manifest of a checkpoint: {key}"):
        directory.Checkpoint.open(saved.folder)
    assert directory.newest_whole(paths) is None


@pytest.mark.parametrize("text", ["[]", "7", "null", f'{{"format": {HUGE}}}', "[" * 10**5])
def test_file_that_is_no_object_is_no_checkpoint(paths, text):
    saved = save(paths, 10)
    (saved.folder / directory.MANIFEST).write_text(text)
    with pytest.raises(DataError, match=r"is not a checkpoint|is not JSON"):
        directory.Checkpoint.open(saved.folder)


def test_manifest_with_numbers_that_json_has_not_is_not_as_it_was_sealed(paths):
    saved = save(paths, 10)
    manifest = saved.folder / directory.MANIFEST
    manifest.write_text(manifest.read_text().replace("5.5", "NaN"))
    with pytest.raises(DataError, match="does not have the digest"):
        directory.Checkpoint.open(saved.folder)


@pytest.mark.parametrize("there", [True, False])
def test_latest_that_links_to_itself_is_told_and_training_mends_it(paths, there, capsys):
    if there:
        save(paths, 10)
        paths.latest.unlink()
    paths.checkpoints.mkdir(parents=True, exist_ok=True)
    paths.latest.symlink_to("latest")
    with pytest.raises(DataError, match="latest points to latest, which is no directory"):
        directory.latest(paths)
    step = 10 if there else None
    assert getattr(directory.check_resumable(config_of(), paths), "step", None) == step
    directory.prune(paths, 1)
    assert getattr(directory.newest_whole(paths), "step", None) == step
    assert "which is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "directory", "copy"])
def test_latest_that_is_no_link_is_refused_before_anything_is_written_over_it(paths, kind):
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
        lambda: directory.latest(paths),
        lambda: directory.newest_whole(paths),
        lambda: directory.check_resumable(config_of(), paths),
    ):
        with pytest.raises(DataError, match="latest is no symbolic link") as caught:
            action()
        assert f"ln -s step-00000010 {paths.latest}" in str(caught.value)
    assert sorted(paths.checkpoints.rglob("*")) == before


def test_checkpoints_that_is_a_file_is_refused_at_once(paths):
    paths.root.mkdir(parents=True)
    paths.checkpoints.write_text("")
    for action in (
        lambda: directory.latest(paths),
        lambda: directory.newest_whole(paths),
        lambda: directory.check_resumable(config_of(), paths),
    ):
        with pytest.raises(DataError, match="checkpoints is no directory"):
            action()
