"""The input file of a document, against one that is named for the text of another."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.data.shards import InputEntry, ShardEntry
from forge.plugins.samples.token_documents import Origin, Span, TokenDocuments

ONE_FILE = InputEntry(name="big.txt", size=1, digest="d" * 64)


@pytest.mark.parametrize("number", [0, 200, 999, 1000])
def test_document_of_a_part_with_more_than_a_thousand_shards_is_counted_in_their_order(
    number, monkeypatch
):
    """By name, shard 1000 comes before shard 200."""
    entries = [
        ShardEntry(file=f"train-00000-{n:03d}.bin", tokens=9, documents=1, digest="d" * 64)
        for n in range(1001)
    ]
    manifest = SimpleNamespace(
        settings={"part_mib": 4, "val_fraction": 0.0}, inputs=[ONE_FILE], splits={"train": entries}
    )
    shards = SimpleNamespace(manifest=manifest, folder=Path("tokens"), masked=False)
    documents = TokenDocuments(shards, decode=str)
    found = [Origin("big.txt", "d" * 64, n + 1, str(n)) for n in range(1001)]
    monkeypatch.setattr(documents, "origins", lambda part: (found, 1))
    shard = SimpleNamespace(path=Path("tokens") / entries[number].file)
    assert documents.origin(shard, Span(0, 0, 0, 9)).text == str(number)
