"""Saved checkpoints, read and changed as no user would."""

import torch

from forge.checkpoint import storage
from forge.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from forge.core.files import digest_file


def state_of(folder):
    index = storage.SafeReader(folder).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
    }
    storage.read_tensors(state, folder, no_dist=True)
    return state


def make_digests_right(folder):
    """The manifest as if the files had been written so."""
    files = {path.name: entry_of(path) for path in folder.iterdir() if path.name != MANIFEST}
    Manifest.read(folder).with_files(files).write(folder)


def entry_of(path):
    """A file's entry in the manifest, as the file is now."""
    return StoredFile(bytes=path.stat().st_size, digest=digest_file(path))
