"""Threat: tests that pass on a clean clone alone, or that write over what a user has in the clone.

The clone is one in whose results a run was trained; its config, its profiles and its path are a user's,
and the shell is one in a job of Slurm, with another environment. The tests that run there are those that
read the repository in each way: its workflow, config, profiles and pages, its packages, its variables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.clone import Project, make_project
from support.repository import CLONE, PLACE, copy_project
from support.surroundings import clear, files_of_user

pytestmark = pytest.mark.default

NODES = (
    "tests/workflow/test_drawn_and_linted.py::test_dry_run_ends_with_the_lines_to_edit",
    "tests/workflow/test_wheel.py::test_source_distribution_has_every_file_of_the_project",
    "tests/unit/core/test_config_docs.py::test_shipped_file_names_its_schema_and_satisfies_it",
    "tests/unit/test_code_blocks.py::test_each_command_in_a_sentence_fits_its_parser",
    "tests/unit/slurm/test_profile.py::test_without_a_profile_it_is_the_local_one",
    "tests/unit/hosts/test_lock.py::test_lock_is_given_back",
    "tests/unit/data/test_hub.py::test_files_and_globs_of_models_and_data_sets_are_downloaded_with_their_commit",
    "tests/unit/checkpoint/test_family.py::test_sheet_of_the_documentation_is_accepted",
)
EXPORTED = {
    **{"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_CONF": "/none"},
    **{"FORGE_LOG_DIR": "/none", "FORGE_CONTROLLED": "/none", "FORGE_USER_OMP_NUM_THREADS": "7"},
    **{"HF_HOME": "/none", "WANDB_API_KEY": "x", "MLFLOW_TRACKING_URI": "http://localhost:9"},
    **{"SNAKEMAKE_PROFILE": "profiles/mine", "PROFILE": "profiles/mine", "GIT_DIR": "/none"},
    **{"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"},
    **{"CUDA_VISIBLE_DEVICES": "3", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "RANK": "1"},
}
PROFILE_OF_ALL = "executor: slurm\ndefault-resources:\n  slurm_account: ada\n"


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The clone of a user who has trained."""
    project = make_project(tmp_path_factory.mktemp("Übung 1"))
    copy_project(CLONE, project.root)
    for words in ("init --quiet", "add --all . :!corpus", "commit --quiet --message=all"):
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", *identity, *words.split()], cwd=project.root, check=True)
    project.write_config(train={"max_steps": 2, "warmup_steps": 1, "eval_every": 2})
    project.write_runs("run\ttrain.seed\nmine\t7\n")
    code, output = project.snakemake("train")
    assert code == 0, output[-4000:]
    shutil.copytree(project.root / "profiles/slurm-cpu", project.root / "profiles/mine")
    for name, text in {
        "profiles/default/config.yaml": PROFILE_OF_ALL,
        "build/lib/forge/__init__.py": "an old version",
        "notes.md": "`forge trains --my=notes`",
    }.items():
        (project.root / name).parent.mkdir(parents=True, exist_ok=True)
        (project.root / name).write_text(text)
    return project


def session(project: Project, *nodes: str) -> subprocess.CompletedProcess[str]:
    """pytest in a clone, from a shell with all that a user may have exported."""
    other = project.root / "another environment"
    (other / "bin").mkdir(parents=True, exist_ok=True)
    (other / "bin/python").write_text("#!/bin/sh\nexit 99\n")
    (other / "bin/python").chmod(0o755)
    path = f"{other}/bin{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name != PLACE}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes],
        cwd=project.root,
        env=inherited | EXPORTED | {"VIRTUAL_ENV": str(other), "PATH": path},
        check=False,
        capture_output=True,
        text=True,
    )


def test_tests_pass_in_the_clone_of_a_user_and_leave_its_files_as_they_were(used: Project) -> None:
    before = files_of_user(used.root)
    assert {"results/mine/trained.json", "config/runs.tsv"} <= before.keys()
    done = session(used, *NODES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files_of_user(used.root) == before


def test_session_that_changes_a_file_of_the_user_fails_and_names_it(used: Project) -> None:
    writes = used.root / "tests/unit/test_writes.py"
    writes.write_text(
        "from support.repository import CLONE\n\n\n"
        "def test_writes():\n    (CLONE / 'data/new').touch()\n"
    )
    done = session(used, str(writes))
    assert done.returncode == 1 and "1 passed" in done.stdout
    assert "data/new was changed in the clone" in done.stdout
    assert "results" not in done.stdout


def test_other_environments_leave_the_path_and_switches_of_tests_stay() -> None:
    shell = {"VIRTUAL_ENV": "/other", "PATH": "/other/bin:/bin", "HOME": "/home", "SLURM_X": "1"}
    switches = {"FORGE_TEST_SLURM": "skip", "FORGE_FAULTS": "all", "PYTHONPATH": "/site"}
    of_gpu = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_IB_DISABLE": "1"}
    for gpu, stays in ((False, {}), (True, of_gpu)):
        variables = shell | switches | of_gpu
        clear(variables, gpu=gpu)
        assert variables == {"PATH": "/bin", "HOME": "/home"} | switches | stays


def test_copy_has_what_a_developer_edits_and_not_what_a_user_does(
    used: Project, tmp_path: Path
) -> None:
    (used.root / "forge/new.py").touch()
    (used.root / "README.md").write_text("edited")
    copy_project(used.root, tmp_path)
    assert (tmp_path / "forge/new.py").exists()
    assert (tmp_path / "README.md").read_text() == "edited"
    assert "mine" not in (tmp_path / "config/runs.tsv").read_text()
    assert not any((tmp_path / name).exists() for name in ("results", "profiles/mine", "notes.md"))
