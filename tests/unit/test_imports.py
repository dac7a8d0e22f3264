"""Packages import only packages to their left, and torch stays where tensors are: a login node must not
wait for it."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import forge

FOLDER = Path(forge.__file__).parent
# In the order of the rule. Modules beside them (cli, workflow, …) start Forge and may import every one.
PACKAGES = (
    *("core", "cluster", "data", "launch", "checkpoint", "trainer", "tracking", "evaluation"),
    *("staging", "preflight", "validation", "run", "reporting", "attestation", "controller"),
    "commands",
)

# These start every part of Forge.
START = {"cli", "workflow", "worker"}

MODULES = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path
    for path in sorted(FOLDER.rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}

TENSORS = {
    "trainer.divergence",
    *(
        "data.loader",
        "launch.device",
        "launch.process_group",
        "launch.torch_private",
        "launch.torchrun",
        "checkpoint.storage",
        "checkpoint.async_saver",
        "checkpoint.plan_pickles",
        "checkpoint.save_plan",
    ),
    *("checkpoint.pickled_index", "checkpoint.program_tensors"),
    *("trainer.loss", "trainer.muon", "trainer.numerics", "trainer.optim"),
    *("trainer.models.decoder", "trainer.models.gpt2_decoder", "trainer.models.llama_decoder"),
    "trainer.documents",
    *("trainer.initialize", "trainer.transforms"),
    *(
        "trainer.parallel",
        "trainer.validation_loss",
        "trainer.source_mix",
        "trainer.step",
        "trainer.start",
        "trainer.loop",
    ),
    *("trainer.export",),
    "trainer.pretrained",
    *("preflight.rank_probe", "validation.replay_rank", "validation.rank_losses"),
    *("validation.model_checks", "hf_callback", "evaluation.harness", "evaluation.evaluate"),
}


EXECUTOR = FOLDER.parent / "snakemake_executor_plugin_forge/__init__.py"


def test_page_of_the_architecture_shows_this_order():
    assert " < ".join(PACKAGES) in (FOLDER.parent / "docs/architecture.md").read_text()


def place(module):
    """Where a module stands from the left to the right."""
    package = module.split(".")[0]
    return PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)


def imports(module):
    """Modules and packages of forge that this one imports, anywhere in the file."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "forge":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge."):
            package = node.module.removeprefix("forge.")
            yield package
            yield from (n for a in node.names if (n := f"{package}.{a.name}") in MODULES)
        elif isinstance(node, ast.Import):
            yield from (n.name[6:] for n in node.names if n.name.startswith("forge."))


def test_executor_imports_only_what_is_about_slurm():
    """Every Snakemake that finds it imports it, also for workflows of others."""
    nodes = ast.walk(ast.parse(EXECUTOR.read_text()))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    own = [name for name in names if name.startswith("forge")]
    assert own and all(name.startswith("forge.cluster.") for name in own)


def test_every_folder_is_a_package_of_the_rule():
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == set(PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_packages_import_only_packages_to_their_left(module):
    if place(module) < len(PACKAGES):
        assert [name for name in imports(module) if place(name) > place(module)] == []


def modules_imported(module):
    """The modules, not packages, of forge that a module imports."""
    return {name for name in imports(module) if name in MODULES}


def test_no_module_imports_itself_through_others():
    graph = {module: modules_imported(module) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as err:
        pytest.fail("a circle: " + " -> ".join(err.args[1]))


@pytest.mark.parametrize("module", sorted(MODULES.keys() - START))
def test_a_module_imports_at_most_25_others(module):
    """One that needs more does the work of two."""
    assert len(modules_imported(module)) <= 25


def test_a_class_name_stands_in_one_module_only():
    where = defaultdict(set)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def test_a_module_has_a_name_of_its_own():
    names = Counter(module.rpartition(".")[2] for module in MODULES)
    assert [name for name, times in names.items() if times > 1] == []


def places_that_read(attribute, of):
    """Module and line of each `of.attribute`, also at the end of a longer name."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == attribute:
                name = getattr(node.value, "attr", getattr(node.value, "id", ""))
                if name == of:
                    yield f"{module}:{node.lineno}"


def test_at_most_eight_places_ask_which_program_trains_a_run():
    """All others ask the TrainingProgram that `run.programs` gives them."""
    places = list(places_that_read("program", of="config"))
    assert "run.programs" in {place.partition(":")[0] for place in places}
    assert len(places) <= 8, places


def test_only_the_modules_of_an_architecture_name_its_layers():
    layers = {"q_proj", "gate_proj", "embed_tokens", "c_attn", "wte"}
    naming = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if getattr(node, "attr", "") in layers
        or (isinstance(node, ast.Constant) and node.value in layers)
    }
    assert naming == {"trainer.models.llama_decoder", "trainer.models.gpt2_decoder"}


def test_the_check_sees_imports():
    seen = {*imports("cli"), *imports("commands.run_steps"), *imports("worker")}
    assert {"staging.stage", "core.errors", "trainer"} <= seen


def test_torch_is_imported_only_where_tensors_are():
    free = ["forge." + module for module in MODULES if module not in TENSORS]
    free.append(EXECUTOR.parent.name)
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, module + ' imports torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *free], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", sorted(TENSORS))
def test_modules_of_tensors_do_import_torch(module):
    """Else the table above grants what nobody needs."""
    of_others = TENSORS.intersection(imports(module))
    assert of_others or "import torch" in MODULES[module].read_text()
