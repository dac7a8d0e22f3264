"""Rank 0 commits no checkpoint before the parts of other nodes have come, whole (`stage.results`)."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from forge.checkpoint import async_saver
from forge.checkpoint.manifest import StoredFile
from forge.core.errors import UnfitError
from forge.core.files import digest_bytes


@pytest.fixture
def manifest(monkeypatch):
    monkeypatch.setattr(async_saver, "ARRIVE_SEC", 20.0)
    file = StoredFile(bytes=4, digest=digest_bytes(b"part"))
    return SimpleNamespace(step=20, files={"__1_0.distcp": file})


def test_rank_0_waits_for_a_part_that_comes_late(manifest, tmp_path):
    threading.Timer(0.3, (tmp_path / "__1_0.distcp").write_bytes, [b"part"]).start()
    async_saver._wait_for_parts(tmp_path, manifest)
    assert (tmp_path / "__1_0.distcp").exists()


@pytest.mark.parametrize("content", [None, b"pa", b"pXrt"], ids=["none", "half", "damaged"])
def test_part_that_does_not_come_whole_is_named(manifest, tmp_path, monkeypatch, content):
    monkeypatch.setattr(async_saver, "ARRIVE_SEC", 0.0)
    if content:
        (tmp_path / "__1_0.distcp").write_bytes(content)
    with pytest.raises(UnfitError, match="parts of the checkpoint of step 20 have not come"):
        async_saver._wait_for_parts(tmp_path, manifest)
