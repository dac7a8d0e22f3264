"""Statements that are made or edited by somebody who knows how their digests are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.attestation import verify
from forge.core.files import write_json


def make_consistent(content: dict[str, Any]) -> None:
    """Give the links of a changed statement, and the statement, the digests of what they have now."""
    previous = ""
    for link in content["predicate"]["chain"]:
        link["previous"] = previous
        previous = verify.sha256(verify.canonical(link))
    content["predicate"]["sha256"] = verify.statement_digest(content)


def make_export(folder: Path) -> Path:
    """A directory of two files with a statement of its own, which verifiers accept; no model."""
    named: dict[str, dict[str, Any]] = {
        "texts": {"files": {}},
        "tokenizer": {"id": "t", "blake3": "b1", "origin": None},
        "tokens": {"id": "k", "blake3": "b2", "sources": None},
        "config": {"blake3": "b3", "values": {}},
        "code": {"forge": {"version": "1", "commit": None, "dirty": None}},
        "environment": dict.fromkeys(("versions", "packages", "cpu", "numerics", "launch")),
        "parents": {"checkpoint": None, "weights": None},
        "checkpoints": {"saved": [{"step": 10, "blake3": "c1", "is_kept": True}]},
        "launches": {"launches": []},
        "export": {"run": "base", "step": 10, "checkpoint": "c1", "dtype": "fp32", "weights": "w1"},
        "validation": dict.fromkeys(("status", "loss", "depth", "checks")),
        "scores": {"harness": "", "scores": []},
    }
    facts = {"step": 10, "checkpoint_digest": "c1", "weights_digest": "w1", "config_digest": "b3"}
    facts |= {
        name: {"id": i, "digest": d}
        for name, i, d in (("tokenizer", "t", "b1"), ("tokens", "k", "b2"))
    }
    folder.mkdir()
    write_json(folder / "forge.json", facts)
    (folder / "model.safetensors").write_bytes(b"weights")
    content = {
        "_type": verify.IN_TOTO,
        "predicateType": verify.PREDICATE,
        "subject": [
            {"name": name, "digest": {"sha256": verify.file_digest(folder / name)[0]}}
            for name in verify.files_in(folder)
        ],
        "predicate": {
            "format": 1,
            "forge": "1",
            "chain": [{"link": name, **values} for name, values in named.items()],
        },
    }
    make_consistent(content)
    write_json(folder / verify.STATEMENT, content)
    return folder
