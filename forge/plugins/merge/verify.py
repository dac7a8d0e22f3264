"""`forge verify --checkpoints` of an export that is a merge: compute it again, bit by bit."""

from __future__ import annotations

from pathlib import Path

import blake3
import torch
from safetensors import SafetensorError, safe_open

from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint import resume, storage
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.stored_tensors import WEIGHTS
from forge.core.errors import ConfigError
from forge.core.paths import RunPaths
from forge.plugins.merge.weights import FORMS, merged_weights, weights_of
from forge.trainer.export import DTYPES
from forge.trainer.saved_model import WEIGHTS_SUFFIX


def verify_merge(export: Path, run: RunPaths, links: Links) -> str:
    """Sentence on the tensors of an export: they are those that its checkpoints give. Refused where one
    differs in a bit, and for weights that are not those of the form. links: verified, as are the digests
    of the files of the export and of the checkpoints."""
    merge = links["merge"]
    stated = part(merge, "parents", list)
    parents = [(_parent(run, one), part(one, "weight", float)) for one in stated]
    form, weights = part(merge, "form", str), [weight for _, weight in parents]
    steps = [checkpoint.step for checkpoint, _ in parents]
    if form not in FORMS or (form != "weights" and weights != weights_of(form, steps)):
        raise VerificationError(f"the weights of the merge are not those of the form {form!r:.20}")
    dtype = DTYPES.get(part(links["export"], "dtype", str))
    if dtype is None:
        raise VerificationError("the export has a dtype that Forge does not write")
    model, hasher, seen = parents[-1][0].config({}).model, blake3.blake3(), set()
    files = {name: path for path in export.glob(f"*{WEIGHTS_SUFFIX}") for name in _names(path)}
    for stored_name, numbers in merged_weights(parents):
        name, tensor = stored_name.removeprefix(WEIGHTS), torch.from_numpy(numbers)
        storage.update_digest(hasher, name, tensor)
        expected = (tensor.T if model.is_transposed_in_hf(name) else tensor).to(dtype)
        if name not in files or not _is_same(files[name], name, expected):
            raise VerificationError(f"{name} is not what the checkpoints of the merge give")
        seen.add(name)
    if others := files.keys() - seen:
        raise VerificationError(f"{min(others)!r:.80} is no weight of the checkpoints")
    if hasher.hexdigest() != links["export"].get("weights"):
        raise VerificationError("the digest of the weights is not that of the statement")
    return f"merge: {len(seen)} tensors computed again, equal in every bit"


def _parent(run: RunPaths, stated: dict[str, object]) -> Checkpoint:
    step, digest = part(stated, "step", int), part(stated, "digest", str)
    try:
        checkpoint = resume.at_step(run, step)
    except ConfigError:
        raise VerificationError(
            f"the merge cannot be computed again: {run.root} has no checkpoint of step {step}"
        ) from None
    if checkpoint.digest != digest:
        raise VerificationError(f"{checkpoint.folder} is not the checkpoint that was merged")
    return checkpoint


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return [*file.keys()]
    except (SafetensorError, OSError) as err:
        raise VerificationError(f"{path} cannot be read: {err}") from None


def _is_same(path: Path, name: str, expected: torch.Tensor) -> bool:
    with safe_open(path, framework="pt") as file:
        stored = file.get_tensor(name)
    if (stored.dtype, stored.shape) != (expected.dtype, expected.shape):
        return False
    pair = (one.contiguous().view(torch.uint8) for one in (stored, expected))
    return torch.equal(*pair)
