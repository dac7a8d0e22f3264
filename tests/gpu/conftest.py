"""Where the checks of a GPU run, what they share, and the table of what they have measured.

FORGE_GPU_CHECKS=cpu runs those that a CPU can, at a small size; `gpu` says that there is one, as
tools/gpu.sh does where PyTorch sees it. FORGE_GPU_RESULTS names a file that gets a line of JSON for each
check as it ends: a run that is killed leaves what it has measured. No module here is imported, and torch
neither, where the checks do not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.circles import CIRCLE
from support.forked import LEFT_OVER
from support.live_run import MARK, MARK_VALUE, TINY, Run, forge, kill_all, make_run

ON_CPU = os.environ.get("FORGE_GPU_CHECKS") == "cpu"
HAS_GPU = os.environ.get("FORGE_GPU_CHECKS") == "gpu" or any(Path("/dev").glob("nvidia[0-9]*"))
WHY_NOT = "" if ON_CPU or HAS_GPU else "no GPU (FORGE_GPU_CHECKS=cpu runs what a CPU can)"


class _SkippedFile(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(WHY_NOT, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return _SkippedFile.from_parent(parent, path=module_path) if WHY_NOT else None


# --- the device -----------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[Any]:
    """The first GPU, set up as training sets it up; the CPU with FORGE_GPU_CHECKS=cpu."""
    import torch

    from forge.trainer.numerics import prepare

    if ON_CPU:  # as it is: what training sets up there cannot be undone
        yield torch.device("cpu")
        return
    gpu = torch.device("cuda", 0)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.cuda.set_device(gpu)
    prepare(gpu)
    yield gpu
    torch.cuda.empty_cache()
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def gpu(device: Any) -> Any:
    """The first GPU, for a check that means nothing on a CPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture
def world(device: Any) -> Iterator[Any]:
    """A process group of this process alone."""
    from support.gpu import one_rank

    with one_rank(on_gpu=device.type == "cuda") as world:
        yield world


# --- runs -----------------------------------------------------------------------------------------

PATIENCE_SEC = 180.0  # for a command, on a machine that is busy with other tests
# Python's own modules: text that is on every machine.
MODULES = ("argparse", "ast", "csv", "datetime", "difflib", "inspect", "pathlib", "tarfile")
SETTINGS = (
    *("--model.dropout=0.1", "--train.max_steps=120", "--train.decay_steps=120"),
    *("--train.checkpoint_every=15", "--train.keep_last=3", "--train.log_every=1"),
    "--validate.depth=probe",
    "--train.deterministic=true",
)


@pytest.fixture(scope="session", autouse=True)
def _marked() -> Iterator[None]:
    """Marks the processes that the checks start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LEFT_OVER:
            patch.delenv(name, raising=False)
        patch.setenv(MARK, MARK_VALUE)
        yield


@pytest.fixture(autouse=True)
def _nothing_outlives_its_check() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(scope="session")
def tiny_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of config.yaml, a corpus, its tokenizer and its shards."""
    import yaml

    root = tmp_path_factory.mktemp("gpu")
    (root / "corpus").mkdir()
    for name in MODULES:
        source = Path(os.__file__).with_name(f"{name}.py")
        if not source.exists():  # a package
            source = Path(os.__file__).parent / name / "__init__.py"
        (root / "corpus" / f"{name}.txt").write_text(source.read_text())
    values = {
        **TINY,
        "data": str(root / "data"),
        "tokenize": {
            "inputs": [str(root / "corpus")],
            "document_separator": "\n\n\n",  # between the functions of a module
            "val_fraction": 0.1,
        },
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    for command in (("tokenizer",), ("tokenize", "--workers=1")):
        done = forge(command[0], str(root / "config.yaml"), *command[1:])
        assert done.code == 0, done.text
    return root


@pytest.fixture(scope="session")
def new_run(tiny_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Makes runs of a tiny model: `new_run(name, *overrides)`."""
    results = tmp_path_factory.mktemp("results")
    on = "--machine.device=cpu" if ON_CPU else "--machine.device=cuda"
    return lambda name, *overrides: make_run(
        tiny_project, results, name, (*SETTINGS, on, *overrides)
    )


@pytest.fixture(scope="session")
def trained(new_run: Callable[..., Run]) -> Run:
    """An uninterrupted run with dropout, by `forge train` in a process of its own."""
    run = new_run("trained")
    done = run.start("train").end(PATIENCE_SEC)
    assert done.code == 0, done.text
    return run


# --- the table ------------------------------------------------------------------------------------


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """Puts a number into the table: `measured("TFLOP/s", 712)`."""
    return record_property


def _rows(reporter: Any) -> list[dict[str, Any]]:
    """A row for each check."""
    rows = []
    for result in ("passed", "failed", "error", "xfailed", "xpassed", "skipped"):
        for report in reporter.stats.get(result, []):
            if result != "passed" or report.when == "call":
                rows.append(_row(report, result))
    return sorted(rows, key=lambda row: (row["file"], row["check"]))


def _row(report: Any, result: str) -> dict[str, Any]:
    """File, name, result, measured numbers, reason and seconds of a check."""
    file, _, name = report.nodeid.partition("::")
    return {
        "file": Path(file).name,
        "check": name.removeprefix("test_").replace("_", " "),
        "result": result,
        "measured": {k: v for k, v in report.user_properties if k != CIRCLE},
        "reason": _reason(report),
        "seconds": round(getattr(report, "duration", 0.0), 2),
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    results = os.environ.get("FORGE_GPU_RESULTS")
    is_of_gpu = Path(report.nodeid.partition("::")[0]).parent.name == "gpu"
    # Set-up and end of a check count where they fail, or skip it.
    if results and is_of_gpu and (report.when == "call" or not report.passed):
        with open(results, "a") as file:
            file.write(json.dumps(_row(report, report.outcome), default=str) + "\n")


def _reason(report: Any) -> str:
    """Why a check was skipped, or was expected to fail."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(getattr(report, "wasxfail", "")).removeprefix("reason: ")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if WHY_NOT:
        return
    rows = _rows(terminalreporter)
    terminalreporter.section("checks of a GPU")
    for row in rows:
        facts = [f"{name} {_shown(value)}" for name, value in row["measured"].items()]
        notes = "; ".join(filter(None, [", ".join(facts), row["reason"]]))
        where = f"{row['file'].removeprefix('test_').removesuffix('.py')}: {row['check']}"
        terminalreporter.write_line(f"{row['result']:8} {row['seconds']:6.1f} s  {where}")
        if notes:
            terminalreporter.write_line(f"{'':19}{notes}")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
