"""Records of tracking."""

from __future__ import annotations

from pydantic import Field

from forge.core.records import Record


class Sent(Record):
    """tracking/NAME.json: what this tracker has been sent."""

    FIX = "remove it: everything is then sent again, to a new run of the tracker"

    id: str = Field(pattern=r"^[0-9a-f]{8}$")
    """Id of the tracked run, the same over all restarts."""
    step: int = -1
    """All rows up to this step are sent."""
    complete: bool = False
    """Nothing was left to send when the sending process ended."""
    folder: str = ""
    """Name of the directory in which the tracker records until it is finished, if what is there is lost
    with its process; else empty."""
    before: int = -1
    """`step` when that directory was begun."""
