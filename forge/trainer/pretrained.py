"""Pretrained weights into a decoder: each rank reads its own rows of the safetensors files only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Artifact
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.file_list import FileList
from forge.core.models.base import Model
from forge.core.paths import MANIFEST, model_folder
from forge.core.terminal import say
from forge.data import content_ids, model
from forge.data.model import ModelManifest
from forge.launch.process_group import World
from forge.trainer.initialize import own_rows
from forge.trainer.models.decoder import Decoder, make_decoder

# Types of weights, as safetensors names them.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
ROWS_AT_ONCE = 2**14  # of two matrices that are compared


def make_model(config: ResolvedConfig) -> Path:
    """`forge model`: find or download the weights of model.init, refuse what does not fit, and write the
    manifest; its path. Does nothing if it exists.

    Raises ConfigError, DataError, and UnfitError (no answer of the hub).
    """
    path = model_folder(config.data, config.ids.model) / MANIFEST
    if model.is_made(config):
        say(f"model {config.ids.model}: nothing to do")
        return path
    content_ids.require_current(config, "model")
    folder, files, commit = model.find_files(config)
    with _Tensors(files, config.model) as tensors:
        tensors.refuse_misfits()
        tensors.refuse_another_output(0, config.model.num_rows(0))
    return model.write_manifest(config, folder, files, commit)


def manifest_of(config: ResolvedConfig) -> ModelManifest:
    """The manifest of the weights that a config starts from. DataError where there is none."""
    path = model_folder(config.data, config.ids.model) / MANIFEST
    if not path.exists():
        raise DataError(f"there is no {path}", fix="run `forge model CONFIG`")
    return ModelManifest.read(path)


def recorded(config: ResolvedConfig, checkpoint: Checkpoint | None) -> Artifact | None:
    """The pretrained weights to record in the lineage of a run; None without. checkpoint: the one that
    the run resumes from, or its parent's: which then has it recorded."""
    if checkpoint is not None:
        return checkpoint.manifest.lineage.model
    if not config.ids.model:
        return None
    return Artifact(id=config.ids.model, digest=manifest_of(config).digest)


def load(decoder: Decoder, config: ResolvedConfig, world: World) -> None:
    """Fill a decoder, of a sharded one this rank's rows, with the weights of model.init, in fp32.

    The ranks share the check of digests. All ranks call it. Raises DataError for a changed file and for
    tensors that do not fit, UnfitError where a node does not see a file.
    """
    manifest = manifest_of(config)
    share = (world.rank.rank, world.rank.world_size)
    world.patiently(lambda: manifest.verify(share), "check of pretrained weights")
    world.patiently(lambda: read(decoder, manifest.paths), "load of pretrained weights")
    if world.rank.is_main:
        say(f"start from {manifest.source}, model {manifest.id}")


@torch.no_grad()
def read(decoder: Decoder, files: Sequence[Path], digests: FileList | None = None) -> None:
    """Fill the parameters of a decoder from safetensors files; of a sharded one this rank's rows.

    digests: of these files: each is read into memory as a whole, and verified there. Raises DataError
    for one that has changed, and for tensors that do not fit.
    """
    with _Tensors(files, decoder.settings, digests) as tensors:
        tensors.refuse_misfits()
        for name, parameter in decoder.named_parameters():
            local, first, _ = own_rows(parameter)
            local.copy_(tensors.rows(name, first, first + len(local)))
            if name == decoder.embedding_name:
                tensors.refuse_another_output(first, first + len(local))


