"""How a command on a node is started in a container: the lines, as recorded for each engine. Lines of
apptainer and pyxis were compared with their documents, and not run."""

import os
from pathlib import Path

import pytest

from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.hosts import container, placement
from forge.hosts.container import Container, container_of, engine_of
from forge.hosts.placement import Placement, WorldLayout
from forge.launch.launch_command import launch_command
from forge.slurm import slurm

SPEC = "results/base/.launch/20260101T000000-7/spec.json"
JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2"), 6, "gpu", "x", True, None)
RANK = ["-m", "forge.worker", SPEC]
INSIDE = "/opt/forge/bin/python"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The project, in which commands run, and its directories on this host."""
    for name in ("project", "results", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(container, "INFINIBAND", tmp_path / "none")
    monkeypatch.setattr(container, "GPU", tmp_path / "none")
    return tmp_path


def found(here, engine, *, variables=(), **keys):
    keys = {"image": "/images/forge.sif", "engine": engine, **keys}
    machine = load_machine(None, {"container": keys, "device": "cpu"})
    folders = [str(here / "results"), str(here / "not made yet")]
    return container_of(machine, folders, dict.fromkeys(variables, "x"))


def line_of(launcher, inside, ranks=1):
    machine = load_machine(None, {"launcher": launcher})
    where = Placement(("n1", "n2"), JOB, container=inside)
    line = launch_command(
        machine, WorldLayout(2, ranks), where, Path(SPEC), master=("n1", 29500), python="python"
    )
    assert line[0] == "srun"
    return line


def binds(here):
    return [str(here / name) for name in ("results", "project", "disk")]


def test_apptainer_is_the_task_of_srun_and_runs_the_rank(here):
    line = line_of("srun", found(here, "apptainer", arguments=["--cleanenv"], binds=["/a:/b:ro"]))
    assert line[line.index("apptainer") :] == [
        *("apptainer", "exec", f"--pwd={here}/project"),
        *(f"--bind={folder}" for folder in binds(here)),
        *("--bind=/a:/b:ro", "--cleanenv", "/images/forge.sif"),
        *(INSIDE, *RANK),
    ]


def test_torchrun_of_a_node_and_what_is_around_it_run_in_one_container(here):
    line = line_of("torchrun", found(here, "singularity"), ranks=4)
    inner = line[line.index("/images/forge.sif") + 1 :]
    assert line[line.index("singularity") + 1] == "exec"
    assert inner[:6] == [INSIDE, "-m", "forge.launch.first_signal", INSIDE, "-m", inner[5]]
    assert inner[5] == "torch.distributed.run" and inner[-3:] == RANK


def test_pyxis_is_options_of_srun_before_the_rank(here):
    inside = found(here, "pyxis", variables=["NCCL_DEBUG", "MY_OWN"], binds=["/data"])
    line = line_of("srun", inside)
    first = line.index("--overlap") + 1
    mounts = ",".join(f"{folder}:{folder}" for folder in [*binds(here), "/data"])
    assert line[first:] == [
        "--container-image=/images/forge.sif",
        f"--container-mounts={mounts}",
        f"--container-workdir={here}/project",
        "--container-env=NCCL_DEBUG,MY_OWN",
        *(INSIDE, *RANK),
    ]


def test_podman_has_the_namespaces_and_the_environment_of_the_host(here):
    inside = found(here, "podman", image="localhost/forge:latest", variables=["NCCL_DEBUG"])
    line = line_of("srun", inside)
    first = line.index("sh")
    assert line[first : first + 4] == ["sh", "-c", container.RUN, "podman"]
    assert line[first + 4 :] == [
        *("--rm", "--interactive", "--pull=never", "--log-driver=none", "--label=forge"),
        *("--network=host", "--ipc=host", "--pid=host", "--uts=host", "--env-host"),
        *("--security-opt=label=disable", "--env=NCCL_DEBUG"),
        *(f"--volume={folder}:{folder}" for folder in binds(here)),
        *(f"--workdir={here}/project", "localhost/forge:latest"),
        *(INSIDE, "-m", "forge.launch.container_guard", INSIDE, *RANK),
    ]


def test_podman_of_a_user_keeps_the_uid_and_writes_beside_a_root_directory(here, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    words = found(here, "podman", image="/images/forge").around(["true"], guarded=False)
    assert "--userns=keep-id" in words
    assert words[-3:] == ["--rootfs", "/images/forge:O", "true"]


def test_gpus_reach_the_container(here, monkeypatch):
    machine = load_machine(None, {"container": {"image": "x", "engine": "podman"}})
    monkeypatch.setattr(container, "GPU", here)  # a device of the driver
    inside = container_of(machine, [], {})
    assert "--device=nvidia.com/gpu=all" in inside.around(["true"])
    assert "--nv" in Container(inside.settings, "apptainer", gpus=True).around(["true"])


def test_variables_of_machine_yaml_win_over_those_of_an_image_of_apptainer(here, monkeypatch):
    keys = {"image": "/x.sif", "engine": "apptainer"}
    environment = {"variables": {"A": "1"}}
    machine = load_machine(None, {"container": keys, "environment": environment})
    where = placement.find_placement(machine, WorldLayout())
    assert where.variables == {"A": "1", "APPTAINERENV_A": "1"}
    assert where.only(where.hosts).container == where.container
    assert where.recorded_environment().variables == ["A"]


@pytest.mark.parametrize(
    ("programs", "help_of_srun", "engine"),
    [
        (["podman", "apptainer"], "", "apptainer"),
        (["podman", "singularity"], "", "singularity"),
        (["podman", "srun"], "--container-image=IMAGE", "pyxis"),
        (["podman", "srun"], "--cpus-per-task", "podman"),
    ],
)
def test_engine_is_the_first_that_this_host_has(here, monkeypatch, programs, help_of_srun, engine):
    (here / "bin").mkdir()
    for name in programs:
        (here / "bin" / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(here / "bin"))
    monkeypatch.setattr(slurm, "run", lambda *_, **__: (help_of_srun, ""))
    settings = load_machine(None, {"container": {"image": "x"}}).container
    assert engine_of(settings) == engine
    for name in programs:
        (here / "bin" / name).unlink()
    with pytest.raises(UnfitError, match=r"no container engine on .*PATH=") as caught:
        engine_of(settings)
    assert "container.engine" in caught.value.fix


def test_link_is_bound_with_its_target(here):
    (here / "link").symlink_to(here / "results")
    machine = load_machine(None, {"container": {"image": "x", "engine": "podman"}})
    inside = container_of(machine, [str(here / "link")], {})
    assert {str(here / "link"), str(here / "results")} <= set(inside.folders)


def test_directory_with_a_colon_cannot_be_bound(here):
    machine = load_machine(None, {"container": {"image": "x", "engine": "podman"}})
    with pytest.raises(ConfigError, match="a:b cannot be bound into a container"):
        container_of(machine, [str(here / "a:b")], {})


def test_pyxis_without_srun_is_refused(here):
    machine = load_machine(None, {"container": {"image": "x", "engine": "pyxis"}})
    with pytest.raises(ConfigError, match="pyxis starts containers with srun") as caught:
        placement.find_placement(machine, WorldLayout())
    assert "launcher: srun" in caught.value.fix


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "image"),
        ({"image": ""}, "image"),
        ({"image": "--privileged"}, "a path, or a name of an image"),
        ({"image": " x"}, "a path, or a name of an image"),
        ({"image": "x", "engine": "docker"}, "engine"),
        ({"image": "x", "python": "python3"}, "an absolute path, as it is inside"),
        ({"image": "x", "binds": ["data"]}, "'data' should be /path"),
        ({"image": "x", "binds": ["/a,/b"]}, "without commas"),
        ({"image": "x", "mounts": ["/a"]}, "mounts"),
    ],
)
def test_wrong_settings_are_refused_by_key(keys, said):
    with pytest.raises(ConfigError, match=said):
        load_machine(None, {"container": keys})


def test_project_is_not_staged_beside_a_container():
    keys = {"container": {"image": "x"}, "stage": {"project": "auto"}}
    with pytest.raises(ConfigError, match=r"remove stage\.project"):
        load_machine(None, keys)


def test_digest_of_an_image_that_is_a_file_is_recorded_and_a_directory_has_none(here, monkeypatch):
    monkeypatch.setattr(slurm, "run", lambda *_, **__: ("apptainer version 1.3.0\n", ""))
    image = here / "forge.sif"
    image.write_bytes(b"image")
    recorded = found(here, "apptainer", image=str(image)).recorded()
    assert (recorded.engine, recorded.version) == ("apptainer", "apptainer version 1.3.0")
    assert len(recorded.digest) == 64
    assert found(here, "apptainer", image=str(here)).recorded().digest == ""


def test_podmans_id_of_an_image_is_its_digest(here, monkeypatch):
    asked = []
    monkeypatch.setattr(slurm, "run", lambda words, **_: (asked.append(words), ("abc\n", ""))[1])
    assert found(here, "podman", image="localhost/forge").recorded().digest == "abc"
    assert asked[-1] == ["podman", "image", "inspect", "--format={{.Id}}", "localhost/forge"]
