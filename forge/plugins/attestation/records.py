"""Records of what was retrained, in the directory of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forge.core.records import Record


class Reproduced(Record):
    """reproduced.json: parts of the run of the last export were retrained, as its statement says."""

    step: int
    """Of the export."""
    statement: str
    certificate: str
    """SHA-256 that each has of itself."""
    file: str
    """The certificate, relative to the run's directory."""
    steps: int
    steps_checked: int


class Certified(Record):
    """certificates/step-….result.json: the steps up to this checkpoint were retrained, or could not
    be."""

    first: int | None
    """Steps first + 1 to last; None where it was not found out."""
    last: int
    result: Literal["reproduced", "not reproduced", "unchecked"]
    is_bitwise: bool = False
    """Of reproduced steps whether all bits are equal; else they are within the tolerance."""
    why: str = ""
    """Of unchecked steps the error."""
    trained_on: list[str] = Field(default_factory=list)
    """Nodes that have trained them in the run."""
    again_on: str
    """The node that has retrained them."""
