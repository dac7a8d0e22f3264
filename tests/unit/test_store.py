"""A checkpoint is valid or it is not there: half-written, damaged and foreign folders never resume."""

import pytest

from forge import store
from forge.config import Ids, load_config
from forge.errors import ConfigError, DataError, UnfitError
from forge.manifest import digest_bytes
from forge.paths import RunPaths


def config_of(**overrides):
    config = load_config("/dev/null", overrides)
    return config.model_copy(update={"ids": Ids(tokenizer="a" * 12, tokens="b" * 12)})


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results" / "run")


def save(paths, step, *, config=None, keep_last=2, content=b"weights"):
    config = config or config_of()
    folder = store.begin(paths, step)
    (folder / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": {"bytes": len(content), "digest": digest_bytes(content)}}
    manifest = {
        "step": step,
        "decay_steps": config.train.decay_steps or config.train.max_steps,
        "files": files,
        "lineage": {"config": config.to_json()},
    }
    return store.commit(paths, folder, manifest, keep_last)


def test_latest_is_the_last_commit(paths):
    save(paths, 10)
    save(paths, 20)
    assert store.latest(paths).step == 20
    assert paths.latest.readlink().name == "step-00000020"


def test_a_run_without_checkpoints_has_no_latest(paths):
    assert store.latest(paths) is None


def test_half_written_checkpoint_is_ignored_and_cleaned(paths):
    save(paths, 10)
    half = store.begin(paths, 20)
    (half / "__0_0.distcp").write_bytes(b"half")
    assert store.latest(paths).step == 10
    store.clean(paths)
    assert not half.exists()
    assert store.latest(paths).step == 10


def test_old_checkpoints_are_pruned_and_latest_is_kept(paths):
    for step in (10, 20, 30):
        save(paths, step, keep_last=2)
    assert [folder.name for folder in store.committed(paths.checkpoints)] == [
        "step-00000020",
        "step-00000030",
    ]


def test_dangling_latest_is_refused_with_the_command_that_mends_it(paths):
    save(paths, 10)
    last = save(paths, 20)
    last.folder.rename(paths.root / "moved")
    with pytest.raises(DataError) as caught:
        store.latest(paths)
    assert f"ln -sfn step-00000010 {paths.latest}" in str(caught.value)
    assert (paths.checkpoints / "step-00000010").is_dir()


def test_lost_link_with_checkpoints_beside_it_does_not_start_from_zero(paths):
    save(paths, 10)
    paths.latest.unlink()
    with pytest.raises(DataError, match="is gone"):
        store.latest(paths)


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
    with pytest.raises(DataError, match="is damaged"):
        saved.verify()


def test_changed_science_is_refused_by_key_and_value(paths):
    saved = save(paths, 10)
    with pytest.raises(ConfigError) as caught:
        store.check_compatible(config_of(**{"train.lr": 0.5, "model.layers": 9}), saved)
    assert "train.lr is 0.5, the checkpoint has 0.003" in str(caught.value)
    assert "model.layers is 9, the checkpoint has 4" in str(caught.value)


def test_free_keys_may_change(paths):
    saved = save(paths, 10)
    changed = {"train.max_steps": 900, "train.log_every": 1, "train.parallel": "fsdp2"}
    store.check_compatible(config_of(**changed), saved)


def test_decay_stays_as_at_the_first_start_when_the_goal_is_raised(paths):
    saved = save(paths, 10, config=config_of(**{"train.max_steps": 100}))
    raised = config_of(**{"train.max_steps": 300})
    assert store.frozen_decay_steps(raised, saved) == 100
    with pytest.raises(ConfigError, match=r"train\.decay_steps is 300, the checkpoint has 100"):
        store.check_compatible(
            config_of(**{"train.max_steps": 300, "train.decay_steps": 300}), saved
        )


def test_goal_below_latest_is_refused_and_nothing_is_deleted(paths):
    saved = save(paths, 50)
    with pytest.raises(ConfigError, match=r"max_steps is 20, but .* is at step 50"):
        store.check_compatible(
            config_of(**{"train.max_steps": 20, "train.decay_steps": 200}), saved
        )
    assert saved.folder.is_dir()


def test_full_disk_is_told_and_keeps_the_last_checkpoint(paths, monkeypatch):
    save(paths, 10)

    def full(*_):
        raise OSError(28, "No space left on device")

    folder = store.begin(paths, 20)
    (folder / "__0_0.distcp").write_bytes(b"w")
    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(UnfitError, match="No space left"):
        store.commit(paths, folder, {"step": 20, "files": {"__0_0.distcp": {}}}, 2)
    assert store.latest(paths).step == 10
