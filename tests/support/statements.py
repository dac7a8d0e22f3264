"""Statements that are edited by somebody who knows how their digests are made."""

from __future__ import annotations

from typing import Any

from forge.attestation import verify


def make_consistent(content: dict[str, Any]) -> None:
    """Give the links of a changed statement, and the statement, the digests of what they have now."""
    previous = ""
    for link in content["predicate"]["chain"]:
        link["previous"] = previous
        previous = verify.sha256(verify.canonical(link))
    content["predicate"]["sha256"] = verify.statement_digest(content)
