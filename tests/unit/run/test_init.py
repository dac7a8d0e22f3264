"""What `forge init` writes, and what it leaves alone; tests/workflow/test_wheel.py trains there."""

import re

import pytest
import yaml
from support.repository import CLONE, REPOSITORY

import forge
from forge.cli import main
from forge.core.errors import Exit
from forge.core.paths import shipped
from forge.run import init


@pytest.fixture(autouse=True)
def _copies_what_is_shipped(monkeypatch):
    """The config beside the imported package is a user's."""
    monkeypatch.setattr(init, "shipped", lambda: REPOSITORY)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_project_names_the_version_that_made_it_and_has_what_its_files_name(tmp_path, capsys):
    assert main(["init", str(tmp_path / "a/b")]) == Exit.DONE
    project = tmp_path / "a/b"
    assert f'snakefile_of("{forge.__version__}")' in (project / "workflow/Snakefile").read_text()
    made = files(project)
    for path in made:
        for named in re.findall(r"\$schema=(\S+)", (project / path).read_text()):
            assert (project / path).parent.joinpath(named).is_file(), path
    assert {"config/runs.tsv", "config/config.yaml", "profiles/local/config.yaml"} <= made
    assert yaml.safe_load((project / "config/config.yaml").read_text())
    assert f"cd {project}" in capsys.readouterr().err


@pytest.mark.parametrize("there", [".git/HEAD", "config/config.yaml"])
def test_directory_with_anything_in_it_is_refused_and_kept(tmp_path, capsys, there):
    (tmp_path / there).parent.mkdir()
    (tmp_path / there).write_text("mine")
    assert main(["init", str(tmp_path)]) == Exit.CONFIG
    assert f"{tmp_path} is not empty: {there.split('/')[0]}" in capsys.readouterr().err
    assert files(tmp_path) == {there}


@pytest.mark.parametrize("given", ["file", "file/below", "dangling"])
def test_path_that_can_be_no_directory_is_refused_without_a_traceback(tmp_path, capsys, given):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert main(["init", str(tmp_path / given)]) == Exit.UNFIT
    said = capsys.readouterr().err
    assert given in said and "Traceback" not in said
    assert files(tmp_path) == {"file"}


def test_empty_directory_is_filled_also_the_current_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == Exit.DONE
    assert "workflow/Snakefile" in files(tmp_path) and "  cd " not in capsys.readouterr().err


def test_workflow_and_citation_name_the_version_of_the_package():
    """Else the workflow of a tag refuses the package of the same tag."""
    snakefile, citation = (REPOSITORY / name for name in ("workflow/Snakefile", "CITATION.cff"))
    [version] = re.findall(
        r'^as_module.refuse_other_version\("(.+)"\)$', snakefile.read_text(), re.M
    )
    assert version == forge.__version__ == yaml.safe_load(citation.read_text())["version"]
    assert shipped() == CLONE
