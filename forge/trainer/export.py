"""`forge export`: write a checkpoint as a directory that Hugging Face `transformers` loads, as the
architecture that the model is there.

The weights have their names already (trainer/models), so they are copied; where the files of an
architecture have a matrix transposed, it is transposed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from forge.checkpoint import directory, resume, storage
from forge.checkpoint.checkpoints import not_pruned
from forge.checkpoint.export_folder import FORMAT, MANIFEST, atomic_directory, is_exported
from forge.core import hooks
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.file_list import described
from forge.core.files import atomic_open, grouped, write_json
from forge.core.models import architectures
from forge.core.paths import TOKENIZER, RunPaths
from forge.core.records import Validation
from forge.core.terminal import progress, say
from forge.data.end_token import TOKENIZER_CONFIG
from forge.hosts.lock import lock
from forge.trainer.saved_model import SavedModel, check_final_weights

CARD = "README.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Limit of the fp32 weights that go into one file. Only one file's weights are in memory at a time.
FILE_BYTES = 5 * 10**9


def export(folder: Path, to: Path | None, dtype: str, overrides: dict[str, Any]) -> Path:
    """Export a checkpoint, or the latest one of a run's directory; the directory written.

    to: None for `export/step-…` in the run's directory. overrides: config keys, such as the current
    `data`. Raises DataError (no checkpoint, or a corrupt one), ConfigError (`to` holds something
    else) and UnfitError (cannot write).
    """
    checkpoint = resume.named(folder)
    target = to.resolve() if to else _default_target(checkpoint)
    identity = {
        "format": FORMAT,
        "checkpoint_digest": checkpoint.digest,
        "dtype": dtype,
    }
    with lock(target.parent, "export", name=f".{target.name}.lock"), not_pruned(checkpoint):
        if is_exported(target, identity):
            say(f"export of step {checkpoint.step} in {target}: nothing to do")
            return target
        source = _verified(checkpoint, overrides)
        _ = source.config.model.hf_architecture  # refuses one that transformers does not have
        with atomic_directory(target) as draft:
            weights_digest = _write_weights(draft, source, DTYPES[dtype])
            check_final_weights(checkpoint, weights_digest)
            added = hooks.export_keys(source.config, source.tokenizer)
            _write_configs(draft, source, dtype, added)
            _write_tokenizer(draft, source, added)
            _write_manifest(draft, source, {**identity, "weights_digest": weights_digest})
    say(f"exported step {checkpoint.step} in {dtype}: {target}")
    return target


def _default_target(checkpoint: directory.Checkpoint) -> Path:
    folder = checkpoint.folder
    paths = RunPaths.of_checkpoint(folder) or RunPaths.of_merged(folder)
    if paths is None:
        raise ConfigError(
            f"{checkpoint.folder} is not in a run's directory, so the export has no default path",
            fix="give one: --to FOLDER",
        )
    directory.refuse_link(paths.exports)
    return paths.exports / paths.name_of(checkpoint.folder)


def _verified(checkpoint: directory.Checkpoint, overrides: dict[str, Any]) -> SavedModel:
    """The model of a checkpoint whose digests are right. Raises DataError, as `SavedModel.open`."""
    if bad := list(checkpoint.bad_files()):
        raise DataError(
            f"checkpoint {checkpoint.folder} is corrupt: {'; '.join(bad)}",
            cause="a disk error, an interrupted copy, or an edit",
            fix="export another checkpoint: name its directory instead of the run's",
        )
    return SavedModel.open(checkpoint, overrides)


# --- weights ------------------------------------------------------------------------------------


def _write_weights(draft: Path, source: SavedModel, dtype: torch.dtype) -> str:
    """Write all weights file by file; the digest of the fp32 weights, as in the checkpoint."""
    hasher = blake3.blake3()
    groups = list(grouped(source.shapes, lambda name: 4 * source.shapes[name].numel(), FILE_BYTES))
    weight_map: dict[str, str] = {}
    total = sum(shape.numel() for shape in source.shapes.values())
    done = 0
    with progress("export", total / 1e6, "M weights") as update:
        for number, names in enumerate(groups, 1):
            file = "model.safetensors"
            if len(groups) > 1:
                file = f"model-{number:05}-of-{len(groups):05}.safetensors"
            tensors = {name: torch.empty(source.shapes[name]) for name in names}
            storage.read_tensors({"model": tensors}, source.checkpoint.folder, no_dist=True)
            for name, tensor in tensors.items():
                storage.update_digest(hasher, name, tensor)
                is_transposed = source.config.model.is_transposed_in_hf(name)
                stored = tensor.T.contiguous() if is_transposed else tensor
                tensors[name] = stored.to(dtype)
                done += tensor.numel()
            _save(tensors, draft / file)
            weight_map |= dict.fromkeys(names, file)
            update(done / 1e6, file)
    if len(groups) > 1:
        size = total * dtype.itemsize
        metadata = {"total_parameters": total, "total_size": size}
        index = {"metadata": metadata, "weight_map": weight_map}
        write_json(draft / "model.safetensors.index.json", index)
    return hasher.hexdigest()


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # transformers asks for the format
    except SafetensorError as err:  # also for an error of the disk
        raise UnfitError(
            f"cannot write {path.name} in {path.parent.parent}: {err}",
            cause=f"{shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free there",
            fix="free space there, or name another directory with --to",
        ) from None
    # The library sets mode 0600, which would hide the weights from the group.
    path.chmod(path.parent.stat().st_mode & 0o666)


# --- configs, tokenizer, manifest, card ---------------------------------------------------------


AddedKeys = Mapping[str, Mapping[str, Any]]  # of plugins, by file


def _write_configs(draft: Path, source: SavedModel, dtype: str, added: AddedKeys) -> None:
    """Write config.json and generation_config.json, as transformers 4 and 5 read them.

    Without a begin-of-text token, which training does not use, and without dropout, which transformers
    has in other places. Raises ConfigError for a model that transformers does not have.
    """
    model, eos_id = source.config.model, source.tokenizer.eos_id
    name = str(DTYPES[dtype]).removeprefix("torch.")
    config = {
        **model.to_hf(source.config.train.seq_len),
        "architectures": [model.hf_architecture],
        "vocab_size": model.num_rows(source.tokenizer.vocab_size),
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,  # Llama's default is 1
        "eos_token_id": eos_id,
        "dtype": name,
        "torch_dtype": name,  # for transformers 4
    }
    write_json(draft / "config.json", config)
    # Finished rows of a batch are filled with the padding token.
    generation = {"eos_token_id": eos_id, "pad_token_id": eos_id}
    name = "generation_config.json"
    write_json(draft / name, generation | dict(added.get(name, {})))


def _write_tokenizer(draft: Path, source: SavedModel, added: AddedKeys) -> None:
    """Write tokenizer.json and tokenizer_config.json, which give the ids that training used.

    One difference is intended: a text that contains the end-of-text token gives its id, as users of
    transformers expect.
    """
    content = source.tokenizer_file.read_bytes()
    parts = json.loads(content)
    changes: dict[str, None] = {}
    for key in ("truncation", "padding"):  # set for another model's context length
        if parts.get(key) is not None:
            changes[key] = None
    if source.tokenizer.tokenizer.num_special_tokens_to_add(is_pair=False):
        changes["post_processor"] = None  # would add special tokens that training did not use
    if changes:
        content = json.dumps({**parts, **changes}, ensure_ascii=False).encode()
    with atomic_open(draft / TOKENIZER) as file:
        file.write(content)
    settings = {
        # Without a class transformers 4 uses Llama's, which prepends a token that the model has no
        # embedding for.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": source.tokenizer.eos_token,
        "model_max_length": source.config.train.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    write_json(draft / TOKENIZER_CONFIG, settings | dict(added.get(TOKENIZER_CONFIG, {})))


def _write_manifest(draft: Path, source: SavedModel, facts: dict[str, Any]) -> None:
    """Write forge.json, the lineage with the digest of each file, and the model card in README.md."""
    lineage, merged = source.checkpoint.manifest.lineage, source.checkpoint.manifest.merged
    names = sorted(path.name for path in draft.iterdir())
    plugin = architectures.plugin_of(source.config.model)
    of_model = {plugin: source.config.ids.plugins[plugin]} if plugin else {}
    facts = {
        **facts,
        "run": source.config.run,
        "step": source.checkpoint.step,
        "config_digest": lineage.config_digest,
        "tokenizer": lineage.tokenizer.to_json(),
        "tokens": lineage.tokens.to_json(),
        "code": lineage.code.to_json(),
        **({"merged": merged.model_dump(include={"form", "parents"})} if merged else {}),
        **({"plugins": of_model} if of_model else {}),
        **({"parent": lineage.parent.to_json()} if lineage.parent else {}),
        **({"model": lineage.model.to_json()} if lineage.model else {}),
        "files": {name: digest for name, _, digest in described(draft, names)},
    }
    write_json(draft / MANIFEST, facts)
    # The card has no digest, since users edit it.
    with atomic_open(draft / CARD, "w") as file:
        file.write(_card(source, facts))


def _card(source: SavedModel, facts: dict[str, Any]) -> str:
    model, loss = source.config.model, _validation_loss(source.checkpoint, facts)
    weights = sum(shape.numel() for shape in source.shapes.values())
    train = source.config.train
    tokens = source.checkpoint.step * train.batch_size * train.seq_len
    code = facts["code"]
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---
# {facts["run"]}, step {facts["step"]}

A language model of the architecture {model.hf_architecture}, {_origin(source)} and exported by
Forge.

| | |
|---|---|
| weights | {weights:,} in {facts["dtype"]}, digest `{facts["weights_digest"][:12]}` |
| shape | {model.layers} layers, width {model.dim}, {model.heads} heads ({model.num_kv_heads} for keys) |
| vocabulary | {source.tokenizer.vocab_size:,} ids, `{source.tokenizer.eos_token}` ends a text |
| trained on | {tokens:,} tokens, {source.config.train.seq_len} at a time |
| validation loss | {f"{loss:.4f} nats per token" if loss is not None else "not validated"} |
| checkpoint | digest `{facts["checkpoint_digest"][:12]}` |
| config | digest `{facts["config_digest"][:12]}` |
| data | tokens `{facts["tokens"]["id"]}`, digest `{facts["tokens"]["digest"][:12]}` |
| code | Forge {code["version"]}, commit {code["commit"] or "unknown"} |

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")

`{MANIFEST}` has these digests in full, and those of the files of this directory. `statement.json` says
what made them, from the text files on: `forge verify FOLDER`.
"""


def _origin(source: SavedModel) -> str:
    init = source.config.model.init
    from_weights = source.checkpoint.manifest.lineage.model and init
    merged = source.checkpoint.manifest.merged
    return (f"{merged}, " if merged else "") + (
        f"continued from the weights in `{from_weights.name}`"
        if from_weights
        else "trained from scratch"
    )


def _validation_loss(checkpoint: directory.Checkpoint, facts: dict[str, Any]) -> float | None:
    """The loss in validation.json; None unless that is of this checkpoint and says `valid`."""
    paths = RunPaths.of_checkpoint(checkpoint.folder)
    validation = Validation.read_if_there(paths.validation) if paths else None
    if validation is None or validation.status != "valid":
        return None
    return validation.loss if validation.checkpoint_digest == facts["checkpoint_digest"] else None
