"""Imports point only down, and torch stays where tensors are: else a login node waits for it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forge

FOLDER = Path(forge.__file__).parent

# From the bottom up; a module imports from rows above its own in this table only.
LAYERS = (
    # words for people
    "errors progress stopping tail log_errors bisection points grace plain_text pending",
    # what people write
    "values",
    # config, small files, who am I
    "config manifest launch process console slurm",
    # names, machine, formats of files
    "paths machine ledger lease lineage runs corpus shards jobs bad_nodes nonfinite checkpoint_shape"
    " partitions job_requests",
    # geometry and environment of ranks; what Slurm could start
    "geometry submission",
    # launching, what is on disk
    "artefacts crew packs fabric launcher metrics store gate history config_docs cpu loss job_watch",
    # parts of the verbs
    "loader model numerics optim world tokenizer summary charts broadcast node_staging node_checks"
    " parent",
    "checkpoints encoding project staged rank_checks allocation",
    # the halves of `stage` and `preflight` that are for several nodes
    "staging_nodes probing restarts saver parallel resume continuation",
    # verbs, and their halves that run in ranks
    "tokenization staging preflight fit trainer report show logs status export preflight_rank",
    # what those need of each other
    "reload examination",
    "validation rank node",
    # what starts the verbs: the command, and the helpers of the Snakefile
    "cli workflow",
    "__main__",
)
LAYER = {module: number for number, row in enumerate(LAYERS) for module in row.split()}

TENSORS = {
    *(
        "cpu",
        "loss",
        "loader",
        "model",
        "numerics",
        "optim",
        "world",
        "checkpoints",
        "saver",
        "parallel",
    ),
    *("trainer", "preflight_rank", "reload", "examination", "validation", "export"),
}


def imports(module):
    """Modules of forge that this one imports, anywhere in the file."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "forge":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {n.name.split(".")[1] for n in node.names if n.name.startswith("forge.")}
    return found


def test_every_module_has_one_layer():
    modules = [path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"]
    assert sorted(LAYER) == sorted(modules)
    assert len(LAYER) == sum(len(row.split()) for row in LAYERS)


@pytest.mark.parametrize("module", LAYER)
def test_imports_point_only_down(module):
    upwards = [name for name in imports(module) if LAYER[name] >= LAYER[module]]
    assert upwards == []


def test_the_check_sees_imports():
    assert {"config", "errors", "launch", "staging", "trainer"} & imports("cli") >= {"staging"}
    assert "trainer" in imports("rank")


def test_torch_is_imported_only_where_tensors_are():
    free = [module for module in LAYER if module not in TENSORS | {"__main__"}]
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module('forge.' + module)\n"
        "    assert 'torch' not in sys.modules, module + ' imports torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *free], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", sorted(TENSORS))
def test_modules_of_tensors_do_import_torch(module):
    """Else the table above grants what nobody needs."""
    assert "import torch" in (FOLDER / f"{module}.py").read_text()
