"""The first command that a newcomer gives: on a machine that cannot, it says what to do instead."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from support.repository import REPOSITORY as ROOT

pytestmark = pytest.mark.tools

SCRIPT = ROOT / "tools" / "setup.sh"
CHECKED = "--constraint constraints.txt --constraint hashes.txt --build-constraints hashes.txt"

# Says that it is of another version, and knows pip's settings from PIP_FILE_*.
PYTHON = """#!/bin/sh
if [ "$1 $2 $3" = "-m pip config" ]; then
    case "$5" in
        global.find-links) value=$PIP_FILE_FIND_LINKS ;;
        global.index-url) value=$PIP_FILE_INDEX_URL ;;
        global.extra-index-url) value=$PIP_FILE_EXTRA_INDEX_URL ;;
    esac
    [ -n "$value" ] && echo "$value"
    exit
fi
echo "outer python $1 $2 $3" >> "$RECORD"
exec {python} -c 'import sys; sys.version_info = {version}; {before}; exec(sys.argv[1])' "$2"
"""

UV = """#!/bin/sh
PATH=/usr/bin:/bin
echo "uv $*" >> "$RECORD"
env | grep ^UV_ | sort > "$RECORD.env"
mkdir -p .venv/bin
printf '#!/bin/sh\\necho "python $*" >> "$RECORD"\\n' > .venv/bin/python
echo '[ "$2" != pip ] || [ -n "$PIP_IN_VENV" ]' >> .venv/bin/python
chmod +x .venv/bin/python
"""


@pytest.fixture
def place(tmp_path):
    """A project of setup.sh and lists of packages, and a PATH with little more than a shell."""
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools" / "setup.sh")
    for name in ("pyproject.toml", "constraints.txt", "hashes.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in (
        "bash",
        "dirname",
        "tr",
        "sed",
        "touch",
        "rm",
        "find",
        "sha256sum",
        "grep",
        "env",
        "mkdir",
        "ln",
    ):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def program(place, name, text):
    (place / "bin" / name).write_text(text)
    (place / "bin" / name).chmod(0o755)


def python(place, version=(3, 11, 9), before="pass"):
    text = PYTHON.format(python=sys.executable, version=version, before=before)
    program(place, "python3", text)


def setup(place, *extras, **environ):
    return subprocess.run(
        [place / "bin" / "bash", place / "tools" / "setup.sh", *extras],
        env={
            **{"PATH": str(place / "bin"), "RECORD": str(place / "record"), "HOME": str(place)},
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        # A background job of a script ignores SIGINT, and no shell that it starts can trap that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def uv_settings(place, **environ):
    program(place, "uv", UV)
    done = setup(place, **environ)
    assert done.returncode == 0, done.stderr
    assert (place / ".venv" / "ready").exists()
    lines = (place / "record.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_package_that_cannot_be_built_ends_with_what_to_do(place):
    program(place, "uv", f'{UV}[ "$1" != pip ]\n')
    done = setup(place)
    assert done.returncode == 69
    assert "a package could not be installed" in done.stderr and "python3-dev" in done.stderr
    assert not (place / ".venv" / "ready").exists()


def test_old_python_is_refused_with_what_to_do(place):
    python(place, (3, 9, 18))
    done = setup(place)
    assert done.returncode == 69
    assert "'python3' is Python 3.9; Forge needs 3.11 or newer" in done.stderr
    assert "make PYTHON=python3.11" in done.stderr
    assert "install uv" in done.stderr
    assert not (place / ".venv").exists()


def test_missing_python_is_refused_with_what_to_do(place):
    done = setup(place)
    assert done.returncode == 69
    assert "cannot run 'python3'.\n  fix: install Python 3.11 or newer" in done.stderr
    done = setup(place, PYTHON="/nowhere/python3.12")
    assert done.returncode == 69
    assert "cannot run '/nowhere/python3.12'" in done.stderr


def test_python_without_venv_is_refused_with_what_to_do(place):
    python(place, before='sys.modules["ensurepip"] = None')
    done = setup(place)
    assert done.returncode == 69
    assert "cannot make virtual environments" in done.stderr
    assert "apt-get install python3-venv" in done.stderr


def test_uv_serves_where_there_is_no_python(place):
    assert uv_settings(place) == {}
    install = f"uv pip install --quiet --compile-bytecode --python .venv/bin/python {CHECKED}"
    assert recorded(place, "uv", "python -m compileall") == [
        "uv venv --quiet --clear --python >=3.11 .venv",
        f"{install} --editable .",
        f"{install} gigatoken",
        "python -m compileall -q forge snakemake_executor_plugin_forge",
    ]


def test_uv_serves_where_python_is_too_old(place):
    python(place, (3, 9, 18))
    uv_settings(place)
    assert "--python >=3.11 .venv" in (place / "record").read_text()


def recorded(place, *starts):
    """Commands that stand-ins were called with, of those that begin so."""
    return [line for line in (place / "record").read_text().splitlines() if line.startswith(starts)]


def test_uv_takes_the_python_that_was_named(place):
    uv_settings(place, PYTHON="python3.12")
    assert "--python python3.12 .venv" in (place / "record").read_text()


def test_settings_in_pips_files_are_handed_to_uv(place):
    python(place)
    settings = uv_settings(
        place,
        PIP_FILE_FIND_LINKS="/wheels /more/wheels\n/third",
        PIP_FILE_INDEX_URL="https://mirror.example/simple",
        PIP_FILE_EXTRA_INDEX_URL="https://a.example/simple\nhttps://b.example/simple",
    )
    assert settings["UV_FIND_LINKS"] == "/wheels,/more/wheels,/third"
    assert settings["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert settings["UV_INDEX"].split() == ["https://a.example/simple", "https://b.example/simple"]
    assert settings["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_package_is_taken_from_the_first_index_that_has_it_where_no_second_one_was_given(place):
    python(place)
    settings = uv_settings(place, PIP_FILE_INDEX_URL="https://mirror.example/simple")
    assert settings == {"UV_DEFAULT_INDEX": "https://mirror.example/simple"}


def test_variables_of_pip_win_over_its_files(place):
    python(place)
    settings = uv_settings(
        place, PIP_FILE_FIND_LINKS="/file", PIP_FIND_LINKS="/variable", PIP_INDEX_URL="https://x"
    )
    assert (settings["UV_FIND_LINKS"], settings["UV_DEFAULT_INDEX"]) == ("/variable", "https://x")
    assert "UV_INDEX" not in settings


def test_variables_of_uv_win_over_all_of_pip(place):
    python(place)
    own = {"UV_FIND_LINKS": "/mine", "UV_INDEX_STRATEGY": "first-index"}
    assert uv_settings(place, PIP_FIND_LINKS="/pip", **own) == own


def test_wheelhouse_is_the_only_source_of_packages(place):
    wheels = place / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0-py3-none-any.whl").touch()
    uv_settings(place, WHEELHOUSE=str(wheels))
    for install in recorded(place, "uv pip install"):
        assert f"--no-index --find-links {wheels}" in install


def test_wheelhouse_without_wheels_is_refused_with_the_command_that_fills_it(place):
    program(place, "uv", UV)
    done = setup(place, WHEELHOUSE="/nowhere")
    assert done.returncode == 69
    assert "WHEELHOUSE is '/nowhere', and there are no wheels in it" in done.stderr
    assert "make wheelhouse" in done.stderr


def test_extras_are_added_to_the_environment_that_is_there(place):
    program(place, "uv", UV)
    assert setup(place).returncode == 0
    (place / "record").unlink()
    done = setup(place, "tracking", "fp8")
    assert done.returncode == 0, done.stderr
    [install] = recorded(place, "uv")
    assert install.endswith(f"{CHECKED} --editable .[tracking,fp8]")
    assert (place / ".venv" / "with-tracking").exists() and (place / ".venv" / "with-fp8").exists()


def test_renewed_environment_has_the_extras_of_the_old_one(place):
    program(place, "uv", UV)
    assert setup(place).returncode == setup(place, "tracking").returncode == 0
    (place / "record").unlink()
    assert setup(place).returncode == 0
    assert recorded(place, "uv pip install")[0].endswith("--editable .[tracking]")


def test_unknown_extra_is_refused_with_the_names_of_all(place):
    program(place, "uv", UV)
    done = setup(place, "trackin")
    assert done.returncode == 69
    assert "pyproject.toml has no extra 'trackin'" in done.stderr
    assert f"name one of these: {', '.join(extras())}\n" in done.stderr
    assert not (place / "record").exists()


def extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_errors_and_documents_name_extras_that_there_are():
    files = [*(ROOT / "forge").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    named = re.findall(r"EXTRAS=([a-z0-9]+)", "".join(file.read_text() for file in files))
    assert {"tracking", "evaluate", "fp8"} <= set(named) <= set(extras())


def test_set_up_continues_without_gigatoken(place):
    program(place, "uv", f'{UV}case "$*" in *gigatoken) echo "a long story" >&2; exit 1 ;; esac')
    done = setup(place)
    assert done.returncode == 0
    assert (place / ".venv" / "ready").exists()
    assert "setup: without gigatoken: tokenizing will be slower" in done.stdout
    assert "a long story" not in done.stdout + done.stderr


# Ctrl-C reaches the whole process group, and pip and uv exit with a status of their own.
INTERRUPTED = """if [ "$1" = pip ]; then trap "exit 1" INT; kill -INT 0; exit 1; fi"""


def test_interrupted_set_up_starts_again(place):
    program(place, "uv", UV)
    assert setup(place).returncode == setup(place, "dev").returncode == 0
    program(place, "uv", UV + INTERRUPTED)
    done = setup(place)
    assert done.returncode == 130
    assert "could not be installed" not in done.stderr and "with pip" not in done.stdout
    stamps = {file.name for file in (place / ".venv").iterdir()} - {"bin"}
    assert stamps == set(), "make would take it for complete"


OUTSIDE = """#!/bin/sh
echo "outside $*" >> "$RECORD"
case "$*" in *--clear*) rm -r .venv; mkdir -p .venv/bin; ln -s '{python}' .venv/bin/python;; esac
case "$*" in *version_info*) echo 3.11;; esac
"""


@pytest.mark.parametrize("named", [{}, {"PYTHON": "python3"}, {"PYTHON": ".venv/bin/python3"}])
def test_active_environment_is_renewed_from_outside_of_it(place, named):
    """Its python3 and uv come first in PATH, and are gone after --clear."""
    active = place / ".venv" / "bin"
    active.mkdir(parents=True)
    (active / "uv").write_text('#!/bin/sh\necho "uv of .venv" >> "$RECORD"\n')
    (active / "python3").write_text(
        f'#!/bin/sh\ncase "$2" in *_base_executable*) echo {place}/base/python ;; '
        '*) echo "python3 of .venv" >> "$RECORD" ;; esac\n'
    )
    for file in active.iterdir():
        file.chmod(0o755)
    (place / "base").mkdir()
    program(place, "../base/python", OUTSIDE.format(python=place / "base" / "python"))
    path = f"{active}{os.pathsep}{place / 'bin'}"
    named |= {"UV_NO_VERIFY_HASHES": "1"}  # else pip would not be used
    done = setup(place, PATH=f"{path}{os.pathsep}/usr/bin:/bin", **named)
    assert done.returncode == 0, done.stderr
    assert "of .venv" not in (place / "record").read_text()
    assert "outside -m venv --clear .venv" in recorded(place, "outside")
    assert (place / ".venv" / "ready").exists()


def test_every_version_but_that_of_torch_has_digests():
    pins = set(re.findall(r"^[^#\s]+==\S+", (ROOT / "constraints.txt").read_text(), re.M))
    entries = re.findall(
        r"^([^#\s]+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$",
        (ROOT / "hashes.txt").read_text(),
        re.M,
    )
    assert pins - {name for name, _ in entries} == {
        pin for pin in pins if pin.startswith("torch==")
    }
    assert {name for name, _ in entries} < pins


def test_changed_file_in_a_wheelhouse_is_refused_whatever_would_install_it(place):
    python(place)
    wheels = place / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny-1-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    with open(place / "hashes.txt", "a") as file:
        file.write(f"tiny==1 --hash=sha256:{hashlib.sha256(b'a wheel').hexdigest()}\n")
    program(place, "uv", UV)
    assert setup(place, WHEELHOUSE=str(wheels)).returncode == 0
    (place / "bin" / "uv").unlink()
    (place / ".venv" / "kept").touch()
    wheel.write_bytes(b"A wheel")
    done = setup(place, WHEELHOUSE=str(wheels))
    assert done.returncode == 69
    assert f"{wheel} is not the one that hashes.txt names" in done.stderr
    assert (place / ".venv" / "kept").exists()


def test_pip_does_not_install_what_uv_refuses(place):
    program(place, "uv", f'{UV}[ "$1" != pip ] || {{ echo "Hash mismatch for x" >&2; exit 1; }}')
    done = setup(place, PIP_IN_VENV="1")
    assert done.returncode == 69
    assert (
        "Hash mismatch for x\nsetup: a package is not the one that hashes.txt names" in done.stderr
    )
    assert not recorded(place, "python -m pip install")
    assert not (place / ".venv" / "ready").exists()


REFUSED = "Without it no package would be compared with hashes.txt"
NO_UV = """#!/bin/sh
case "$2" in venv) mkdir -p .venv/bin; ln -sf {bin}/python3 .venv/bin/python; exit;; pip) exit 1;; esac
case "$*" in *version_info*) echo 3.11;; esac
"""


def test_pip_installs_nothing_unchecked_where_uv_cannot_be_had(place):
    program(place, "python3", NO_UV.format(bin=place / "bin"))
    done = setup(place)
    assert done.returncode == 69
    assert f"uv could not be used; the reason is above. {REFUSED}" in done.stderr
    assert not (place / ".venv" / "ready").exists()
    trusting = setup(place, UV_NO_VERIFY_HASHES="1")
    assert "with pip, which does not read hashes.txt" in trusting.stdout


def test_pip_installs_nothing_unchecked_where_uv_fails(place):
    program(place, "uv", f'{UV}[ "$1" != pip ] || {{ echo "no index" >&2; exit 1; }}')
    done = setup(place, PIP_IN_VENV="1")
    assert done.returncode == 69
    assert "no index" in done.stderr and "with pip" not in done.stdout
    assert not recorded(place, "python -m pip install")


def test_cache_of_uv_is_in_the_project_where_the_home_cannot_be_written(place):
    (place / "file").touch()
    settings = uv_settings(place, HOME=str(place / "file"))
    assert settings == {"UV_CACHE_DIR": str(place / ".snakemake/uv")}


def archive(path, files):
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)


# Builds without setuptools, which is not there without a network.
BACKEND = """
import zipfile

