"""The index of a checkpoint, `index.json`: where each part of each tensor is. No torch.

A checkpoint may come from elsewhere, and whoever made it has made its digests as well. So the index is
JSON, which is read without running anything, and every name, size and type in it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar, Literal, Self

import orjson
from pydantic import ConfigDict, Field, model_validator

from forge.core.files import MAX_JSON_BYTES, PlainName
from forge.core.records import Record

INDEX = "index.json"
DCP_INDEX = ".metadata"  # of another program, in each directory of torch.distributed.checkpoint
# Types of weights and optimizer states, as torch names them.
Dtype = Literal["float32", "float64", "bfloat16", "float16", "int64"]
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8}
MAX_DIMS = 64  # of torch

Number = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Sizes = Annotated[list[Number], Field(max_length=MAX_DIMS)]
TensorName = Annotated[str, Field(pattern=r"^[!-~]{1,1000}$")]


# Dataclasses: with a model for each part, an index of thousands of tensors took twice as long.
@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor: where it begins in the tensor, its shape, and its bytes in a file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    offset: Sizes
    shape: Sizes
    file: PlainName
    start: Number
    bytes: Number


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, whose parts are the bytes of its numbers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dtype: Dtype
    shape: Sizes
    parts: list[StoredPart]

    def trouble(self) -> str:
        """Trouble with the tensor's parts; "" where they make up all of the tensor."""
        item, shape, numbers = ITEM_BYTES[self.dtype], self.shape, 0
        if prod(size or 1 for size in shape) * item >= 2**63:
            return "its shape is larger than any memory"
        for part in self.parts:
            ends = list(map(int.__add__, part.offset, part.shape))
            is_inside = len(part.offset) == len(part.shape) == len(shape)
            if not is_inside or any(map(int.__gt__, ends, shape)):
                return f"its part at {part.offset} is not inside"
            if part.bytes != (size := prod(part.shape)) * item:
                return f"its part at {part.offset} has {part.bytes} bytes"
            numbers += size
        is_unique = len({tuple(part.offset) for part in self.parts}) == len(self.parts)
        return "" if numbers == prod(shape) and is_unique else "its parts are not all of it"


class Index(Record):
    """index.json: the tensors of a checkpoint by name."""

    FIX: ClassVar[str] = "do not use this checkpoint"
    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    tensors: dict[TensorName, StoredTensor]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name, tensor in self.tensors.items():
            if trouble := tensor.trouble():
                raise ValueError(f"{name}: {trouble}")
        return self


def index_bytes(tensors: dict[str, StoredTensor]) -> bytes:
    """The content of index.json; equal tensors in equal places give equal bytes."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    data = orjson.dumps({"format": Index.FORMAT, "tensors": tensors}, option=options)
    assert len(data) <= MAX_JSON_BYTES, f"an index of {len(data)} bytes would not be read"
    return data
