"""The index that torch.distributed.checkpoint (DCP) writes, `.metadata`: read without unpickling it.

The file is a pickle: a program for a small machine that can call functions and set attributes of classes.
Here an unpickler carries it out on plain values alone. A class or function is its name, and what it would
be called with is kept beside it, so that there is nothing to call and nothing to change.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from forge.checkpoint.index import MAX_DIMS, Number, Sizes
from forge.core.errors import DataError
from forge.core.files import PlainName

MAX_BYTES = 2**30  # a sparse file of terabytes costs nothing to hand out
MAX_TEXT = 4096
METADATA, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


T = TypeVar("T")


class UnknownIndexError(DataError):
    """The index has a class that Forge does not know: of a newer torch, or of the program itself."""


@dataclass(frozen=True)
class IndexedPart:
    """A part of a tensor, as the index of another program has it."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Name of the dtype in torch."""
    shape: Sizes
    file: PlainName
    start: Number
    bytes: Number


_PARTS = TypeAdapter(list[IndexedPart])


def read_pickled_index(path: Path) -> list[IndexedPart]:
    """The parts of all tensors in an index of DCP. Entries that are not tensors are left out.

    Raises DataError where it is corrupt, or asks for what no index needs; UnknownIndexError; OSError.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes")
        if not (data := path.read_bytes()).endswith(pickle.STOP):
            raise ValueError("its end is missing")
        parts = _parts(_Unpickler(io.BytesIO(data)).load(), limit=len(data))
        return _PARTS.validate_python(list(parts))
    except (DataError, OSError):
        raise
    except ValidationError as err:
        trouble = f"{err.errors()[0]['loc'][-1]}: {err.errors()[0]['msg']}"
    except Exception as err:  # any error: there are many for corrupt bytes
        trouble = f"{type(err).__name__}: {err}"
    raise DataError(
        f"{path} is not the index of a checkpoint: {trouble:.200}",
        cause="it was not written by torch.distributed.checkpoint, or it is corrupt",
        fix="do not use this checkpoint",
    )


# --- the pickle -----------------------------------------------------------------------------------


class Name(NamedTuple):
    """A class or function: its name alone."""

    module: str
    name: str


class Made:
    """An object that a pickle would make: its class or function, its arguments and attributes."""

    __slots__ = ("arguments", "by", "state")

    def __init__(self, by: Name, arguments: tuple[Any, ...]) -> None:
        self.by, self.arguments, self.state = by, arguments, None


class Pairs:
    """A dict as its pairs: nothing is hashed, which crafted keys could make slow."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


# All that torch 2.11 to 2.15 put into an index.
_KNOWN = {
    Name(module, name)
    for module, names in {
        "torch": ("Size", *DTYPES),
        "torch.serialization": ("_get_layout",),
        METADATA: (
            *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            *("TensorProperties", "TensorStorageMetadata", "ChunkStorageMetadata"),
            "BytesStorageMetadata",
        ),
        FILES: ("_StorageInfo",),
        "pathlib": ("PosixPath",),
        "pathlib._local": ("PosixPath",),
        # Early releases of Python 3.11 pickle a member of an enum so; the second name is protocol 2's.
        **dict.fromkeys(("builtins", "__builtin__"), ("getattr",)),
    }.items()
    for name in names
}
# Instructions in an index of protocol 2 to 5, besides those that `_Unpickler` has of its own.
_PLAIN = (
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL"
    " NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT"
    " SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES"
    " EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS SETITEM SETITEMS"
)
_CODES = [getattr(pickle, name)[0] for name in _PLAIN.split()]


class _Instructions(dict[int, Any]):
    """Method of an unpickler by instruction."""

    def __missing__(self, code: int) -> Any:
        raise _tampered(f"has the instruction {bytes([code])!r}")


