"""`Containerfile` and `forge.def` build the same image: what only one of them has is never tried."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.repository import REPOSITORY as ROOT

pytestmark = pytest.mark.tools

PODMAN = (ROOT / "Containerfile").read_text()
APPTAINER = (ROOT / "forge.def").read_text()
SCRIPT = "tools/make_image.sh"


def copied_by_podman():
    lines = [line.split()[1:] for line in PODMAN.splitlines() if line.startswith("COPY ")]
    return {name for *names, _target in lines for name in names}


def copied_by_apptainer():
    section = APPTAINER.partition("%files\n")[2].partition("\n\n")[0]
    return {line.split()[0] for line in section.splitlines()}


def test_both_images_have_the_same_files_which_exist():
    assert copied_by_podman() == copied_by_apptainer()
    assert all((ROOT / name).exists() for name in copied_by_podman())


def test_what_images_copy_is_all_that_an_installation_of_forge_needs(tmp_path):
    source, target = tmp_path / "src", tmp_path / "wheel"
    for name in copied_by_podman():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(target)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, timeout=300)
    [wheel] = target.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("/share/forge/workflow/Snakefile") for name in names)
    packages = {Path(name).parts[0] for name in names}
    assert {"forge", "snakemake_executor_plugin_forge"} <= packages


def test_both_images_begin_with_the_same_system_and_run_the_same_script():
    [base] = re.findall(r"^FROM docker.io/library/(\S+)$", PODMAN, re.MULTILINE)
    assert re.findall(r"^From: (\S+)$", APPTAINER, re.MULTILINE) == [base]
    assert f"RUN /src/{SCRIPT} /src && rm -r /src\n" in PODMAN
    assert f"%post\n    /src/{SCRIPT} /src\n    rm -r /src\n" in APPTAINER


def test_both_images_have_their_python_first_on_the_path_where_forge_looks_for_it():
    path = "PATH=/opt/forge/bin:$PATH"
    assert f"ENV {path}\n" in PODMAN and f"export {path}\n" in APPTAINER
    assert "venv /opt/forge\n" in (ROOT / SCRIPT).read_text()


def test_images_install_only_files_of_hashes_txt():
    script = (ROOT / SCRIPT).read_text()
    assert "hashes.txt" in copied_by_podman()
    assert '--constraint "$source/hashes.txt"' in script
    for install in re.findall(r"/pip install .*", script):
        assert "--require-hashes" in install


def test_script_of_the_images_is_one_of_sh():
    done = subprocess.run(
        ["sh", "-n", str(ROOT / SCRIPT)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
