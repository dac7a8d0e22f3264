"""Small settings of each model architecture, for tests that hold for all of them."""

from __future__ import annotations

import pytest

from forge.core.models.architectures import ARCHITECTURES
from forge.core.models.base import Model

SIZES = {"dim": 32, "layers": 2, "heads": 4}
# Keys of its own where an architecture is not small by its defaults, or has more to test.
OWN = {"llama": {"kv_heads": 2, "ffn_dim": 96}, "gpt2": {"positions": 64}}

SMALL: dict[str, Model] = {
    name: model(architecture=name, **SIZES, **OWN.get(name, {}))
    for name, model in ARCHITECTURES.items()
}
each_architecture = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)


def changed(settings: Model, **keys: object) -> Model:
    return settings.model_copy(update=keys)
