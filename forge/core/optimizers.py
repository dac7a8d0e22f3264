"""The table of optimizers: what a config, a plan and a check of checkpoints know of each, without
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from forge.core import hooks


class Optimizer(NamedTuple):
    """State and messages of an optimizer. Its update is in `trainer/optimizers`, in a module of its
    name."""

    state: tuple[str, ...]
    """Names of the tensors that it keeps of a weight: in fp32, of the weight's shape."""
    scalars: tuple[str, ...] = ()
    """Names of the single numbers that it keeps of a weight, in fp32."""
    of_blocks: bool = False
    """It updates the matrices of the blocks, and AdamW all other weights."""
    exchanged_bytes: int = 0
    """Bytes of each of its weights that the ranks of a sharded model send each other in an update, there
    and back together."""
    module: str = ""
    """The module with `make`; "" for those of Forge, `trainer/optimizers/NAME.py`."""


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(state=("exp_avg", "exp_avg_sq"), scalars=("step",)),
    # Rows of all matrices in bf16 to the ranks that orthogonalize them, and back.
    "muon": Optimizer(state=("momentum_buffer",), of_blocks=True, exchanged_bytes=2 * 2),
}


def known() -> dict[str, Optimizer]:
    """All optimizers, with those of the project's plugins."""
    return {**{name: own for name, (_, own) in hooks.optimizers().items()}, **OPTIMIZERS}


def plugin_of(name: str) -> str | None:
    """The plugin of the project that has an optimizer; None for one of Forge."""
    return None if name in OPTIMIZERS else hooks.optimizers()[name][0]


def _is_known(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    names = [*known()]  # a list: the value may be one that cannot be hashed
    if value not in names:
        raise ValueError(f"must be one of {', '.join(names)}")
    return value


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = SerializeAsAny[Annotated[Literal[tuple(OPTIMIZERS)], WrapValidator(_is_known)]]


def moments(name: str) -> tuple[int, int]:
    """Numbers that a run with this optimizer keeps of each weight in the blocks, and of each outside."""
    own = known()[name]
    others = OPTIMIZERS["adamw"] if own.of_blocks else own
    return len(own.state), len(others.state)