class _Unpickler(pickle._Unpickler):
    """Python's own, with no object in it but Name, Made, Pairs and plain values. That in C, which
    plan_pickles.py has, allocates what a file asks for, and a file can change the classes allowed to it.
    """

    stack: list[Any]
    dispatch = _Instructions((code, pickle._Unpickler.dispatch[code]) for code in _CODES)

    def find_class(self, module: str, name: str) -> Any:
        if (known := Name(module, name)) in _KNOWN:
            return known
        # What a planted index would call is in the standard library.
        if module.partition(".")[0] in sys.stdlib_module_names:
            raise _tampered(f"names {module}.{name:.60}")
        raise UnknownIndexError(
            f"its index names {module:.60}.{name:.60}, which Forge does not know"
        )

    def load_pairs(self) -> None:
        self.stack.append(Pairs())

    def load_made(self) -> None:
        arguments = self.stack.pop()
        if type(by := self.stack[-1]) is not Name or type(arguments) is not tuple:
            raise _tampered(f"calls a {type(by).__name__}")
        self.stack[-1] = Made(by, arguments)

    def load_state(self) -> None:
        state = self.stack.pop()
        if type(made := self.stack[-1]) is not Made or made.state is not None:
            raise _tampered("sets attributes of what it has not just made")
        made.state = state

    dispatch[pickle.EMPTY_DICT[0]] = load_pairs
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]] = load_made
    dispatch[pickle.BUILD[0]] = load_state


def _tampered(what: str) -> DataError:
    return DataError(
        f"the checkpoint's index {what}, which no index needs",
        cause="it was not written by torch.distributed.checkpoint, or it was tampered with",
        fix="do not use this checkpoint",
    )


# --- the index in it ------------------------------------------------------------------------------


def _parts(index: Any, limit: int) -> Iterator[dict[str, Any]]:
    """The parts of the tensors, their values not checked yet. limit: more parts are refused, since a
    small file can list the same ones again and again. Raises ValueError, KeyError for data that is not
    an index.
    """
    lists = _attributes(index, Name(METADATA, "Metadata"))
    dtypes, shapes = {}, {}  # by text, whose hash nobody can choose
    for name, entry in _pairs(lists["state_dict_metadata"]):
        if type(entry) is Made and entry.by == Name(METADATA, "BytesStorageMetadata"):
            continue
        tensor = _attributes(entry, Name(METADATA, "TensorStorageMetadata"))
        dtypes[_text(name)] = _dtype(tensor["properties"])
        for chunk in _of(list, tensor["chunks"]):
            where = _attributes(chunk, Name(METADATA, "ChunkStorageMetadata"))
            shapes[name, repr(_sizes(where["offsets"]))] = _sizes(where["sizes"])
            if (limit := limit - 1) < 0:
                raise ValueError("it lists more parts of tensors than it has bytes")
    for place, info in _pairs(lists["storage_data"]):
        part = _attributes(place, Name(METADATA, "MetadataIndex"))
        if (name := _text(part["fqn"])) in dtypes:
            stored = _attributes(info, Name(FILES, "_StorageInfo"))
            yield {
                "name": name,
                "dtype": dtypes[name],
                "shape": shapes[name, repr(_sizes(part["offset"]))],
                "file": stored["relative_path"],
                "start": stored["offset"],
                "bytes": stored["length"],
            }


def _attributes(value: Any, by: Name) -> dict[str, Any]:
    """Attributes of the object that this class would make from its pickled state."""
    if _of(Made, value).by != by:
        raise ValueError(f"it has a {value.by.name} where a {by.name} should be")
    return {_text(key): attribute for key, attribute in _pairs(value.state)}


def _dtype(properties: Any) -> str:
    """The dtype of a TensorProperties, whose state is a tuple that begins with the dtype."""
    if _of(Made, properties).by != Name(METADATA, "TensorProperties"):
        raise ValueError(f"it has a {properties.by.name} where properties should be")
    dtype = _of(Name, _of(tuple, properties.state)[0])
    if dtype.module != "torch" or dtype.name not in DTYPES:
        raise ValueError(f"{dtype.name} is not a type of numbers")
    return dtype.name


def _sizes(value: Any) -> list[int]:
    """The sizes in a torch.Size, which is made from one tuple."""
    if _of(Made, value).by != Name("torch", "Size"):
        raise ValueError(f"it has a {value.by.name} where sizes should be")
    (sizes,) = value.arguments
    if len(_of(tuple, sizes)) > MAX_DIMS:
        raise ValueError(f"it has a tensor of {len(sizes)} dimensions")
    return [_of(int, size) for size in sizes]


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return _of(Pairs, value).pairs


def _text(value: Any) -> str:
    if len(_of(str, value)) > MAX_TEXT:
        raise ValueError(f"it has a name of {len(value)} characters")
    return value


def _of(kind: type[T], value: Any) -> T:
    """The value, which must be exactly of this type."""
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__} where a {kind.__name__} should be")
    return value
