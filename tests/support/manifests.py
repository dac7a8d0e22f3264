"""Checkpoints as training commits them, for tests that need no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.checkpoint import directory
from forge.checkpoint.manifest import (
    MANIFEST,
    Artifact,
    Code,
    Hardware,
    Lineage,
    Manifest,
    Numerics,
    RecordedConfig,
    ReferenceLosses,
    SealLineage,
    SkippedSteps,
    StoredFile,
    Versions,
)
from forge.core.config import Ids, ResolvedConfig
from forge.core.files import canonical, digest_bytes, read_json, write_json
from forge.core.paths import RunPaths

IDS = Ids(tokenizer="a1b2c3d4e5f6", tokens="0f1e2d3c4b5a")
NUMERICS = Numerics(
    device="cpu",
    device_name="cpu",
    precision="fp32",
    threads=1,
    gpu_products="ieee",
    cpu_products="onednn",
    cpu_capability="AVX2",
)

MADE_BY = SealLineage(  # a checkpoint of another program
    run="p",
    config_digest="0" * 64,
    command=["python"],
    source=None,
    inputs=None,
    world_size=2,
    code=Code(version="0.1.0", commit=None, dirty=None),
)


def manifest_of(step: int, config: ResolvedConfig | None = None, **facts: Any) -> Manifest:
    """A manifest of two ranks, not sealed; `facts` replace some of its keys."""
    config = config or ResolvedConfig(ids=IDS)
    values: dict[str, Any] = {
        "step": step,
        "world_size": 2,
        "decay_steps": config.train.decay_steps or config.train.max_steps,
        "why_not_compiled": "train.compile is false, or null on a CPU",
        "next_sample": step * config.train.batch_size,
        "skipped": SkippedSteps(steps=0, in_a_row=0),
        "reference": ReferenceLosses(samples=4, losses=[5.5, 5.6]),
        "files": {},
        "lineage": lineage_of(config),
        "mix": None,
        "spike_window": [],
    }
    return Manifest(**values | facts)


def lineage_of(config: ResolvedConfig, **facts: Any) -> Lineage:
    """What made it, on a made-up host; `facts` replace some of its keys."""
    values: dict[str, Any] = {
        "code": Code(commit="0123abc", dirty=True, version="0.1.0"),
        "config": RecordedConfig.of(config),
        "config_digest": "c" * 64,
        "tokenizer": Artifact(id=config.ids.tokenizer, digest="a" * 64),
        "tokens": Artifact(id=config.ids.tokens, digest="b" * 64),
        "versions": Versions(python="3.11.9", torch="2.13.0", torchao=None),
        "hardware": Hardware(host="laptop", cpu="Example 9000"),
        "numerics": NUMERICS,
        "parent": None,
        "sources": {},
        "model": None,
        "packages": {"numpy": "2.3.4", "torch": "2.13.0"},
    }
    return Lineage(**values | facts)


def stored(content: bytes) -> StoredFile:
    """The entry of a file with this content."""
    return StoredFile(bytes=len(content), digest=digest_bytes(content))


def write_as_another_program(folder: Path, **changed: Any) -> None:
    """Change keys of the manifest in a folder, and give it the digest of the new content."""
    content = {**read_json(folder / MANIFEST), **changed}
    del content["digest"]
    write_json(folder / MANIFEST, {**content, "digest": digest_bytes(canonical(content))})


def save(
    paths: RunPaths,
    step: int,
    *,
    config: ResolvedConfig | None = None,
    keep_last: int = 2,
    keep_every: int | None = None,
    content: bytes = b"weights",
    **facts: Any,
) -> directory.Checkpoint:
    """Commit a checkpoint of one file; `facts` replace keys of its manifest."""
    folder = directory.begin(paths, step)
    (folder / "__0_0.distcp").write_bytes(content)
    manifest = manifest_of(step, config, files={"__0_0.distcp": stored(content)}, **facts)
    return directory.commit(paths, folder, manifest, keep_last, keep_every)


def names(folder: Path) -> set[str]:
    """Names of what is in a folder."""
    return {path.name for path in folder.iterdir()}
