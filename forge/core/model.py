"""Sections of `model`: scaled rotary positions, and the pretrained weights that a run starts from."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from forge.core.section import FilePath, Section
from forge.core.values import shown

HUB_NAME = r"[\w.-]+/[\w.-]+@[\w./-]+"  # owner/name@revision


class RopeScaling(Section):
    """Longer rotary wavelengths, as Llama 3.1 and later have them (`rope_type` llama3)."""

    factor: float = Field(gt=0)
    """Wavelengths above original_tokens / low_freq_factor are longer by this factor."""
    low_freq_factor: float = Field(gt=0)
    """See factor."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below original_tokens / high_freq_factor stay; those between change gradually."""
    original_tokens: int = Field(ge=1)
    """Length of the samples before the scaling (`original_max_position_embeddings`)."""

    @model_validator(mode="after")
    def _factors_are_ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be smaller than high_freq_factor"
                f" {self.high_freq_factor:g}"
            )
        return self


class Init(Section):
    """Pretrained weights that a run starts from: a repository of the hub, or a directory."""

    hub: str | None = None
    """`owner/name@revision`; downloaded on a login node."""
    path: FilePath | None = None
    """Directory with config.json, *.safetensors and, for its tokenizer, tokenizer.json."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.hub is None) == (self.path is None):
            raise ValueError("init needs one of hub and path")
        if self.hub is not None and not re.fullmatch(HUB_NAME, self.hub):
            raise ValueError(f"hub is {shown(self.hub)}; it must look like owner/name@revision")
        return self

    @property
    def name(self) -> str:
        """For people: `hub:owner/name@revision`, or the directory."""
        return f"hub:{self.hub}" if self.hub else str(self.path)
