"""A small folder of shards."""

from pathlib import Path

import numpy as np

from forge.core.paths import MANIFEST
from forge.data.shards import ShardManifest, ShardSet, ShardWriter, Total, dtype_name

VOCAB = 300
NO_END = np.array([], dtype=np.uint32)


def make(folder: Path, vocab_size: int = VOCAB) -> ShardSet:
    """Three train shards and one of val."""
    splits = {}
    for split, num_documents in (("train", 5), ("val", 1)):
        with ShardWriter(folder, f"{split}-00000", vocab_size, shard_tokens=1024) as writer:
            for document in range(num_documents):
                writer.extend([np.full(600, document, dtype=np.uint32)], NO_END)
        splits[split] = writer.entries
    manifest = ShardManifest(
        id="a" * 12,
        dtype=dtype_name(vocab_size),
        vocab_size=vocab_size,
        eos_id=0,
        tokenizer_id="b" * 12,
        tokenizer_digest="c" * 64,
        settings={},
        inputs=[],
        splits=splits,
        totals={split: Total.of(entries) for split, entries in splits.items()},
    )
    manifest.write(folder / MANIFEST)
    return ShardSet.open(folder)
