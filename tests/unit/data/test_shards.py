"""A corrupt or incomplete directory of shards, or one from elsewhere, must never be trained on."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards import NO_END, VOCAB, make

from forge.core.errors import DataError, UnfitError
from forge.core.files import write_json
from forge.data.shards import EndInDocument, ShardSet, ShardWriter


def edit(folder: Path, change: Any) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    write_json(folder / "manifest.json", values)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shards = make(tmp_path)
    assert [shard.path.name for shard in shards.train] == [
        f"train-00000-00{number}.bin" for number in range(3)
    ]
    assert [shard.num_tokens for shard in shards.train] == [1200, 1200, 600]
    assert shards.train[1].read()[599:601].tolist() == [2, 3]
    assert shards.num_bytes == 6 * 600 * 2
    assert shards.vocab_size == VOCAB
    shards.verify()


@pytest.mark.parametrize(("vocab_size", "name"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype_is_the_smallest_that_fits(tmp_path: Path, vocab_size: int, name: str) -> None:
    assert make(tmp_path, vocab_size).manifest.dtype == name
    assert (tmp_path / "val-00000-000.bin").stat().st_size == 600 * np.dtype(name).itemsize


def test_shards_do_not_depend_on_how_many_documents_come_at_a_time(tmp_path: Path) -> None:
    documents = [np.full(300, number, dtype=np.uint32) for number in range(9)]
    end = np.array([9], dtype=np.uint32)
    with ShardWriter(tmp_path, "train-00000", VOCAB, 1024) as together:
        together.extend(documents, end)
    with ShardWriter(tmp_path, "train-00001", VOCAB, 1024) as singly:
        for document in documents:
            singly.extend([document], end)
    assert [e.digest for e in together.entries] == [e.digest for e in singly.entries]
    assert [(e.tokens, e.documents) for e in together.entries] == [(1204, 4), (1204, 4), (301, 1)]
    assert (tmp_path / "train-00000-002.bin").read_bytes() == b"\x08\0" * 300 + b"\x09\0"


def test_an_id_beyond_the_vocabulary_is_never_written(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="70000"),
        ShardWriter(tmp_path, "train-00000", VOCAB, 1024) as writer,
    ):
        writer.extend([np.array([70000], dtype=np.uint32)], NO_END)


def test_a_document_with_the_end_of_text_id_is_never_written(tmp_path: Path) -> None:
    end = np.array([7], dtype=np.uint32)
    with (
        pytest.raises(EndInDocument),
        ShardWriter(tmp_path, "train-00000", VOCAB, 1024) as writer,
    ):
        writer.extend([np.array(ids, dtype=np.uint32) for ids in ([1, 2], [3, 7, 4])], end)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_shard_has_no_name(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        ShardWriter(tmp_path, "train-00000", VOCAB, 1024) as writer,
    ):
        writer.extend([np.zeros(10, dtype=np.uint32)], NO_END)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_unfit_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(UnfitError, match="No space left"),
        ShardWriter(tmp_path, "train-00000", VOCAB, 1024) as writer,
    ):
        writer.extend([np.zeros(10, dtype=np.uint32)], NO_END)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make(tmp_path).train[1].path.unlink()
    with pytest.raises(DataError, match=r"train-00000-001\.bin is missing"):
        ShardSet.open(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    shards = make(tmp_path)
    os.truncate(shards.val[0].path, 1198)
    with pytest.raises(DataError, match=r"val-00000-000\.bin has 1198 bytes, the manifest says 12"):
        ShardSet.open(tmp_path)


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    shards = make(tmp_path)
    data = bytearray(shards.train[2].path.read_bytes())
    data[7] ^= 1
    shards.train[2].path.write_bytes(data)
    with pytest.raises(DataError, match=r"train-00000-002\.bin has digest"):
        ShardSet.open(tmp_path).verify()


def test_ranks_share_the_check_of_digests(tmp_path: Path) -> None:
    shards = make(tmp_path)
    shards.train[2].path.write_bytes(bytes(1200))
    shards.verify((0, 4))
    with pytest.raises(DataError, match="train-00000-002"):
        shards.verify((2, 4))


def test_an_unknown_format_version_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    edit(tmp_path, lambda values: values.update(format=2))
    with pytest.raises(DataError, match="has format 2, this version of Forge reads 1"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize("name", ["../a.bin", "/etc/a.bin", "sub/a.bin", ".hidden.bin", "a.txt"])
def test_a_manifest_cannot_point_out_of_its_directory(tmp_path: Path, name: str) -> None:
    make(tmp_path)
    edit(tmp_path, lambda values: values["splits"]["train"][0].update(file=name))
    with pytest.raises(DataError, match=r"splits\.train\.0\.file"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 70000}, "70000 token ids do not fit into uint16"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_id": VOCAB}, f"eos_id {VOCAB} is not below"),
        ({"totals": {"train": {"shards": 3, "documents": 5, "tokens": 1}}}, "totals"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make(tmp_path)
    edit(tmp_path, lambda values: values.update(changes))
    with pytest.raises(DataError, match=message):
        ShardSet.open(tmp_path)


def test_the_digest_names_the_manifest(tmp_path: Path) -> None:
    before = make(tmp_path).digest
    assert ShardSet.open(tmp_path).digest == before
    edit(tmp_path, lambda values: values.update(tokenizer_id="d" * 12))
    assert ShardSet.open(tmp_path).digest != before
