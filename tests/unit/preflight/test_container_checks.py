"""Preflight says of each node why its container does not start: engine, image, Python and Forge in it are
put there by different people."""

import pytest

from forge.core.machine import load_machine
from forge.hosts.container import Container
from forge.hosts.placement import Placement
from forge.preflight import container_checks as checks
from forge.preflight.node_checks import installed_versions
from forge.slurm import slurm

JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2"), 6, "gpu", "x", True, None)
OWN = "{forge} {forge code}".format(**installed_versions())
STARTS = f"{OWN}\n"
GONE = "srun: error: n1: task 0: Exited with exit code 127"


class Node:
    """What srun says on a node: each value is (output, error) of a command."""

    def __init__(self, look="podman version 4.3.1\n", python=(STARTS, ""), true=("", "")):
        self.look, self.python, self.true = look, python, true
        self.lines = []

    def __call__(self, line, *, timeout_sec):
        self.lines.append(line)
        if checks.LOOK in line:
            return self.look if isinstance(self.look, tuple) else (self.look, "")
        return self.true if line[-1] == "true" else self.python


def check_on(monkeypatch, node, engine="podman", image="localhost/forge"):
    monkeypatch.setattr(slurm, "run_step", node)
    settings = load_machine(None, {"container": {"image": image}}).container
    where = Placement(("n1",), JOB, container=Container(settings, engine))
    return checks.container_checks(where)["n1"]


def test_no_container_needs_no_check():
    assert checks.container_checks(Placement(("n1",), JOB)) == {}


def test_container_that_starts_is_named_with_its_versions(monkeypatch):
    check = check_on(monkeypatch, Node())
    assert check.status == "ok"
    assert check.message == f"podman version 4.3.1, localhost/forge, Forge {OWN}"


@pytest.mark.parametrize(
    ("node", "image", "words"),
    [
        (
            Node("engine"),
            "x",
            ("podman is not in the PATH of n1", "not installed", "leave n1 out"),
        ),
        (
            Node("image"),
            "x",
            ("podman on n1 has no image x", "each user on each node", "podman load"),
        ),
        (
            Node("Welcome to n1!\nimage\n"),
            "/x.sif",
            ("there is no /x.sif on n1", "", "srun -w n1 ls -l /x.sif"),
        ),
        (
            Node(python=("", f"exec: no such file\n{GONE}")),
            "x",
            (
                "/opt/forge/bin/python in x does not run Forge on n1: exec: no such file",
                "Forge is not in it",
                "container.python",
            ),
        ),
        (
            Node(python=("", f"Error: rlimit\n{GONE}"), true=("", "no")),
            "x",
            (
                "a container of x does not start on n1: Error: rlimit",
                "as podman says",
                "container.arguments",
            ),
        ),
        (
            Node(python=("0.0.1 abc\n", "")),
            "x",
            ("x runs Forge 0.0.1 abc (version, code), ", "same code", "build the image"),
        ),
        (Node(("", "no answer within 30 s")), "x", ("n1 cannot be asked for podman", "", "")),
    ],
)
def test_container_that_does_not_start_is_told_with_cause_and_fix(monkeypatch, node, image, words):
    said, cause, fix = words
    monkeypatch.setattr(slurm, "is_slurms_own", lambda trouble: False)
    check = check_on(monkeypatch, node, image=image)
    assert check.status == "fail" and said in check.message
    assert cause in check.cause and fix in check.fix


def test_pyxis_is_asked_with_its_options_only_where_it_starts_the_container(monkeypatch):
    node = Node("slurm 22.05.8\n")
    check_on(monkeypatch, node, engine="pyxis", image="/x.sqsh")
    look, start = node.lines
    assert look[-3:] == ["srun", "/x.sqsh", "file"]
    assert "--container-image=/x.sqsh" in start and "--container-image=/x.sqsh" not in look


def test_slurm_that_is_away_is_no_fault_of_a_node(monkeypatch):
    with pytest.raises(slurm.SlurmSilent):
        check_on(monkeypatch, Node(("", "srun: error: Unable to contact slurm controller")))
