"""The first command that a newcomer gives: on a machine that cannot, it says what to do instead."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.sh"

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
exec {python} -c 'import sys; sys.version_info = {version}; {before}; exec(sys.argv[1])' "$2"
"""

UV = """#!/bin/sh
PATH=/usr/bin:/bin
echo "uv $*" >> "$RECORD"
env | grep ^UV_ | sort > "$RECORD.env"
mkdir -p .venv/bin
printf '#!/bin/sh\\necho "python $*" >> "$RECORD"\\n' > .venv/bin/python
chmod +x .venv/bin/python
"""


@pytest.fixture
def place(tmp_path):
    """A project with setup.sh alone, and a PATH with little more than a shell."""
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools" / "setup.sh")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "tr", "sed", "touch"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def program(place, name, text):
    (place / "bin" / name).write_text(text)
    (place / "bin" / name).chmod(0o755)


def python(place, version=(3, 11, 9), before="pass"):
    text = PYTHON.format(python=sys.executable, version=version, before=before)
    program(place, "python3", text)


def setup(place, **environ):
    return subprocess.run(
        [place / "bin" / "bash", place / "tools" / "setup.sh"],
        env={"PATH": str(place / "bin"), "RECORD": str(place / "record"), **environ},
        capture_output=True,
        text=True,
        check=False,
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
    assert "cannot run 'python3'. Install Python 3.11 or newer" in done.stderr
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
    assert uv_settings(place) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    assert (place / "record").read_text().splitlines() == [
        "uv venv --quiet --clear --python >=3.11 .venv",
        "uv pip install --quiet --compile-bytecode --python .venv/bin/python"
        " --constraint constraints.txt --editable .[dev,bench]",
        "python -m compileall -q forge",
    ]


def test_uv_serves_where_python_is_too_old(place):
    python(place, (3, 9, 18))
    uv_settings(place)
    assert "--python >=3.11 .venv" in (place / "record").read_text()


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
    _, install, _ = (place / "record").read_text().splitlines()
    assert f"--no-index --find-links {wheels}" in install


def test_wheelhouse_without_wheels_is_refused_with_the_command_that_fills_it(place):
    program(place, "uv", UV)
    done = setup(place, WHEELHOUSE="/nowhere")
    assert done.returncode == 69
    assert "WHEELHOUSE is '/nowhere', and there are no wheels in it" in done.stderr
    assert "make wheelhouse" in done.stderr
