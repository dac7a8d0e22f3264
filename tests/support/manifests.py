"""Manifests of checkpoints as training writes them, for tests that need no tensors."""

from __future__ import annotations

from typing import Any

from forge.checkpoint import directory
from forge.core.config import Ids, ResolvedConfig

IDS = Ids(tokenizer="a1b2c3d4e5f6", tokens="0f1e2d3c4b5a")


def manifest_of(step: int, config: ResolvedConfig | None = None, **facts: Any) -> dict[str, Any]:
    """Every key that a manifest must have, sealed; `facts` replace some of them."""
    config = config or ResolvedConfig(ids=IDS)
    lineage = {
        "code": {"commit": "0123abc", "dirty": True, "version": "0.1.0"},
        "config": config.to_json(),
        "config_digest": "c" * 64,
        "tokenizer": {"id": config.ids.tokenizer, "digest": "a" * 64},
        "tokens": {"id": config.ids.tokens, "digest": "b" * 64},
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "hardware": {"host": "laptop", "cpu": "Example 9000"},
        "numerics": {"device": "cpu", "precision": "fp32", "threads": 1},
    }
    manifest: dict[str, Any] = {
        "step": step,
        "world_size": 2,
        "decay_steps": config.train.decay_steps or config.train.max_steps,
        "next_sample": step * config.train.batch_size,
        "probe": {"samples": 4, "losses": [5.5, 5.6]},
        "files": {},
        "lineage": lineage,
    }
    return directory.sealed(manifest | facts)
