"""Packages import only packages to their left, and torch stays where tensors are: a login node must not
wait for it.

Each rule is a function that lists every breach in the trees of all modules, with file, line and what is
allowed. Below each rule, it finds a breach that is planted.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import forge

FOLDER = Path(forge.__file__).parent
# In the order of the rule. Modules beside them (cli, worker, …) start Forge and may import every one.
PACKAGES = (
    *("attestation", "core", "slurm", "hosts", "data", "launch", "checkpoint", "trainer"),
    *("staging", "preflight", "validation", "run", "reporting", "commands", "flow"),
)

# These start every part of Forge.
START = {"batch_step", "cli", "worker"}

# Those of an architecture and of an optimizer are here by their packages.
TENSORS = {
    *("trainer.divergence", "trainer.models.decoder"),
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
    *("trainer.loss", "trainer.numerics", "trainer.optim"),
    "trainer.documents",
    *("trainer.initialize", "trainer.transforms"),
    *(
        "trainer.parallel",
        "trainer.validation_loss",
        "trainer.step",
        "trainer.shard_check",
        "trainer.start",
        "trainer.loop",
    ),
    *("trainer.export", "trainer.saved_model"),
    "trainer.pretrained",
    *("preflight.rank_probe", "validation.replay_rank", "validation.rank_losses"),
    *(
        "validation.model_checks",
        "hf_callback",
        "plugins.evaluation.harness",
        "plugins.evaluation.evaluate",
        "plugins.merge.merge",
        "plugins.merge.verify",
    ),
}


EXECUTOR = FOLDER.parent / "snakemake_executor_plugin_forge/__init__.py"

MOST_IMPORTS = 25
MOST_THAT_ASK_FOR_THE_PROGRAM = 8
HAVE_LAYERS = ("trainer.models.",)
HAVE_TENSORS = (*HAVE_LAYERS, "trainer.optimizers.")

Trees = dict[str, list[ast.AST]]  # module -> all nodes of its tree


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts)


def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


# Each file is parsed once, for all rules.
TREES: Trees = {
    name_of(path): nodes_of(path.read_text())
    for path in sorted(FOLDER.rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}
TENSORS |= {module for module in TREES if module.startswith(HAVE_TENSORS)}


# --- what the rules read --------------------------------------------------------------------------


def at(module: str, line: int) -> str:
    return f"forge/{module.replace('.', '/')}.py:{line}"


def place(module: str) -> int:
    """Where a module stands from the left to the right."""
    package = module.partition(".")[0]
    return PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)


def imports(module: str, trees: Trees) -> Iterator[tuple[int, str]]:
    """(line, name) of modules and packages of forge that this one imports, anywhere in the file."""
    for node in trees[module]:
        if isinstance(node, ast.ImportFrom) and node.module == "forge":
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge."):
            package = (node.module or "").removeprefix("forge.")
            yield node.lineno, package
            below = (f"{package}.{name.name}" for name in node.names)
            yield from ((node.lineno, name) for name in below if name in trees)
        elif isinstance(node, ast.Import):
            names = (name.name for name in node.names)
            yield from ((node.lineno, name[6:]) for name in names if name.startswith("forge."))


def modules_named(tree: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, full name) of the modules in its import statements, of forge or of others."""
    for node in tree:
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)


