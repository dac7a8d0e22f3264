"""Threat: pages that quote messages, variables, keys, tests and files which are no longer there."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support import pages
from support.each import failures, hold_for_each
from support.repository import REPOSITORY as ROOT

from forge.core import hooks
from forge.core.config import Config
from forge.core.machine import Machine

pytestmark = pytest.mark.tools

PAGES = [
    *("README.md", "SECURITY.md", "config/labs/six-nodes/README.md"),
    *(
        f"docs/{n}.md"
        for n in ("new-cluster", "environment", "troubleshooting", "gpu", "plugins/tracking")
    ),
    *(
        "docs/plugins/evaluation.md",
        "docs/guarantees.md",
        "docs/commands.md",
        "docs/installation.md",
    ),
]
FILES = {"yaml", "json", "jsonl", "tsv", "html", "py"}  # report.html is no key
GAP = "…"  # stands for names and numbers, in the pages as in the texts of the sources

# What others say, as read in their sources: the pages may quote no more than this.
LIBRARIES = {
    "torch": {
        "The server socket has failed to listen on any local network address",
        "NCCL error in:",
        "Watchdog caught collective operation timeout",
        "CUDA out of memory",
    },
    "NCCL": {
        "ncclSystemError",
        "ncclRemoteError",
        "ncclUnhandledCudaError",
        "Call to ibv_modify_qp failed",
        "Duplicate GPU detected",
    },
    "Slurm": {
        *("Resources", "Priority", "PartitionNodeLimit", "AssocGrpGRES"),
        *("QOSMaxGRESPerUser", "ReqNodeNotAvail", "oom-kill"),
        *("PartitionTimeLimit", "BadConstraints", "JobHeldUser"),
    },
    "Snakemake": {
        *("Error in group allocation-", "invalid choice: 'forge'"),
        "Invalid config definition: Config entry must start with a valid identifier.",
    },
}


def sources() -> list[Path]:
    return sorted((ROOT / "forge").rglob("*.py"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Each file is parsed once."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def texts() -> list[str]:
    """Every text in the package's sources, what is filled in as a gap."""
    found = []
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else GAP for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


# --- troubleshooting ------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    """Title -> body, of each symptom."""
    _, *parts = re.split(r"^### ", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.M)
    ends = (re.split(r"^## ", part, maxsplit=1, flags=re.M)[0] for part in parts)  # next phase
    return {title: body for title, _, body in (part.partition("\n") for part in ends)}


def quotes(body: str) -> Iterator[tuple[str, str]]:
    """(who says it, what) of the code spans behind `You see:` and `You see (LIBRARY):`."""
    seen = body.partition("\nCause")[0]
    for part in re.split(r"(?=You see)", seen)[1:]:
        who = re.match(r"You see(?: \((\w+)\))?:", part)
        assert who, f"not `You see:` or `You see (LIBRARY):`: {part}"
        for span in re.findall(r"`([^`]+)`", part):
            yield who[1] or "Forge", " ".join(span.split())


def is_said(quote: str) -> bool:
    """Whether a text of the sources holds the quote, whatever stands in its gaps."""
    parts = quote.split(GAP)
    return any(has_in_order(parts, text) for text in texts())


