"""Which launches get directories on other nodes, and how an agent finds what it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.core import hooks
from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.file_list import FileList
from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.hosts.nodes import NodePool
from forge.hosts.placement import Placement, WorldLayout, check_layout
from forge.plugins.mirror import checkpoint_copies
from forge.plugins.mirror.mirror_on_node import begin_mirror

FIRST_NODE = load_machine(
    None, {"launcher": "srun", "stage.project": "auto", "stage.results": "first_node"}
)
TWO = Placement((hostname(), "node02"))
ASKED = """
import sys
from forge import node_agent
for line in sys.stdin:
    print(node_agent.respond(line)["id"], "forge.plugins.mirror.hooks" in sys.modules)
"""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[FileList]:
    """The checkpoints that were sent to nodes."""
    found: list[FileList] = []

    def send(files: FileList, *_: object) -> str:
        found.append(files)
        return "/disk/checkpoint"

    monkeypatch.setattr(checkpoint_copies, "send_checkpoint", send)
    return found


@pytest.mark.parametrize(
    ("machine", "placement"),
    [(FIRST_NODE, Placement((hostname(),))), (load_machine(None), TWO)],
    ids=["first node alone", "all see the results"],
)
def test_launch_on_nodes_that_see_the_run_begins_nowhere_else(machine, placement, sent, tmp_path):
    files = FileList(tmp_path / "step-00000020", {}, listed_in="a test")
    keys = {"python": "python", "checkpoint": files}
    assert hooks.run_directories(RunPaths(tmp_path), machine, placement, **keys) is None
    assert not sent


@pytest.mark.parametrize("resumes", [True, False])
def test_other_nodes_have_the_checkpoint_before_a_launch_begins(resumes, sent, tmp_path):
    files = FileList(tmp_path / "step-00000020", {}, listed_in="a test") if resumes else None
    begin = hooks.run_directories(
        RunPaths(tmp_path), FIRST_NODE, TWO, python="python", checkpoint=files
    )
    assert begin is not None
    assert sent == ([files] if resumes else [])


def test_agent_looks_for_plugins_only_where_one_of_their_requests_is_asked(tmp_path: Path) -> None:
    keys = {"base": str(tmp_path), "job": "7", "name": "run", "checkpoint": ""}
    lines = [{"do": "hello", "with": {}}, {"do": "begin_mirror", "with": keys}]
    asked = "".join(json.dumps({"id": number, **line}) + "\n" for number, line in enumerate(lines))
    done = subprocess.run(
        [sys.executable, "-c", ASKED], input=asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "False", "1", "True"]


def test_node_that_is_asked_makes_the_directory(tmp_path: Path) -> None:
    keys = {"base": str(tmp_path), "job": "7", "name": "run", "checkpoint": ""}
    with NodePool(Placement((hostname(),))) as pool:
        [folder] = pool.ask(begin_mirror, timeout_sec=30, **keys).values()
    assert RunPaths(Path(str(folder))).checkpoints.is_dir()


def test_start_from_weights_that_other_nodes_do_not_get_is_refused() -> None:
    config = Config(run="base", parent="other@5000", train={"batch_size": 8})
    with pytest.raises(
        ConfigError, match=r"parent is other@5000, and stage\.results is first_node"
    ):
        check_layout(FIRST_NODE, WorldLayout(2, 2), config)
    check_layout(FIRST_NODE, WorldLayout(1, 2), config)
