"""Models of GPUs, found from the names that sites give GPUs and nodes in Slurm."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU. name: "" where Slurm says none that is known here. memory_gib: of one; None where
    the name does not say it. rank: 0 is the best for training. maker: where that is not NVIDIA."""

    name: str = ""
    memory_gib: int | None = None
    rank: int = 99
    maker: str = ""
    is_usual_size: bool = False
    """Whether the memory is that of most GPUs of this name, and the site has not said it."""

    @property
    def is_planned(self) -> bool:
        """Return whether `forge plan` knows its speed."""
        return bool(self.name) and self.name not in _WITHOUT_SPEED

    @property
    def text(self) -> str:
        """For people."""
        size = f" {self.memory_gib} GiB" if self.memory_gib else ""
        return f"{self.name or 'GPU of unknown model'}{size}"


# Best for training first. The names are those of trainer.metrics.PEAK_BF16_FLOPS. Memory in GiB as
# nvidia-smi shows it, rounded down; None where several sizes are sold under the name.
_MODELS: tuple[tuple[str, str, int | None], ...] = (
    ("gb200", "GB200", 184),
    ("b200", "B200", 178),
    ("h200 nvl", "H200 NVL", 140),
    ("gh200", "GH200", None),
    ("h200", "H200", 140),
    ("h100 nvl", "H100 NVL", 93),
    ("h100 pcie", "H100 PCIe", 79),
    ("h100", "H100", None),
    ("rtx ?pro ?6000", "RTX PRO 6000", 95),
    ("a100", "A100", None),
    ("l40s", "L40S", 44),
    ("l40", "L40", 44),
    ("a40", "A40", 44),
    ("rtx ?a6000|a6000", "RTX A6000", 47),
    ("v100s?", "V100", None),
)
_WITHOUT_SPEED = frozenset({"L40", "A40", "RTX A6000", "V100"})
_OTHERS = (
    (r"mi ?[1-4]\d\d[a-z]*|gfx\d\w*|instinct|radeon", "AMD"),
    (r"pvc|ponte ?vecchio|max ?1[15]\d0|gaudi\d?", "Intel"),
)
# GB in the names of types and features (`a100 80gb`, `hbm40g`, `a100_80`) -> GiB as nvidia-smi shows it.
_SIZES = {16: 15, 32: 31, 40: 39, 64: 63, 80: 79, 94: 93, 96: 95, 141: 140, 144: 143}
_SLICE = re.compile(r"\d+g\.\d+gb|(?<![a-z])mig(?![a-z])")  # 1g.10gb, a100_3g.20gb


def is_slice(kind: str) -> bool:
    """Return whether this type of GPU is a part of one (MIG): NCCL joins no two of them."""
    return bool(_SLICE.search(kind.lower()))


def model_of(kind: str, features: Collection[str] = ()) -> GpuModel:
    """The GPU of this type in Slurm (`h100`, `nvidia_a100-sxm4-40gb`, "" for none) on nodes with these
    features."""
    of_node = _words(" ".join(sorted(features)))
    for text in (_words(kind), of_node):
        for pattern, maker in _OTHERS:
            if match := _find(pattern, text):
                return GpuModel(match.upper(), maker=maker)
        for rank, (pattern, name, usual) in enumerate(_MODELS):
            if _find(pattern, text):
                size = _size(text) or _size(of_node)
                return GpuModel(name, size or usual, rank, is_usual_size=not size and bool(usual))
    return GpuModel()


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.lower())


def _find(pattern: str, text: str) -> str:
    match = re.search(rf"(?<![a-z0-9])(?:nvidia)?({pattern})(?![a-z0-9])", text)
    return match[1] if match else ""


def _size(text: str) -> int | None:
    """GiB where the words name one size."""
    sizes = re.findall(r"(?<!\d)(\d{2,3})gb?(?![a-z0-9])|[ah]100 (\d{2,3})(?![a-z0-9])", text)
    known = {_SIZES[int(a or b)] for a, b in sizes if int(a or b) in _SIZES}
    return known.pop() if len(known) == 1 else None
