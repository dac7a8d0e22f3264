"""Is the container of machine.yaml there on every node, and does it start? Asked before all other checks
of a node, which run inside.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from forge.core.process import hostname
from forge.core.records import Check
from forge.hosts.container import START_SEC, Container
from forge.hosts.placement import Placement
from forge.preflight.node_checks import installed_versions
from forge.slurm import slurm

NAME = "container"
LOOK_SEC = 30.0
MOST_SEC = LOOK_SEC + 2 * START_SEC
ASKED_AT_ONCE = 32

# $1: engine. $2: image. $3: "file" where it must be a path, "stored" where podman must have it. Prints
# what is missing, `engine` or `image`, else the engine's version.
LOOK = r"""
command -v "$1" >/dev/null || { echo engine; exit; }
case $3 in
    file) test -e "$2" || { echo image; exit; };;
    stored) "$1" image exists "$2" || { echo image; exit; };;
esac
"$1" --version
"""
# Version and digest of Forge's code inside.
VERSION = """
from forge.preflight.node_checks import installed_versions
print(*map(installed_versions().get, ("forge", "forge code")))
"""


def container_checks(placement: Placement) -> dict[str, Check]:
    """The check `container` of each node; {} without a container. Raises SlurmSilent."""
    if placement.container is None:
        return {}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        checks = pool.map(lambda host: _check(placement, host), placement.hosts)
        return dict(zip(placement.hosts, checks, strict=True))


def _check(placement: Placement, host: str) -> Check:
    container = placement.container
    assert container
    image, engine = container.settings.image, container.engine
    program = "srun" if engine == "pyxis" else engine
    kind = "file" if image.startswith("/") else "stored" if engine == "podman" else ""
    look = ["sh", "-c", LOOK, "sh", program, image, kind]
    output, trouble = _run_on(placement, host, look, LOOK_SEC)
    if trouble:
        return Check(NAME, "fail", f"{host} cannot be asked for {engine}: {trouble}")
    said = output.strip().rpartition("\n")[2]  # after what a TaskProlog printed
    if said == "engine":
        message = f"{engine} is not in the PATH of {host}"
        fix = f"install it there, name another container.engine, or leave {host} out"
        return Check(NAME, "fail", message, fix, "it is not installed, or needs `module load`")
    if said == "image":
        return _no_image(image, engine, host)
    begin = [container.python, "-c", VERSION]
    answer, trouble = _run_on(placement, host, container.around(begin), START_SEC, inside=True)
    if trouble:
        return _does_not_start(placement, host, container, trouble)
    here = installed_versions()
    own = f"{here['forge']} {here['forge code']}"
    inner = " ".join(answer.split()[-2:])
    if inner != own:
        message = f"{image} runs Forge {inner} (version, code), {hostname()} runs {own}"
        cause = (
            "launcher and ranks must be of the same code, and the image was built from another one"
        )
        fix = "build the image again, or run the commands in a clone of the project (docs/containers.md)"
        return Check(NAME, "fail", message, fix, cause)
    return Check(NAME, "ok", f"{said}, {image}, Forge {inner}")


def _no_image(image: str, engine: str, host: str) -> Check:
    if image.startswith("/"):
        fix = f"put it where all nodes see it; look with: srun -w {host} ls -l {image}"
        return Check(NAME, "fail", f"there is no {image} on {host}", fix)
    message = f"{engine} on {host} has no image {image}"
    cause = "podman keeps images for each user on each node, and Forge downloads none"
    fix = f"load it on each node: srun -w {host} podman load -i IMAGE.tar; or name a root directory"
    return Check(NAME, "fail", message, fix, cause)


def _does_not_start(placement: Placement, host: str, container: Container, trouble: str) -> Check:
    """The check of a node on which Python does not start inside; whether anything does."""
    image, python = container.settings.image, container.python
    nothing = container.around(["true"], guarded=False)
    if _run_on(placement, host, nothing, START_SEC, inside=True)[1]:
        message = f"a container of {image} does not start on {host}: {_last(trouble)}"
        fix = (
            f"start it there by hand ({container.engine}), and set what that needs as container.arguments"
            " (docs/containers.md has some)"
        )
        return Check(NAME, "fail", message, fix, f"as {container.engine} says")
    message = f"{python} in {image} does not run Forge on {host}: {_last(trouble)}"
    fix = "set container.python to the Python that has Forge, as its path is inside"
    return Check(NAME, "fail", message, fix, "the image has none there, or Forge is not in it")


def _last(trouble: str) -> str:
    lines = [line for line in trouble.splitlines() if not line.startswith("srun: ")]
    return (lines or trouble.splitlines())[-1][:300]


def _run_on(
    placement: Placement, host: str, words: list[str], sec: float, *, inside: bool = False
) -> tuple[str, str]:
    """Output and error ("" for none) of a command on a node. inside: words are those of a container."""
    if placement.is_here and not (placement.srun_options and placement.job):
        return slurm.run(words, timeout_sec=sec)
    assert placement.job
    options = ("--overlap", "--gres=none", *(placement.srun_options if inside else ()))
    line = slurm.srun(placement.job.id, [host], options=options)
    output, trouble = slurm.run_step([*line, *words], timeout_sec=sec)
    if slurm.is_slurms_own(trouble):
        raise slurm.silent(trouble)
    return output, trouble
