"""The model of a checkpoint or of an export, with its tokenizer, from verified bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge.checkpoint import compatibility, directory, storage
from forge.core.config import Config, ResolvedConfig, checked
from forge.core.errors import DataError
from forge.core.file_list import FileList
from forge.core.files import MAX_SMALL_JSON_BYTES, as_object, parse_json
from forge.core.models.architectures import model_keys
from forge.core.models.base import Model
from forge.core.paths import TOKENIZER, RunPaths, tokenizer_folder
from forge.core.records import Trained
from forge.data.end_token import MAX_BYTES, TOKENIZER_CONFIG
from forge.data.model import HF_CONFIG, refuse_ids_beyond
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer, parse_tokenizer
from forge.trainer import pretrained
from forge.trainer.models.decoder import Decoder, make_decoder

WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint with the config and the tokenizer of its lineage. Its weights, all in fp32, have the
    names and shapes that this config gives them; their digests are not verified yet."""

    checkpoint: directory.Checkpoint
    config: ResolvedConfig
    tokenizer: LoadedTokenizer
    tokenizer_file: Path
    shapes: dict[str, torch.Size]
    """Shapes of the weights, sorted by name."""

    @classmethod
    def open(cls, checkpoint: directory.Checkpoint, overrides: dict[str, Any]) -> SavedModel:
        """overrides: config keys, such as the current `data`. Raises DataError where the tokenizer is not
        there or is another one, and where the weights are those of another config."""
        config = checkpoint.config(overrides)
        compatibility.check_compatible(config, checkpoint)
        folder = tokenizer_folder(config.data, config.ids.tokenizer)
        if not folder.is_dir():
            raise DataError(
                f"the tokenizer of {checkpoint.folder} is not in {folder}",
                cause="this is not the project's directory, or `data` was moved",
                fix="give the current path of `data`: --data=FOLDER (in Python: data=FOLDER)",
            )
        tokenizer = load_tokenizer(folder)
        digests = {**checkpoint.manifest.lineage.data_digests, "tokenizer": tokenizer.digest}
        compatibility.check_same_data(checkpoint, digests)  # no tokens are read
        shapes = _shapes(checkpoint, config.model, tokenizer.vocab_size)
        return cls(checkpoint, config, tokenizer, folder / TOKENIZER, shapes)

    def load(self) -> Decoder:
        """The model on the CPU, in evaluation mode. Each file with a part of the weights is read once:
        the bytes that the model gets are those whose digest is verified. DataError for a corrupt file."""
        decoder = make_decoder(self.config.model, self.tokenizer.vocab_size).to_empty(device="cpu")
        state, checkpoint = {"model": decoder.state_dict()}, self.checkpoint
        storage.read_tensors(state, checkpoint.folder, checkpoint.file_list, no_dist=True)
        check_final_weights(checkpoint, str(storage.weights_digest(decoder)))
        decoder.context = self.config.train.seq_len
        return decoder.eval()


def _shapes(
    checkpoint: directory.Checkpoint, model: Model, vocab_size: int
) -> dict[str, torch.Size]:
    """Shape of each weight. DataError where the checkpoint's weights are not those of its config."""
    weights = make_decoder(model, vocab_size).state_dict()  # names and shapes, without memory
    wanted = {name: tensor.shape for name, tensor in weights.items()}
    index = storage.SafeReader(checkpoint.folder).read_metadata()
    stored = {
        name.removeprefix("model."): entry.size
        for name, entry in index.state_dict_metadata.items()
        if name.startswith("model.")
        and isinstance(entry, TensorStorageMetadata)
        and entry.properties.dtype == torch.float32
    }
    wrong = sorted(
        name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)
    )
    if wrong:
        name = wrong[0]
        raise DataError(
            f"{len(wrong)} weights in {checkpoint.folder} are not those of its config: {name} is"
            f" {stored.get(name, 'missing')}, not {wanted.get(name, 'expected')}",
            cause="checkpoint.json was edited, or belongs to another checkpoint",
        )
    return dict(sorted(wanted.items()))


def check_final_weights(checkpoint: directory.Checkpoint, weights_digest: str) -> None:
    """DataError where these are not the weights that a finished run has recorded for its last step."""
    paths = RunPaths.of_checkpoint(checkpoint.folder)
    if paths is None or not paths.trained.exists():
        return
    goal = Trained.read(paths.trained)
    if goal.step == checkpoint.step and goal.weights_digest != weights_digest:
        raise DataError(
            f"the weights in {checkpoint.folder} have digest {weights_digest[:12]}, {paths.trained} has"
            f" {goal.weights_digest[:12]}",
            cause="files of another checkpoint were copied into this one",
            fix=f"look at it: forge validate {checkpoint.folder}",
        )


def load_export(files: FileList) -> tuple[Decoder, LoadedTokenizer]:
    """The model of an export on the CPU, in evaluation mode, and its tokenizer, from bytes whose digests
    are verified. The weights are in fp32, with the values that the files have.

    files: as `exported_files` gives them. Raises DataError for a corrupt file, and for the export of
    another program; ConfigError for a config.json that none of Forge's models has.
    """
    folder = files.folder
    needed = (HF_CONFIG, TOKENIZER, TOKENIZER_CONFIG)
    if missing := [name for name in needed if name not in files.entries]:
        raise DataError(
            f"{folder} is not an export of Forge's own trainer: it has no {', '.join(missing)}",
            cause="it has files of a checkpoint of another program",
            fix="load it by that program",
        )
    values = parse_json(files.read(HF_CONFIG, MAX_SMALL_JSON_BYTES), folder / HF_CONFIG)
    settings = files.read(TOKENIZER_CONFIG, MAX_SMALL_JSON_BYTES)
    content = files.read(TOKENIZER, MAX_BYTES)
    tokenizer = parse_tokenizer(content, {TOKENIZER_CONFIG: settings}, str(folder))
    config = _config_of_export(folder, values, parse_json(settings, folder / TOKENIZER_CONFIG))
    refuse_ids_beyond(config.model, tokenizer.vocab_size)
    decoder = make_decoder(config.model, tokenizer.vocab_size).to_empty(device="cpu")
    weights = [folder / name for name in sorted(files.entries) if name.endswith(WEIGHTS_SUFFIX)]
    pretrained.read(decoder, weights, files)
    decoder.context = config.train.seq_len
    return decoder.eval(), tokenizer


def _config_of_export(folder: Path, model: Any, tokenizer: Any) -> Config:
    """The config with the shape and train.seq_len of an export. model, tokenizer: values in config.json
    and tokenizer_config.json."""
    model = as_object(model, folder / HF_CONFIG)
    key, where = "model_max_length", folder / TOKENIZER_CONFIG
    train = {"seq_len": as_object(tokenizer, where, key)[key]}
    seq_len = checked(Config, {"train": train}, str(where)).train.seq_len
    keys = model_keys(model, seq_len, str(folder / HF_CONFIG))
    return checked(Config, {"model": keys, "train": train}, str(folder))