def build_editable(folder, *_):
    with zipfile.ZipFile(f"{folder}/forge-0-py3-none-any.whl", "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
    return "forge-0-py3-none-any.whl"
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "forge"
version = "0"
dependencies = ["tiny"]
"""


def wheel_files(name, version, more=""):
    folder = f"{name}-{version}.dist-info"
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{folder}/RECORD": "",
    }


@pytest.mark.parametrize("changed", [False, True])
def test_uv_installs_only_files_of_hashes_txt(place, changed):
    """A dependency, pinned in one list and with its digest in the other."""
    (place / "bin" / "uv").symlink_to(Path(sys.executable).parent / "uv")
    (place / "pyproject.toml").write_text(PROJECT)
    forge = wheel_files("forge", 0, "Requires-Dist: tiny\n")
    (place / "backend.py").write_text(f"FILES = {forge!r}\n{BACKEND}")
    (place / "forge").mkdir()
    (place / "wheels").mkdir()
    wheel = place / "wheels" / "tiny-1-py3-none-any.whl"
    archive(wheel, wheel_files("tiny", 1) | {"tiny.py": "VALUE = 1\n"})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (place / "constraints.txt").write_text("tiny==1\n")
    (place / "hashes.txt").write_text(f"tiny==1 \\\n    --hash=sha256:{digest}\n")
    if changed:
        archive(wheel, wheel_files("tiny", 1) | {"tiny.py": "VALUE = 2\n"})
    done = setup(
        place,
        PYTHON=sys.executable,
        HOME=str(place),
        UV_OFFLINE="1",
        UV_FIND_LINKS=str(place / "wheels"),
    )
    if changed:
        assert done.returncode == 69
        assert "`tiny==1`" in done.stderr and "hashes.txt names" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
    assert (place / ".venv" / "ready").exists() is not changed
    assert bool(list(place.glob(".venv/lib/*/site-packages/tiny.py"))) is not changed


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github").glob("workflows/*.yml")), ids=lambda file: file.name
)
def test_workflow_of_continuous_integration_reads_only_and_pins_what_it_runs(file):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # `on`, which YAML takes for a truth value
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"]
        for step in job["steps"]:
            assert re.fullmatch(r"actions/\w+@v\d+", step.get("uses", "actions/x@v1"))
            for install in re.findall(r"(?:pip install|uvx|pipx run) .*", step.get("run", "")):
                assert "==" in install


# Ends by Ctrl-C or with a status, as `snakemake` does, after its last line.
SNAKEMAKE = """#!/bin/sh
end() { echo "base  stopped"; exit $1; }
trap 'until [ -e may-end ]; do sleep 0.05; done; end 75' INT
[ "$FAILS" ] && end 1
echo begun
while :; do sleep 0.05; done
"""


SIGINT_PENDING = re.compile(r"^(Sig|Shd)Pnd:\s*[0-9a-f]*[2367abef]$", re.M)


def make(place, **environ):
    shutil.copy(ROOT / "Makefile", place)
    (place / ".venv/bin").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "hashes.txt", "tools", ".venv/ready"):
        (place / name).touch()
    program(place / ".venv", "snakemake", SNAKEMAKE)
    return subprocess.Popen(
        ["make", "-o", ".venv/ready", "train"],
        cwd=place,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def test_after_ctrl_c_the_last_line_of_make_is_that_of_the_command(tmp_path):
    with make(tmp_path) as process:
        for line in iter(process.stdout.readline, "begun\n"):
            assert line, "not started"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        try:
            # GNU make 4.3 prints "wait: No child processes" where its command ends before it has seen
            # the signal. `snakemake` takes a second; on a busy machine this small one was faster.
            deadline = time.monotonic() + 60
            while SIGINT_PENDING.search(Path(f"/proc/{process.pid}/status").read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            (tmp_path / "may-end").touch()
        output = process.communicate(timeout=60)[0]
    assert output == "base  stopped\n"
    assert process.returncode == -signal.SIGINT


def test_make_names_a_command_that_has_failed(tmp_path):
    with make(tmp_path, FAILS="1") as process:
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "Error 1" in output
    assert re.search(r"^make(\[\d+\])?: \*\*\* ", output, re.M)  # with a number below another make
