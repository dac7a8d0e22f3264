"""Saved checkpoints, read and changed as no user would."""

import torch

from forge.checkpoint import directory, storage
from forge.core.files import digest_file, read_json, write_json


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
    manifest = read_json(folder / directory.MANIFEST)
    manifest["files"] = {
        path.name: {"bytes": path.stat().st_size, "digest": digest_file(path)}
        for path in folder.iterdir()
        if path.name != directory.MANIFEST
    }
    write_json(folder / directory.MANIFEST, directory.sealed(manifest))