class _Tensors:
    """The tensors of a model in several safetensors files; nothing is read until rows are taken, but for
    files with digests (as for `read`)."""

    def __init__(
        self, files: Sequence[Path], settings: Model, digests: FileList | None = None
    ) -> None:
        self._files, self._settings, self._digests = files, settings, digests
        assert settings.vocab_size
        self._decoder = make_decoder(settings, settings.vocab_size)  # for names and shapes
        self._stack = ExitStack()
        self._place: dict[str, tuple[Any, str]] = {}  # parameter -> open file, name in it

    def __enter__(self) -> _Tensors:
        for path in self._files:
            try:
                file: Any = (
                    _InMemory(self._digests.read(path.name))
                    if self._digests
                    else self._stack.enter_context(safe_open(path, framework="pt"))
                )
            except (SafetensorError, OSError) as err:
                raise DataError(
                    f"{path} cannot be read as safetensors: {err}",
                    cause="an incomplete download or copy, or another format",
                    fix="get the file again",
                ) from None
            for stored in file.keys():  # noqa: SIM118, no dict
                if name := self._settings.hf_tensor(stored):
                    self._refuse_second_name(name, stored)
                    self._place[name] = (file, stored)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _refuse_second_name(self, name: str, stored: str) -> None:
        # The same name in two files is no error: transformers, too, takes the last file by name.
        _, before = self._place.get(name, (None, stored))
        if before != stored:
            raise DataError(
                f"the weights in {self._files[0].parent} have {name} twice: {before} and {stored}",
                cause="files of two models, or of one model in two formats",
                fix="remove the files of one of them",
            )

    def _slice(self, name: str) -> Any:
        file, stored = self._place[name]
        return file.get_slice(stored)

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows of a parameter."""
        if self._settings.is_transposed_in_hf(name):
            columns: torch.Tensor = self._slice(name)[:, first:end]
            return columns.T
        rows: torch.Tensor = self._slice(name)[first:end]
        return rows

    def refuse_misfits(self) -> None:
        """DataError that names the tensors that are missing, unexpected, or of another shape or type."""
        settings = self._settings
        wanted = {
            name: list(parameter.shape)[:: -1 if settings.is_transposed_in_hf(name) else 1]
            for name, parameter in self._decoder.named_parameters()
        }
        names = self._place.keys()
        wrong = [f"{name} is missing" for name in wanted if name not in names]
        output = self._decoder.output_name
        if settings.tie_embeddings and output in names:
            # Some files have both matrices of tied embeddings: refuse_another_output.
            wanted[output] = wanted[self._decoder.embedding_name]
        wrong += [f"{name} is not in the model" for name in sorted(names - wanted.keys())]
        for name in wanted.keys() & names:
            part = self._slice(name)
            if (shape := list(part.get_shape())) != wanted[name]:
                wrong.append(f"{name} has shape {shape}, the model {wanted[name]}")
            elif part.get_dtype() not in DTYPES.values():
                wrong.append(
                    f"{name} has type {part.get_dtype()}, not one of {', '.join(DTYPES.values())}"
                )
        if wrong:
            more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise DataError(
                f"the weights in {self._files[0].parent} do not fit their config.json:"
                f" {'; '.join(sorted(wrong)[:5])}{more}",
                cause="weights of another model, an adapter, or quantized ones",
                fix="choose other weights",
            )

    def refuse_another_output(self, first: int, end: int) -> None:
        """DataError where these rows of the output layer differ from those of the embedding, which
        config.json ties to it. transformers 5 then keeps both (`PreTrainedModel.tie_weights`)."""
        other = self._decoder.output_name
        if not self._settings.tie_embeddings or other not in self._place:
            return
        name, differences = self._decoder.embedding_name, []
        for row in range(first, end, ROWS_AT_ONCE):
            last = min(end, row + ROWS_AT_ONCE)
            output, embedding = self.rows(other, row, last), self.rows(name, row, last)
            if not torch.equal(output.float(), embedding.float()):
                differences.append((output.float() - embedding.float()).abs().max().item())
        if differences:
            raise DataError(
                f"{other} in {self._files[0].parent} differs from {name} by up to"
                f" {max(differences):.3g}, and config.json has tie_word_embeddings true",
                cause="an output layer that was trained by itself; transformers uses both matrices",
                fix="in a copy of the weights (model.init.path) set tie_word_embeddings to false",
            )


class _InMemory:
    """The content of a safetensors file; `_Tensors` asks it as it asks what `safe_open` gives."""

    def __init__(self, content: bytes) -> None:
        self._tensors = safetensors.torch.load(content)

    def keys(self) -> list[str]:
        return [*self._tensors]

    def get_slice(self, name: str) -> _TensorInMemory:
        return _TensorInMemory(self._tensors[name])


@dataclass(frozen=True)
class _TensorInMemory:
    tensor: torch.Tensor

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return self.tensor[rows]

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def get_dtype(self) -> str:
        return DTYPES.get(self.tensor.dtype, str(self.tensor.dtype))
