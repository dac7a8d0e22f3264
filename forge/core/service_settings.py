"""Sections that training does not read: `validate` and `report`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge.core.section import Section


class ValidateSettings(Section):
    """Checks that validation makes of the final checkpoint."""

    depth: Literal["digests", "load", "probe"] = "probe"
    """`digests`: of all files; `load`: also load every tensor; `probe`: also recompute losses, of
    8 ranks at most."""


class Report(Section):
    """Samples in the report."""

    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=["def ", "class ", "import "], max_length=16
    )
    """The model completes each prompt; report and `forge show` have the samples."""
    sample_tokens: int = Field(40, ge=1, le=1024)
    """Tokens to generate per prompt. The model sees the last train.seq_len tokens only."""