def has_in_order(parts: list[str], text: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def check_quote(quoted: tuple[str, str]) -> None:
    who, quote = quoted
    if who == "Forge":
        assert sum(map(str.isalpha, quote)) > 5, "fits everything"
        assert is_said(quote) or quote in COMPOSED, "no source says it"
    else:
        assert quote in LIBRARIES[who], f"not known of {who}"


def test_every_quoted_message_is_said() -> None:
    quoted = {title: [*quotes(body)] for title, body in entries().items()}
    assert [title for title, found in quoted.items() if not found] == [], "quote no message"
    hold_for_each(
        ((f"{title}: `{one[1]}`", one) for title, found in quoted.items() for one in found),
        check_quote,
    )


# Quotes that are put together from several texts; each was seen as it stands.
COMPOSED = {
    "GPU fault on … (rank …): CUDA error: …",
    "GPU error on … (rank …): CUDA error: …",
    "rank … of … on … did not arrive at the … and was in the … for … s; rank … saw: …",
    "rank … of … on … did not arrive at the … and does not respond; rank … saw: …",
    "rank … of … on … arrived too late at the …; rank … saw: …",
    "rank … of … on … has not started collective … of the process group …, in which others wait (its last"
    " one is …); rank … saw: …",
    "rank … of … on … did not arrive at the …: stopped by SIGSTOP (pid …, state T); rank … saw: …",
    "rank … of … on … did not arrive at the …: its node is cut off, and does not reach Slurm either;"
    " rank … saw: …",
    "NOT reproduced: steps …, trained on …, again on …",
    "NODE … FAIL answers=fail",
    "interface: ib9 (fabric.interface) is not there",
    "interface: ib9 (your exported IB_IFNAME) is not there",
    "loss … and gradient norm … on rank … are not finite; the weights were not updated",
}


def check_entry(body: str) -> None:
    for part in ("Cause", "Do", "Test"):
        assert re.search(rf"^{part}(: |, )", body, flags=re.M), f"no `{part}: `"
    told = body.partition("\nTest: ")[2]
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", told)
    assert tests or "not reproducible" in told, "names no test"
    for path, name in tests:
        assert f"def {name}" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_every_entry_tells_cause_what_to_do_and_a_test_that_exists() -> None:
    hold_for_each(entries().items(), check_entry)


def test_a_message_that_nobody_says_is_noticed() -> None:
    assert is_said("could not join at") and is_said("port … (…) is in use on …")
    assert not is_said("ranks … are holding hands")
    made_up = [("Forge", "ranks … are holding hands"), ("Forge", "…: …"), ("NCCL", "oom-kill")]
    found = failures([(quote, (who, quote)) for who, quote in made_up], check_quote)
    for line, what in zip(
        found, ("no source", "fits everything", "not known of NCCL"), strict=True
    ):
        assert what in line


def test_an_entry_without_its_parts_is_noticed() -> None:
    parts = "\nCause: x\nDo: y\nTest: "
    bodies = {
        "a": "\nCause: x\nDo: y",
        "b": f"{parts}none",
        "c": f"{parts}`tests/unit/test_docs.py::test_gone`",
    }
    found = failures(bodies.items(), check_entry)
    for line, what in zip(found, ("no `Test: `", "names no test", "has no test_gone"), strict=True):
        assert what in line


# --- environment ----------------------------------------------------------------------------------

# Texts of the sources that look like variables: states of jobs and nodes in Slurm.
NO_VARIABLES = {
    *("REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "STAGE_OUT"),
    *("BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY"),
}
MAKES_OWN = {"SHELL", "BIN", "READY", "RANDOM", "IFS", "LC_ALL"}
# From one part of the tests to another; FORGE_TEST is the beginning of names.
BETWEEN_TESTS = {
    *("FORGE_TEST", "FORGE_TESTS", "FORGE_TEST_REPOSITORY"),
    *("FORGE_FAULT", "FORGE_FAULT_ONCE"),
}
NAME = r"[A-Z][A-Z0-9_]*[A-Z0-9]"
IN_SHELL = re.compile(
    rf"\$[({{]?({NAME})\b|\b(?:export|unset) ({NAME}) ?({NAME})?|^({NAME}) \?=", re.M
)
OF_PIP = re.compile(r"pip_setting ([A-Z_]+)")

# Module that reads what Forge passes through.
PASSED_THROUGH = {
    "NCCL_NET_GDR_LEVEL": "nvidia/nccl/lib/libnccl.so.2",
    "TORCH_NCCL_BLOCKING_WAIT": "torch/nn/parallel/distributed.py",
    "NO_COLOR": "rich/console.py",
    "FORCE_COLOR": "rich/console.py",
    "HF_HOME": "huggingface_hub/constants.py",
    "HF_TOKEN": "huggingface_hub/constants.py",
    "HF_ENDPOINT": "huggingface_hub/constants.py",
    "SNAKEMAKE_PROFILE": "snakemake/cli.py",
    "WANDB_BASE_URL": "wandb/env.py",
    "MLFLOW_TRACKING_URI": "mlflow/environment_variables.py",
    "MLFLOW_TRACKING_USERNAME": "mlflow/environment_variables.py",
    "MLFLOW_TRACKING_PASSWORD": "mlflow/environment_variables.py",
    "MLFLOW_TRACKING_TOKEN": "mlflow/environment_variables.py",
}


def used_in_python(paths: list[Path]) -> set[str]:
    """Names in os.environ, all texts that look like a variable, and those in shell inside a text."""
    found: set[str] = set()
    for path in paths:
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", node.value):
                    found.add(node.value)
                found |= {name for match in IN_SHELL.findall(node.value) for name in match if name}
            elif isinstance(node, ast.Subscript | ast.Call):
                found |= read_from_environ(node)
    return found - NO_VARIABLES


def read_from_environ(node: ast.Subscript | ast.Call) -> set[str]:
    """The name in environ["X"], environ.get("X"), Setting("X", …) and the like."""
    where, name = (node.value, node.slice) if isinstance(node, ast.Subscript) else (node.func, None)
    if isinstance(node, ast.Call) and node.args:
        name = node.args[0]
    of_environ = re.search(r"\benviron\b|^Setting$", ast.unparse(where))
    if of_environ and isinstance(name, ast.Constant) and isinstance(name.value, str):
        return {name.value}
    return set()


def used() -> set[str]:
    """Variables of the package, the workflow and the tools, and Forge's own of tests and bench."""
    found = used_in_python(sources()) | {"RANK"}  # of rank.py, one word among others
    folders = (ROOT / "tests", ROOT / "tools", ROOT / "bench")
    tests = used_in_python([path for folder in folders for path in folder.rglob("*.py")])
    found |= {name for name in tests if name.startswith("FORGE_")}
    shell = [
        ROOT / "Makefile",
        *(ROOT / "tools").glob("*.sh"),
        *(ROOT / "workflow").rglob("*.smk"),
        *(ROOT / "forge").rglob("*.smk"),
    ]
    for path in shell:
        text = path.read_text()
        found |= {name for match in IN_SHELL.findall(text) for name in match if name}
        found |= {f"PIP_{name}" for name in OF_PIP.findall(text)}
    return found - MAKES_OWN - BETWEEN_TESTS


def documented(*, passed_through: bool) -> set[str]:
    """Names in the first column of the tables."""
    own, _, theirs = (ROOT / "docs/environment.md").read_text().partition("## Passed through")
    rows = re.findall(r"^\| (`.+?`) \|", theirs if passed_through else own, re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_variable_is_in_the_table_and_no_other() -> None:
    there, documents = used(), documented(passed_through=False)
    assert there - documents == set(), "not in docs/environment.md"
    assert documents - there == set(), "nothing uses it"


def test_libraries_read_what_is_passed_through() -> None:
    assert documented(passed_through=True) == set(PASSED_THROUGH)
    for name, module in PASSED_THROUGH.items():
        spec = importlib.util.find_spec(module.partition("/")[0])
        if spec is None and module.startswith("nvidia/"):
            continue  # torch for CPUs has no NCCL
        assert spec and spec.submodule_search_locations
        file = Path(spec.submodule_search_locations[0]).parent / module
        assert name.encode() in file.read_bytes(), f"{module}: {name}"


def variables_of_communication(text: str) -> set[str]:
    return set(re.findall(r"\b(?:NCCL|GLOO|UCX|TORCH|PYTORCH)_[A-Z][A-Z0-9_]*[A-Z0-9]\b", text))


def test_variables_of_communication_that_a_page_or_profile_names_are_in_a_table() -> None:
    """NCCL_NET_GDR_LEVEL was in the changelog alone: no source names what Forge only passes through."""
    tables = documented(passed_through=False) | documented(passed_through=True)
    files = [*ROOT.glob("*.md")]
    for folder in ("docs", "config", "profiles"):
        files += [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.yaml")]
    named = {name for path in files for name in variables_of_communication(path.read_text())}
    assert len(named) > 10
    assert named - tables == set(), "not in docs/environment.md"
    assert variables_of_communication("`NCCL_ALGO=Ring`, NCCL_*, TORCH_") == {"NCCL_ALGO"}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('os.environ["HOMELY"]', "HOMELY"),
        ('os.environ.get("HOMELY", "")', "HOMELY"),
        ('Setting("HOMELY", "1", "why")', "HOMELY"),
        ('names = ("NCCL_ALGO", "lower")', "NCCL_ALGO"),
        ('LOOK = "echo ${SITE_DISK:-/tmp}"', "SITE_DISK"),
    ],
)
def test_a_new_variable_is_noticed(tmp_path: Path, code: str, name: str) -> None:
    (tmp_path / "new.py").write_text(code)
    assert used_in_python([tmp_path / "new.py"]) == {name}


# --- steps of docs/new-cluster.md -----------------------------------------------------------------

# Who names a step of the page, and the word that it is about.
NAMES_A_STEP = {
    "docs/installation.md": "wheelhouse",
    "config/labs/bert-cpu/README.md": "wheelhouse",
    "forge/preflight/node_checks.py": "CUDA",
}
STEP_OF_PAGE = r"step (\d+) of \[[^]]*new-cluster|new-cluster\.md, step (\d+)"


def steps_of_new_cluster() -> dict[int, str]:
    """Number -> text, in the order of the page."""
    text = (ROOT / "docs/new-cluster.md").read_text()
    _, *parts = re.split(r"^\*\*(\d+)\. ", text, flags=re.M)
    numbers = [int(number) for number in parts[::2]]
    assert numbers == list(range(1, len(numbers) + 1))
    return dict(zip(numbers, parts[1::2], strict=True))


def test_steps_of_a_new_cluster_that_others_name_are_about_that() -> None:
    """The message about a build for another CUDA named the step of the interfaces."""
    folders = ("docs", "config", "profiles", "forge", "workflow")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    found = [
        (str(path.relative_to(ROOT)), int(one or other))
        for path in (*ROOT.glob("*.md"), *files)
        if path.suffix in (".md", ".py", ".yaml", ".smk")
        for one, other in re.findall(STEP_OF_PAGE, path.read_text())
    ]
    assert {name for name, _ in found} == NAMES_A_STEP.keys()
    steps = steps_of_new_cluster()
    for name, number in found:
        assert NAMES_A_STEP[name] in steps[number], f"{name}: step {number}"


# --- all pages ------------------------------------------------------------------------------------


def matches(pattern: str, page: str, text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Each match with its `page:line`."""
    for found in re.finditer(pattern, text):
        yield f"{page}:{text.count(chr(10), 0, found.start()) + 1}", found


def dead_links(page: str, text: str) -> list[str]:
    """`page:line: target` of each link to a file, or to a section of a page, that is not there."""
    dead = []
    for place, found in matches(r"\]\(([^)\s]+)\)", page, text):
        name, _, section = found[1].partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if not found[1].startswith("http") and not (
            file.exists() and (not section or section in sections_of(file))
        ):
            dead.append(f"{place}: {found[1]}")
    return dead


@cache
def sections_of(page: Path) -> set[str]:
    """Names of a page's sections in links, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    texts = {page: (ROOT / page).read_text() for page in (*pages.PAGES, "CHANGELOG.md")}
    dead = [link for page, text in texts.items() for link in dead_links(page, text)]
    assert not dead, "\n".join(["links to no file or section:", *dead])


def test_what_a_newcomer_reads_first_is_short() -> None:
    """The README, then from a laptop to the own program on the own cluster."""
    first = ("README.md", "docs/new-cluster.md", "docs/programs.md", "docs/workflow.md")
    words = {page: len((ROOT / page).read_text().split()) for page in first}
    assert words["README.md"] <= 800, words
    assert sum(words.values()) <= 8000, words


def unknown_keys(page: str, text: str) -> list[str]:
    """`page:line: key` of each `train.keep_last` and the like that no section has."""
    sections = keys_of_sections()
    spans = matches(r"`(\w+)\.(\w+)(?=[:\s`])[^`\n]*`", page, text)
    return [
        f"{place}: {key[1]}.{key[2]}"
        for place, key in spans
        if key[1] in sections and key[2] not in FILES and key[2] not in sections[key[1]]
    ]


@cache
def keys_of_sections() -> dict[str, set[str]]:
    return {
        name: set(value)
        for model in (Config(), Machine())
        for name, value in model.model_dump(mode="json", by_alias=True).items()
        if isinstance(value, dict)
    } | {key: set(section.model_fields) for key, section in hooks.sections().items()}


def test_keys_that_are_named_exist() -> None:
    unknown = [key for page in PAGES for key in unknown_keys(page, (ROOT / page).read_text())]
    assert not unknown, "\n".join(["keys that no section has:", *unknown])


def test_dead_link_and_unknown_key_are_noticed() -> None:
    text = (
        "[a](gpu.md#x), [b](gone.md), [c](gpu.md), [d](../README.md#your-text)\n"
        "`train.keep_last: 2`\n`a`, `train.keep_lost: 2`, `train.yaml`"
    )
    assert dead_links("docs/data.md", text) == [
        "docs/data.md:1: gpu.md#x",
        "docs/data.md:1: gone.md",
    ]
    assert unknown_keys("docs/data.md", text) == ["docs/data.md:3: train.keep_lost"]


def test_promises_of_security_name_tests_that_there_are() -> None:
    rows = re.findall(r"^\| \*\*.+ \| (.+) \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    assert len(rows) > 10
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        tests = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", row)
        assert tests and set(tests) <= names, row
        assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[^`]+)`", row)), row


# --- docs/architecture.md ------------------------------------------------------------------------


def test_architecture_names_every_module_and_no_other():
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", text, re.M)
    listed = {
        f"{package}/{name}" for package, cell in rows for name in re.findall(r"`([\w/]+)`", cell)
    }
    modules = (path.relative_to(ROOT / "forge") for path in (ROOT / "forge").glob("*/**/*.py"))
    # Those of plugins are on the pages of plugins.
    there = {str(m.with_suffix("")) for m in modules if m.parts[0] != "plugins"}
    assert listed == {name for name in there if not name.endswith("__init__")}
    for path in re.findall(r"`(\w+/[\w/]+\.(?:py|smk))`", text):
        assert (ROOT / path).exists() or (ROOT / "forge" / path).exists(), path


# --- docs/gpu.md ---------------------------------------------------------------------------------


def test_page_of_the_gpu_lists_every_check_and_no_other() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    listed = re.findall(r"^\| (\w+: .+?) \|", text, re.M)
    checks = [
        f"{path.stem.removeprefix('test_')}: {name.replace('_', ' ')}"
        for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.M)
    ]
    assert listed == checks


def test_no_page_advises_to_unpickle_a_file():
    """`python -m pickle` runs what is in it; `-m pickletools` only shows it."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    assert [page.name for page in pages if "-m pickle " in page.read_text()] == []
