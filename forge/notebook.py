"""`forge.load`: the model and the tokenizer of a run, in Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from forge.checkpoint import resume
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.export_folder import MANIFEST as EXPORT_MANIFEST
from forge.checkpoint.export_folder import exported_files
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.terminal import say
from forge.reporting.find_runs import find_runs
from forge.reporting.trusted import is_of_program, run_of, trusted_data

if TYPE_CHECKING:
    import torch

    from forge.data.tokenizer import LoadedTokenizer
    from forge.trainer.models.decoder import Decoder

    Loaded = tuple[Decoder, LoadedTokenizer, str]  # the last: which checkpoint, for people
    Read = Callable[[], Loaded]

# As config.yaml and `forge export` name types, besides torch's own names.
MOST_READS = 5  # of the newest checkpoint, where a run that is training removes it meanwhile
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def load(
    run: str | Path,
    *,
    step: int | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "fp32",
    data: str | Path | None = None,
) -> tuple[Decoder, LoadedTokenizer]:
    """The model of a run, in evaluation mode, and its tokenizer:

        model, tokenizer = forge.load("base")
        ids = model.generate(tokenizer.encode("Once upon"), 50)
        print(tokenizer.decode(ids))

    `model(tokens)` gives logits [B, T, V] for token ids [B, T] on its device.

    run: name of a run of the project in the current directory, or the path of a run, of one of its
    checkpoints or of an export. step: of its checkpoint; None: the newest one. device: as torch names it;
    the CPU unless you name another one, also where there is a GPU, on which a run may be training. dtype:
    fp32, in which weights are trained, bf16 or fp16, or torch's. data: directory with the run's
    tokenizer; None: that of the project.

    The bytes that the model gets are those whose digests are verified, and nothing that a run's directory
    names is imported or executed. Raises ForgeError: ConfigError for a name, step, device or dtype that
    there is not, and for a run of another program; DataError where there is no checkpoint yet, or a
    corrupt one; UnfitError where the disk fails, or the memory of a GPU is too small.
    """
    [place] = find_runs([str(run)])
    with disk_trouble(place.root, "read"):
        is_export = (place.root / EXPORT_MANIFEST).is_file()
        read = _export(place, step) if is_export else _checkpoint(place, step, data)
        to_device, to_dtype = _device(device), _dtype(dtype)
        model, tokenizer, what = read()
    _move(model.to(to_dtype), to_device)
    millions = model.num_parameters() / 1e6
    say(
        f"{what}: {millions:,.1f}M weights in {str(to_dtype).removeprefix('torch.')} on {to_device}"
    )
    return model, tokenizer


def _checkpoint(place: RunPaths, step: int | None, data: str | Path | None) -> Read:
    """Reader of a run's checkpoint, or of one that is named itself. Raises without waiting for torch."""
    if is_of_program(place):
        raise ConfigError(
            f"{place.root} is a run of another program (`program`), whose weights Forge does not read",
            cause="the model is in that program's own code, of which nothing is executed",
            fix=f"load it by that program; `forge export {place.root}` copies its files",
        )
    run = run_of(place)
    folder = str(data) if data else trusted_data(run, None)

    def chosen() -> Checkpoint:
        return resume.named(place.root) if step is None else resume.at_step(run, step)

    def read_chosen() -> Loaded:
        from forge.checkpoint.checkpoints import not_pruned
        from forge.trainer.saved_model import SavedModel

        checkpoint = chosen()
        with not_pruned(checkpoint):
            saved = SavedModel.open(checkpoint, {"data": folder})
            return saved.load(), saved.tokenizer, f"step {checkpoint.step} of {run.root}"

    def read() -> Loaded:
        from forge.checkpoint.checkpoints import Pruned

        for _ in range(MOST_READS - 1):
            try:
                return read_chosen()
            except Pruned:  # by a run that is training, if it has a newer one
                if not is_there():
                    raise
        return read_chosen()

    def is_there() -> bool:
        with suppress(DataError):
            return bool(chosen())
        return False

    chosen()
    return read


def _export(place: RunPaths, step: int | None) -> Read:
    """Reader of an export. Raises without waiting for torch."""
    if step is not None:
        raise ConfigError(
            f"{place.root} is the export of one checkpoint, and step is {step}",
            fix="leave step out, or name the run",
        )
    files = exported_files(place.root)

    def read() -> Loaded:
        from forge.trainer.saved_model import load_export

        return *load_export(files), f"export in {place.root}"

    return read


def _device(named: str | torch.device) -> torch.device:
    """Raises ConfigError where there is no such device here."""
    import torch

    try:
        device = torch.device(named)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as err:  # the latter: torch without CUDA
        there = ", ".join(["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))])
        raise ConfigError(
            f"device is {str(named)!r}, which torch cannot use here: {str(err).splitlines()[0]}",
            fix=f"name one that is there: {there}",
        ) from None
    return device


def _dtype(named: str | torch.dtype) -> torch.dtype:
    """Raises ConfigError for a type in which the model cannot compute."""
    import torch

    name = _name(named)
    if name not in DTYPES:
        raise ConfigError(
            f"dtype is {str(named)!r}, which the model cannot have",
            fix=f"choose {', '.join(DTYPES)}, or torch's name of one",
        )
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def _name(dtype: str | torch.dtype) -> str:
    """`bf16` for itself, for `bfloat16` and for `torch.bfloat16`."""
    name = str(dtype).removeprefix("torch.")
    return next((ours for ours, theirs in DTYPES.items() if theirs == name), name)


def _move(model: Decoder, device: torch.device) -> None:
    import torch

    from forge.trainer.numerics import call_each_mkl_function

    call_each_mkl_function()  # else the first forward pass may be wrong by 1e-4
    try:
        model.to(device)
    except torch.OutOfMemoryError as err:
        raise UnfitError(
            f"the model does not fit into the free memory of {device}: {str(err).splitlines()[0]}",
            cause="a large model, or another process uses the GPU",
            fix="leave out device, for the CPU; or choose another GPU, or dtype bf16",
        ) from None
