"""`make gpu` on a machine that cannot run the checks says what to do, and does not end with success."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import psutil
import pytest
from support.repository import REPOSITORY

from forge.core.files import read_json

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


# --- a quarter of an hour -------------------------------------------------------------------------

QUARTER = REPOSITORY / "tools" / "gpu_quarter.sh"


def quarter(out, *arguments, **environ):
    """(exit status, output) of tools/gpu_quarter.sh without wheels."""
    environ = {**os.environ, "GPU_WHEELS": str(out / "none"), "GPU_OUT": str(out), **environ}
    done = subprocess.run(
        [QUARTER, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=800
    )
    return done.returncode, done.stdout + done.stderr


def test_rehearsal_of_the_quarter_of_an_hour_brings_home_every_file(tmp_path):
    status, said = quarter(tmp_path, GPU_QUICK="1", GPU_PYTHON=sys.executable, GPU_SECONDS="760")
    assert status == 0, said
    assert said.splitlines()[-1].endswith("failed or left out: none")
    contact = [json.loads(line) for line in (tmp_path / "contact.jsonl").read_text().splitlines()]
    assert not [each for each in contact if str(each["found"]).startswith("FAILED")]
    assert {"nvml", "mask torch.float32, 2 heads of keys: error"} <= {
        one["what"] for one in contact
    }
    checks = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert {"passed"} == {each["result"] for each in checks}
    [*_, turn] = map(json.loads, (tmp_path / "bench.jsonl").read_text().splitlines())
    assert (turn["size"], turn["step"], turn["turns"]) == ("tiny", "forge", 2)
    run = read_json(tmp_path / "run.json")
    assert run["completed"] and len(run["launches"]) == 2 and run["killed_at"] >= 50
    assert len(run["start_sec"]) == 2 and run["tokens_per_sec"] > 0
    assert (tmp_path / "facts.txt").stat().st_size > 0


HANGS = """#!/bin/sh
case "$*" in -c*|*pip*) exit 1 ;; esac
setsid sleep 987654 &
exec sleep 987654
"""


def test_part_that_hangs_is_killed_with_all_that_it_has_started_and_said_to_have_failed(tmp_path):
    python = tmp_path / "python3"
    python.write_text(HANGS)
    python.chmod(0o755)
    status, said = quarter(tmp_path, "contact", GPU_PYTHON=str(python), GPU_SECONDS="12")
    assert status == 1
    assert "== contact: exit 137 after" in said
    assert "== numbers: left out, the time is up" in said and "== runs: left out" in said
    assert "failed or left out: contact,numbers,runs" in said.splitlines()[-1].replace("facts,", "")
    left = [p for p in psutil.process_iter(["cmdline"]) if "987654" in (p.info["cmdline"] or [])]
    assert left == []


def test_part_that_there_is_not_is_refused_with_those_there_are(tmp_path):
    status, said = quarter(tmp_path, "all")
    assert status == 78
    assert "tools/gpu_quarter.sh contact" in said and "tools/gpu_quarter.sh measure" in said


def test_environment_of_the_rehearsal_lacks_what_travels_as_wheels_and_has_the_rest():
    lines = (REPOSITORY / "tools/gpu_machine.txt").read_text().splitlines()
    there = {re.split("[=<>]", line)[0] for line in lines if not line.startswith("#")}
    script = (REPOSITORY / "tools/gpu_wheels.sh").read_text()
    [words] = re.findall(r"^packages=\((.*)\)$", script, re.MULTILINE)
    travels = set(words.replace("-", "_").split())
    assert not {name.replace("-", "_") for name in there} & travels
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = {re.split("[>=<~\\[ ;]", line)[0].lower() for line in project["dependencies"]}
    # Without Snakemake, the checks call `forge`; and nothing is signed.
    of_workflow = {"snakemake", "snakemake-executor-plugin-slurm", "cryptography"}
    missing = {name for name in needed - of_workflow if name not in there}
    assert {name.replace("-", "_") for name in missing} <= travels, missing
