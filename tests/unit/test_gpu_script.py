"""`make gpu` on a machine that cannot run the checks says what to do, and does not end with success."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.repository import REPOSITORY

pytestmark = pytest.mark.tools

SCRIPT = REPOSITORY / "tools" / "gpu.sh"

# Answers the script's question about imports and the GPU, and notes how it is called for the checks.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
    echo "ModuleNotFoundError: No module named 'blake3'"
    exit $ANSWER
fi
echo "$PYTHONPATH $*"
exit 5
"""


@pytest.fixture
def run(tmp_path):
    """run(**environ): the script with such a Python, and without wheels."""
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(**environ):
        environ = {"PATH": os.environ["PATH"], "GPU_PYTHON": str(python), **environ}
        environ["GPU_WHEELS"] = str(tmp_path / "wheels")
        return subprocess.run(
            [SCRIPT, "-k", "loss"], env=environ, capture_output=True, text=True, check=False
        )

    return run


def test_missing_package_is_named_with_what_to_do(run):
    done = run(ANSWER="1")
    assert done.returncode == 69
    assert "cannot import what Forge needs: ModuleNotFoundError: No module named" in done.stderr
    assert "make gpu-wheels" in done.stderr


def test_machine_without_a_gpu_is_refused(run):
    done = run(ANSWER="3")
    assert done.returncode == 69
    assert "sees no GPU" in done.stderr
    assert "FORGE_GPU_CHECKS=cpu" in done.stderr


@pytest.mark.parametrize("environ", [{"ANSWER": "0"}, {"ANSWER": "3", "FORGE_GPU_CHECKS": "cpu"}])
def test_checks_get_the_checkout_and_the_options_and_give_their_status(run, environ):
    done = run(**environ)
    assert done.returncode == 5
    assert done.stdout.startswith(f"{SCRIPT.parents[1]}:")
    assert done.stdout.endswith("-m pytest tests/gpu -p no:cacheprovider -k loss\n")


def test_each_check_leaves_a_row_as_it_ends_also_where_the_run_is_killed_later(tmp_path):
    rows = tmp_path / "rows"
    (tmp_path / "killed.py").write_text(
        "import os, signal\ndef pytest_sessionfinish():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "FORGE_GPU_CHECKS": "cpu", "FORGE_GPU_RESULTS": str(rows)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "killed", "tests/gpu/test_machine.py"]
    done = subprocess.run(
        command,
        env={**environ, "PYTHONPATH": paths},
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["result"] for row in found} == {"passed", "skipped"}
    floors = [row for row in found if row["check"].startswith("floors are those of the named gpu")]
    assert floors and all(row["file"] == "test_machine.py" for row in floors)
    assert {row["reason"] for row in found if row["result"] == "skipped"} == {"needs a GPU"}
