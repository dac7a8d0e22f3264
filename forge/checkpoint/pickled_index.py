"""The index that torch.distributed.checkpoint (DCP) writes, `.metadata`: read without unpickling it.

The file is a pickle: a program for a small machine that can call functions and set attributes of classes.
Here its instructions are carried out on plain values alone. A class or function is its name, and what it
would be called with is kept beside it, so that there is nothing to call and nothing to change.
"""

from __future__ import annotations

import io
import pickle as op
import pickletools
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
        return _read(path.read_bytes())
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


def _read(data: bytes) -> list[IndexedPart]:
    return _PARTS.validate_python(list(_parts(_carried_out(data), limit=len(data))))


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


# All that torch 2.11 to 2.15 put into an index.
_KNOWN = {
    Name("torch", "Size"),
    Name("torch.serialization", "_get_layout"),
    *(Name("torch", name) for name in DTYPES),
    *(
        Name(METADATA, name)
        for name in (
            *(
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
            ),
            *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
        )
    ),
    Name(FILES, "_StorageInfo"),
    Name("pathlib", "PosixPath"),
    Name("pathlib._local", "PosixPath"),
    Name("builtins", "getattr"),  # early releases of Python 3.11 pickle a member of an enum so
}
# The instructions, each a byte.
_NUMBERS = {op.BININT, op.BININT1, op.BININT2, op.LONG1, op.LONG4, op.BINFLOAT}
_TEXTS = {op.SHORT_BINUNICODE, op.BINUNICODE, op.BINUNICODE8, op.SHORT_BINBYTES, op.BINBYTES}
_CONSTANTS = {op.NONE: None, op.NEWTRUE: True, op.NEWFALSE: False, op.EMPTY_TUPLE: ()}
_TUPLES = {op.TUPLE1: 1, op.TUPLE2: 2, op.TUPLE3: 3}
_LISTS, _DICTS = {op.APPEND, op.APPENDS}, {op.SETITEM, op.SETITEMS}
_MAKING = {op.GLOBAL, op.STACK_GLOBAL, op.NEWOBJ, op.REDUCE, op.BUILD}


def _carried_out(data: bytes) -> Any:
    """The value of a pickle of protocol 2 to 5, made of plain values, Name, Made and Pairs."""
    machine = _Machine()
    for code, argument, _ in pickletools.genops(io.BytesIO(data)):
        if code.name == "STOP":
            return machine.stack.pop()
        machine.step(code.code.encode("latin-1"), argument)
    raise ValueError("it has no end")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, code: bytes, argument: Any) -> None:
        stack = self.stack
        if code in _NUMBERS or code in _TEXTS:
            stack.append(argument)
        elif code == op.MEMOIZE:
            self.memo[len(self.memo)] = stack[-1]
        elif code in (op.BINGET, op.LONG_BINGET):
            stack.append(self.memo[argument])
        elif code in (op.BINPUT, op.LONG_BINPUT):
            self.memo[argument] = stack[-1]
        elif code == op.MARK:
            self.marks.append(len(stack))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in (op.EMPTY_LIST, op.EMPTY_DICT):
            stack.append([] if code == op.EMPTY_LIST else Pairs())
        elif code in _TUPLES or code == op.TUPLE:
            items = self._last(_TUPLES[code]) if code in _TUPLES else self._since_mark()
            stack.append(tuple(items))
        elif code in _LISTS or code in _DICTS:
            self._collect(code)
        elif code in _MAKING:
            self._make(code, argument)
        elif code not in (op.PROTO, op.FRAME):
            raise _tampered(f"has the instruction {code!r}")

    def _collect(self, code: bytes) -> None:
        """Put what is last on the stack into the list or the dict before it."""
        if code in _LISTS:
            items = self._since_mark() if code == op.APPENDS else self._last(1)
            list.extend(self.stack[-1], items)
        else:
            items = self._since_mark() if code == op.SETITEMS else self._last(2)
            pairs: list[tuple[Any, Any]] = self.stack[-1].pairs
            pairs += zip(items[::2], items[1::2], strict=True)

    def _make(self, code: bytes, argument: Any) -> None:
        """Put a name on the stack, or what would be made by one."""
        stack = self.stack
        if code == op.GLOBAL:
            stack.append(_known(*argument.split(" ", 1)))
        elif code == op.STACK_GLOBAL:
            stack.append(_known(*self._last(2)))
        elif code == op.BUILD:
            (state,) = self._last(1)
            if type(stack[-1]) is not Made or stack[-1].state is not None:
                raise _tampered("sets attributes of what it has not just made")
            stack[-1].state = state
        else:
            by, arguments = self._last(2)
            if type(by) is not Name or type(arguments) is not tuple:
                raise _tampered(f"calls a {type(by).__name__}")
            stack.append(Made(by, arguments))

    def _last(self, number: int) -> list[Any]:
        """Take so many values from the stack, none from before a mark."""
        start = len(self.stack) - number
        if start < (self.marks[-1] if self.marks else 0):
            raise ValueError("it takes values that are not there")
        return self._from(start)

    def _since_mark(self) -> list[Any]:
        return self._from(self.marks.pop())

    def _from(self, start: int) -> list[Any]:
        taken = self.stack[start:]
        del self.stack[start:]
        return taken


def _known(module: Any, name: Any) -> Name:
    """The name of what an index may have. Raises DataError, UnknownIndexError for any other."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise _tampered("names what is not text")
    if (known := Name(module, name)) in _KNOWN:
        return known
    # What a planted index would call is in the standard library.
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise _tampered(f"names {module}.{name:.60}")
    raise UnknownIndexError(f"its index names {module:.60}.{name:.60}, which Forge does not know")


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
