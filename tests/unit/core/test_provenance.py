"""A checkpoint that does not say what made it cannot be trusted, repeated or compared."""

import subprocess
import sys
from pathlib import Path

import pytest

import forge
from forge.core import provenance
from forge.core.config import Ids, load_config
from forge.core.files import digest_bytes
from forge.data.content_ids import resolve

IDS = Ids(tokenizer="a" * 12, tokens="b" * 12)


def config_of(**overrides):
    return resolve(load_config("/dev/null", {**overrides, "ids": IDS}))


def test_config_digest_depends_on_hyperparameters_and_not_on_folders():
    digest = provenance.config_digest(config_of())
    assert provenance.config_digest(config_of(run="x", results="r", data="d")) == digest
    assert provenance.config_digest(config_of(**{"report.sample_tokens": 5})) == digest
    assert provenance.config_digest(config_of(**{"train.lr": 0.5})) != digest


@pytest.mark.parametrize("values", [{}, {"train.lr": 0.5, "report.sample_tokens": 5}])
def test_digest_of_a_config_json_is_that_of_its_config(values):
    config = config_of(**values)
    assert provenance.recorded_digest(config.training_json()) == provenance.config_digest(config)


def test_first_package_of_a_name_counts_and_the_rest_of_a_failed_installation_does_not(
    tmp_path, monkeypatch
):
    for folder, metadata in {
        "a/one-1.dist-info": "Name: one\nVersion: 1\n\nName: other\nVersion: 3\n",
        "b/one-2.dist-info": "Name: one\nVersion: 2\n",
        "b/broken-1.dist-info": "",
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert provenance.installed_packages() == {"one": "1"}


def test_copies_inside_of_setuptools_are_no_packages(tmp_path, monkeypatch):
    before = provenance.installed_packages()
    vendored = tmp_path / "setuptools/_vendor"
    (vendored / "own-1.dist-info").mkdir(parents=True)
    (vendored / "own-1.dist-info/METADATA").write_text("Name: own\nVersion: 1\n")
    monkeypatch.syspath_prepend(vendored)
    assert provenance.installed_packages() == before


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    package = tmp_path / "forge"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(forge, "__file__", str(package / "__init__.py"))
    return tmp_path


def git(folder, *arguments):
    names = ["-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgSign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_code_names_the_commit_and_whether_files_differ(checkout):
    git(checkout, "init")
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "x")
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked").touch()
    assert provenance.code() == {"version": forge.__version__, "commit": commit, "dirty": False}
    (checkout / "forge" / "__init__.py").write_text("a = 2\n")
    assert provenance.code()["dirty"] is True


def test_code_that_differs_from_its_commit_has_the_digest_of_the_difference(checkout):
    git(checkout, "init")
    (checkout / "forge/latin.py").write_bytes(b"# Gr\xfc\xdfe\n")  # no UTF-8
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "x")
    git(checkout, "config", "color.ui", "always")
    (checkout / "forge/latin.py").write_bytes(b"# Gr\xfc\xdfe an alle\n")
    first = provenance.code()["diff"]
    by_hand = ["git", "-C", str(checkout), "diff", "HEAD", "--binary", "--no-color"]
    said = subprocess.run(by_hand, check=True, capture_output=True).stdout
    assert first == digest_bytes(said)
    (checkout / "forge/latin.py").write_bytes(b"# Gr\xfc\xdfe\n")
    assert "diff" not in provenance.code()


def test_code_outside_of_git_still_has_its_version(checkout, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    unknown = {"version": forge.__version__, "commit": None, "dirty": None}
    assert provenance.code() == unknown
    monkeypatch.setenv("PATH", str(Path("/nonexistent")))
    assert provenance.code() == unknown
