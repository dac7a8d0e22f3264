"""A project with a plugin, and a process that has not used any yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from support.pages import OWN_PLUGINS, ROOT, blocks_of

from forge.core import hooks, project_plugins

# Llama by another name, with layers of its own.
HOOKS = """
from typing import ClassVar, Literal

from forge.core.hooks import hook
from forge.core.models.llama import Llama
from forge.core.optimizers import Optimizer


class Twin(Llama):
    LAYERS: ClassVar[str] = f"{__package__}.layers"
    architecture: Literal["twin"]


@hook
def architectures():
    return {"twin": Twin}


@hook
def optimizers():
    return {"adam2": Optimizer(("exp_avg", "exp_avg_sq"), ("step",), module=f"{__package__}.layers")}
"""
LAYERS = """
from forge.trainer.models.llama_decoder import LlamaDecoder
from forge.trainer.optimizers.adamw import make


class TwinDecoder(LlamaDecoder):
    pass


DECODER = TwinDecoder
"""


def write_plugin(folder: Path, hooks_text: str = HOOKS, layers: str = LAYERS) -> Path:
    """The plugin in a directory, which names it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hooks.py").write_text(hooks_text)
    (folder / "layers.py").write_text(layers)
    return folder


def write_documented(root: Path, name: str) -> Path:
    """The file `plugins/…` of the page for users, in a project: its first line there is its name."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(documented(f"# {name}"))
    return path


def documented(first: str) -> str:
    """The block of the page for users with this first line."""
    texts = [block.text for block in blocks_of(OWN_PLUGINS, (ROOT / OWN_PLUGINS).read_text())]
    [text] = [text for text in texts if text.splitlines()[0] == first]
    return text


@contextmanager
def fresh_process() -> Iterator[None]:
    """As a process that has imported no plugin of a project; afterwards as before."""
    modules, finders = set(sys.modules), [*sys.meta_path]
    with (
        mock.patch.object(project_plugins, "_used", {}),
        mock.patch.object(project_plugins, "_may_change", set()),
        mock.patch.object(hooks, "_architectures", {}),
        mock.patch.object(hooks, "_optimizers", {}),
        mock.patch.object(hooks, "_trackers", {}),
        mock.patch.object(hooks, "_node_checks", []),
        mock.patch.object(hooks, "_rule_files", []),
        mock.patch.object(hooks, "_of_project", {}),
        mock.patch.object(hooks, "_text_formats", {}),
    ):
        yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.startswith(project_plugins.PACKAGE):
            del sys.modules[name]
