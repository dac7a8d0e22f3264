"""Checks the shape of `checkpoint.json` before anything else reads it: keys, types and bounds. No torch.

A manifest may carry a matching digest and still be wrong: another program or a person may have made
it. Keys that are not named here are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Steps, sizes and counts fit into 64 bits: sums and names of files with them cannot overflow.
Count = Annotated[int, Field(ge=0, lt=2**63)]
# A plain name in the checkpoint's directory: 255 bytes is the limit of Linux (man 7 path_resolution).
FileName = Annotated[str, Field(pattern=r"^[^/\x00]{1,255}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _File(_Part):
    bytes: Count
    digest: str


class _Artefact(_Part):
    digest: str


class _Ids(_Part):
    tokenizer: str
    tokens: str


class _Model(_Part):
    dropout: float


class _Train(_Part):
    parallel: str
    compile: bool


class _Config(_Part):
    model: _Model
    train: _Train
    ids: _Ids


class _Numerics(_Part):
    device: str
    precision: Literal["fp32", "bf16"]
    threads: Annotated[int, Field(ge=1, le=2**16)]


class _Versions(_Part):
    torch: str


class _Hardware(_Part):
    cpu: str


class _Parent(_Part):
    run: str
    step: Count
    digest: str


class _Lineage(_Part):
    code: dict[str, Any]
    config: _Config
    config_digest: str
    tokenizer: _Artefact
    tokens: _Artefact
    numerics: _Numerics
    versions: _Versions
    hardware: _Hardware
    parent: _Parent | None = None


class _Probe(_Part):
    losses: list[float]


class _Manifest(_Part):
    step: Count
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    decay_steps: Count
    next_sample: Count
    files: dict[FileName, _File]
    probe: _Probe
    lineage: _Lineage


def trouble(manifest: dict[str, Any]) -> str:
    """The first key that is missing or wrong, with the reason; empty where the manifest is one."""
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as err:
        first = err.errors()[0]
        return f"{'.'.join(str(part)[:60] for part in first['loc'])}: {first['msg']}"
    return ""
