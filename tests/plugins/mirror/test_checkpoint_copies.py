"""The checkpoint that nodes without `results` get: complete and verified, or named."""

from __future__ import annotations

from collections import namedtuple

import pytest

from forge.core.errors import DataError, UnfitError
from forge.core.files import digest_file
from forge.plugins.mirror import checkpoint_copies
from forge.plugins.mirror.checkpoint_copies import begin_checkpoint, verify_checkpoint


@pytest.fixture
def keys(tmp_path):
    return {"base": str(tmp_path / "disk"), "job": "7", "name": "checkpoint-20"}


def test_files_in_directories_arrive_with_their_digests(keys, tmp_path):
    sizes = {"model": 3, "sub/rng": 1, "empty": 0}
    folder = tmp_path.joinpath(begin_checkpoint(**keys, sizes=sizes))
    (folder / "model").write_text("abc")
    (folder / "sub/rng").write_text("x")
    digests = {name: digest_file(folder / name) for name in sizes}
    assert verify_checkpoint(**keys, sizes=sizes, digests=digests) == str(folder)
    assert folder.name == "checkpoint-20"


def test_file_that_was_damaged_on_its_way_is_named(keys, tmp_path):
    folder = tmp_path.joinpath(begin_checkpoint(**keys, sizes={"model": 3}))
    (folder / "model").write_text("abc")
    digests = {"model": digest_file(folder / "model")}
    (folder / "model").write_text("abX")
    with pytest.raises(DataError, match=r"model has digest .*, the first node says"):
        verify_checkpoint(**keys, sizes={"model": 3}, digests=digests)


def test_checkpoint_that_is_a_file_arrives_under_its_name(keys, tmp_path):
    folder = tmp_path.joinpath(begin_checkpoint(**keys, sizes={"": 3}))
    file = folder / keys["name"]
    file.write_text("abc")
    digests = {"": digest_file(file)}
    assert verify_checkpoint(**keys, sizes={"": 3}, digests=digests) == str(file)


def test_name_that_leads_out_of_the_directory_is_refused(keys):
    with pytest.raises(ValueError, match="not a path below"):
        begin_checkpoint(**keys, sizes={"../../model": 3})


def test_disk_without_room_is_named_before_anything_is_sent(keys, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(checkpoint_copies.shutil, "disk_usage", lambda _: usage(2**20))
    with pytest.raises(UnfitError, match=r"0\.00 GiB free, the checkpoint needs 1\.00 GiB"):
        begin_checkpoint(**keys, sizes={"model": 2**30})