def running(trees: Trees) -> Trees:
    """The trees without what is below `if TYPE_CHECKING:`, which no process imports."""
    kept: Trees = {}
    for module, tree in trees.items():
        tests = (node for node in tree if isinstance(node, ast.If))
        typing = [n for n in tests if isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"]
        below = {id(node) for test in typing for node in ast.walk(test)}
        kept[module] = [node for node in tree if id(node) not in below]
    return kept


def modules_imported(module: str, trees: Trees) -> dict[str, int]:
    """The modules, not packages, of forge that a module imports, with the line."""
    return {name: line for line, name in imports(module, trees) if name in trees}


def planted(**texts: str) -> Trees:
    """Trees of modules, `core__words` for core.words."""
    return {name.replace("__", "."): nodes_of(text) for name, text in texts.items()}


def none_of(breaches: list[str]) -> None:
    """Fails the test with all breaches: a comparison of lists shows the first few."""
    __tracebackhide__ = True
    if breaches:
        pytest.fail("\n".join([f"{len(breaches)} breaches:", *breaches]), pytrace=False)


def test_the_rules_see_imports() -> None:
    seen = {name for m in ("cli", "commands.run_steps", "worker") for _, name in imports(m, TREES)}
    assert {"staging.stage", "core.errors", "trainer"} <= seen


# --- packages -------------------------------------------------------------------------------------


def test_page_of_the_architecture_shows_this_order() -> None:
    assert " < ".join(PACKAGES) in (FOLDER.parent / "docs/architecture.md").read_text()


def test_every_folder_is_a_package_of_the_rule() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == {*PACKAGES, "plugins"}


def imports_to_the_right(trees: Trees) -> list[str]:
    return [
        f"{at(module, line)}: imports {name}; {PACKAGES[here]} may import"
        f" {', '.join(PACKAGES[: here + 1])}"
        for module in trees
        if (here := place(module)) < len(PACKAGES)
        for line, name in imports(module, trees)
        if place(name) > here
    ]


def test_packages_import_only_packages_to_their_left() -> None:
    none_of(imports_to_the_right(TREES))


def test_import_of_a_package_to_the_right_is_found() -> None:
    trees = planted(
        core__words="import os\n\ndef read():\n    from forge.trainer import loop",
        data__files="from forge.core import words\nimport forge.launch.device\nfrom forge import cli",
        trainer__loop="from forge.data.files import read",
        cli="from forge import trainer",
    )
    of_data = "data may import attestation, core, slurm, hosts, data"
    assert imports_to_the_right(trees) == [
        "forge/core/words.py:4: imports trainer; core may import attestation, core",
        "forge/core/words.py:4: imports trainer.loop; core may import attestation, core",
        f"forge/data/files.py:2: imports launch.device; {of_data}",
        f"forge/data/files.py:3: imports cli; {of_data}",
    ]


def imports_of_plugins(trees: Trees) -> list[str]:
    """Imports of a plugin by the kernel, or by another plugin."""
    return [
        f"{at(module, line)}: imports {name}; only that plugin itself may"
        for module in trees
        for line, name in imports(module, trees)
        if name.partition(".")[0] == "plugins" and plugin_of(name) != plugin_of(module)
    ]


def plugin_of(module: str) -> str:
    """`evaluation` of plugins.evaluation.tasks; "" for a module of the kernel."""
    package, _, name = module.partition(".")
    return name.partition(".")[0] or "?" if package == "plugins" else ""


def test_kernel_imports_no_plugin_and_a_plugin_no_other() -> None:
    none_of(imports_of_plugins(TREES))


def test_import_of_a_plugin_is_found() -> None:
    trees = planted(
        cli="from forge.plugins.pages import report\nfrom forge.plugins import pages",
        plugins__pages__report="from forge.plugins.pages import charts\nfrom forge.flow import runs",
        plugins__pages__charts="from forge.plugins.site.words import x",
    )
    assert imports_of_plugins(trees) == [
        *["forge/cli.py:1: imports plugins.pages; only that plugin itself may"],
        *["forge/cli.py:1: imports plugins.pages.report; only that plugin itself may"],
        *["forge/cli.py:2: imports plugins; only that plugin itself may"],
        *[
            "forge/plugins/pages/charts.py:1: imports plugins.site.words; only that plugin itself may"
        ],
    ]


def foreign_to_the_executor(tree: list[ast.AST]) -> list[str]:
    return [
        f"snakemake_executor_plugin_forge/__init__.py:{line}: imports {name}; of forge it may import"
        " forge.slurm"
        for line, name in modules_named(tree)
        if name.startswith("forge") and not name.startswith("forge.slurm.")
    ]


def test_executor_imports_only_what_is_about_slurm() -> None:
    """Every Snakemake that finds it imports it, also for workflows of others."""
    text = EXECUTOR.read_text()
    assert "from forge.slurm." in text
    none_of(foreign_to_the_executor(nodes_of(text)))


def test_other_import_of_the_executor_is_found() -> None:
    text = "import forge.run.run\nfrom forge.slurm.slurm import squeue\nfrom forge.data import x"
    where = "snakemake_executor_plugin_forge/__init__.py"
    assert foreign_to_the_executor(nodes_of(text)) == [
        f"{where}:1: imports forge.run.run; of forge it may import forge.slurm",
        f"{where}:3: imports forge.data; of forge it may import forge.slurm",
    ]


# --- modules --------------------------------------------------------------------------------------


def circles(trees: Trees) -> list[str]:
    """Each circle of imports, until the graph without one import of each has none: without that which
    leads farthest to the right, since this is the wrong one."""
    graph = {module: modules_imported(module, trees) for module in trees}
    found: list[str] = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as err:
            circle = err.args[1][::-1]  # graphlib names what is imported first
            steps = list(pairwise(circle))
            told = (f"{at(one, graph[one][other])} imports {other}" for one, other in steps)
            found.append("a circle: " + ", ".join(told))
            one, other = max(steps, key=lambda step: place(step[1]) - place(step[0]))
            del graph[one][other]
        else:
            return found


def test_no_module_imports_itself_through_others() -> None:
    none_of(circles(running(TREES)))


def test_every_circle_is_found() -> None:
    trees = planted(
        core__a="from forge.core import b",
        core__b="\nfrom forge.core import c",
        core__c="from forge.core.a import x",
        data__d="import forge.data.d",
        data__e="import forge.core.a",
        data__f="from forge.data import g",
        data__g="if TYPE_CHECKING:\n    from forge.data import f",
    )
    found = circles(running(trees))
    assert len(found) == 2 and "a circle: forge/data/d.py:1 imports data.d" in found
    [long] = [circle for circle in found if "core" in circle]
    for step in ("core/a.py:1 imports core.b", "core/b.py:2 imports core.c"):
        assert step in long and "core/c.py:1 imports core.a" in long


def imports_too_many(trees: Trees) -> list[str]:
    return [
        f"{at(module, 1)}: imports {len(others)} modules of {MOST_IMPORTS} allowed: {', '.join(others)}"
        for module in sorted(trees.keys() - START)
        if len(others := sorted(modules_imported(module, trees))) > MOST_IMPORTS
    ]


def test_a_module_imports_at_most_25_others() -> None:
    """One that needs more does the work of two."""
    none_of(imports_too_many(TREES))


def test_module_that_imports_26_others_is_found() -> None:
    others = {f"core__m{number}": "" for number in range(26)}
    everything = "from forge.core import " + ", ".join(f"m{number}" for number in range(26))
    trees = planted(
        run__all=everything, cli=everything, run__few="from forge.core import m1", **others
    )
    [breach] = imports_too_many(trees)
    assert breach.startswith(
        "forge/run/all.py:1: imports 26 modules of 25 allowed: core.m0, core.m1,"
    )


def classes_in_two_modules(trees: Trees) -> list[str]:
    where = defaultdict(list)
    for module, tree in trees.items():
        lines = {n.name: n.lineno for n in tree if isinstance(n, ast.ClassDef)}
        for name, line in lines.items():
            where[name].append(at(module, line))
    return [
        f"class {n}: in one module only, is in {', '.join(w)}" for n, w in where.items() if w[1:]
    ]


def test_a_class_name_stands_in_one_module_only() -> None:
    none_of(classes_in_two_modules(TREES))


def test_class_of_two_modules_is_found() -> None:
    trees = planted(
        core__a="class Run: ...", run__b="import os\nclass Run: ...", run__c="class Ran: ..."
    )
    found = "class Run: in one module only, is in forge/core/a.py:1, forge/run/b.py:2"
    assert classes_in_two_modules(trees) == [found]


def names_of_two_modules(modules: list[str]) -> list[str]:
    where = defaultdict(list)
    for module in modules:
        where[module.rpartition(".")[2]].append(module)
    return [
        f"{n}: name of one module only, is that of {', '.join(w)}"
        for n, w in where.items()
        if w[1:]
    ]


def test_a_module_has_a_name_of_its_own() -> None:
    none_of(names_of_two_modules([name for name in TREES if not plugin_of(name)]))


def test_name_of_two_modules_is_found() -> None:
    found = "files: name of one module only, is that of core.files, data.files"
    assert names_of_two_modules(["core.files", "data.files", "data.bytes"]) == [found]


# --- programs and architectures -------------------------------------------------------------------


def places_that_read(attribute: str, of: str, trees: Trees) -> list[str]:
    """File and line of each `of.attribute`, also at the end of a longer name."""
    return [
        at(module, node.lineno)
        for module, tree in trees.items()
        for node in tree
        if isinstance(node, ast.Attribute) and node.attr == attribute
        if getattr(node.value, "attr", getattr(node.value, "id", "")) == of
    ]


def test_at_most_eight_places_ask_which_program_trains_a_run() -> None:
    """All others ask the TrainingProgram that `run.programs` gives them."""
    places = places_that_read("program", of="config", trees=TREES)
    assert "forge/run/programs.py" in {place.partition(":")[0] for place in places}
    assert len(places) <= MOST_THAT_ASK_FOR_THE_PROGRAM, "\n".join(["", *places])


def test_place_that_asks_is_found() -> None:
    text = "if config.program:\n    x = run.config.program\ny = config.programs, other.program"
    places = places_that_read("program", of="config", trees=planted(run__a=text))
    assert places == ["forge/run/a.py:1", "forge/run/a.py:2"]


def layers_made(trees: Trees) -> set[str]:
    """Attributes that hold a layer with a matrix, of all architectures: those with an underscore, since a
    plain word such as `dense` has other uses."""
    return {
        target.attr
        for module, tree in trees.items()
        if module.startswith(HAVE_LAYERS)
        for node in tree
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if getattr(node.value.func, "attr", "") in ("Linear", "Embedding")
        for target in node.targets
        if isinstance(target, ast.Attribute) and "_" in target.attr
    }


def layers_named_elsewhere(trees: Trees) -> list[str]:
    """File, line and name of each layer outside of the modules that make layers."""
    found, layers = [], layers_made(trees)
    for module, tree in trees.items():
        for node in tree if not module.startswith(HAVE_LAYERS) else ():
            name = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", "")
            if isinstance(name, str) and name in layers:
                where = at(module, getattr(node, "lineno", 1))
                found.append(f"{where}: names {name}; only a module in trainer/models may")
    return found


def test_only_the_modules_of_an_architecture_name_its_layers() -> None:
    assert {"q_proj", "gate_proj", "embed_tokens", "c_attn"} <= layers_made(TREES)
    none_of(layers_named_elsewhere(TREES))


def test_name_of_a_layer_is_found() -> None:
    trees = planted(
        run__a="x = model.q_proj",
        run__b='\nname = "embed_in"',
        run__c="c_fc = b'c_fc', module.dense",
        trainer__models__x_decoder="self.q_proj = nn.Linear(2, 2)\nself.c_fc = nn.Linear(2, 2)",
        trainer__models__y_decoder="m.embed_in = nn.Embedding(2, 2)\nm.dense = nn.Linear(2, 2)",
    )
    assert [place.partition(";")[0] for place in layers_named_elsewhere(trees)] == [
        "forge/run/a.py:1: names q_proj",
        "forge/run/b.py:2: names embed_in",
    ]


# --- torch ----------------------------------------------------------------------------------------

# Imports the modules that it is given, and prints each line of them that first asks for torch. The
# import of torch fails, so that the next module does not find it loaded and is judged, too.
WITHOUT_TORCH = """
import importlib, sys, traceback
from importlib.machinery import ModuleSpec

own, asked = {name.partition(".")[0] for name in sys.argv[1:]}, {}

class Refuses:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] == "torch" else None

    def exec_module(self, module): ...

    def create_module(self, spec):
        stack = [(f.f_code.co_filename, line) for f, line in traceback.walk_stack(None)
                 if f.f_globals["__name__"].partition(".")[0] in own]
        asked.setdefault(stack[0] if stack else ("?", 0), module)
        raise ImportError("torch is refused here")

sys.meta_path.insert(0, Refuses())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError:
        if not asked:
            raise
for (path, line), module in asked.items():
    print(f"{path}:{line}: imports torch, in the import of {module}")
"""


def lines_that_import_torch(modules: list[str], root: Path) -> list[str]:
    """In a process of its own: this one may have torch already."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *modules],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    return [line.removeprefix(f"{root}/") for line in done.stdout.splitlines()]


def test_torch_is_imported_only_where_tensors_are() -> None:
    free = ["forge." + module for module in TREES if module not in TENSORS]
    none_of(lines_that_import_torch([*free, EXECUTOR.parent.name], FOLDER.parent))


def test_each_line_that_imports_torch_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    for name, text in {
        "a": "import os\nfrom torch import nn",
        "b": "from planted import a",
        "c": "def later():\n    import torch",
        "d": "try:\n    import torch.nn\nexcept ImportError:\n    pass",
    }.items():
        (tmp_path / f"planted/{name}.py").write_text(text)
    assert lines_that_import_torch([f"planted.{name}" for name in "abcd"], tmp_path) == [
        "planted/a.py:2: imports torch, in the import of planted.a",
        "planted/d.py:2: imports torch, in the import of planted.d",
    ]


def imports_torch(tree: list[ast.AST]) -> bool:
    return any(name.partition(".")[0] == "torch" for _, name in modules_named(tree))


def granted_torch_in_vain(trees: Trees, tensors: set[str]) -> list[str]:
    return [
        f"{module}: is in TENSORS, is no module" for module in sorted(tensors - trees.keys())
    ] + [
        f"{at(module, 1)}: is in TENSORS, imports neither torch nor a module of TENSORS"
        for module in sorted(tensors & trees.keys())
        if not imports_torch(trees[module])
        and not tensors.intersection(name for _, name in imports(module, trees))
    ]


def test_modules_of_tensors_do_import_torch() -> None:
    """Else the table above grants what nobody needs."""
    none_of(granted_torch_in_vain(TREES, TENSORS))


def test_module_that_needs_no_torch_is_found() -> None:
    trees = planted(
        trainer__a="import torch.nn", trainer__b="from forge.trainer import a", core__c=""
    )
    tensors = {"trainer.a", "trainer.b", "core.c", "core.gone"}
    assert granted_torch_in_vain(trees, tensors) == [
        "core.gone: is in TENSORS, is no module",
        "forge/core/c.py:1: is in TENSORS, imports neither torch nor a module of TENSORS",
    ]
