"""A run from elsewhere is data: its links and names lead to nothing outside of it.

Threat: somebody hands out a run whose `latest` leads to a directory of the user, which is moved to
quarantine; with an unfinished commit that places a directory anywhere; with a seal that names a file
outside of the checkpoint; with a link to a secret. Whoever makes the files makes their digests too.
"""

import os

import pytest
from support.manifests import IDS, MADE_BY, save

from forge import cli
from forge.checkpoint import directory, resume, sealed
from forge.checkpoint.manifest import StoredFile
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.files import canonical, digest_bytes, digest_file, write_json
from forge.core.paths import RunPaths
from forge.core.program_settings import Checkpoints

CONFIG = ResolvedConfig(ids=IDS)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results" / "stranger")


@pytest.fixture
def thesis(tmp_path):
    """A directory of the user."""
    folder = tmp_path / "home" / "thesis"
    folder.mkdir(parents=True)
    (folder / "main.tex").write_text("years")
    return folder


def tree(folder):
    """Everything below a directory: contents of files, and where links point to."""
    return {
        str(path): path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def use(paths):
    """Every way in which a command looks for the checkpoint of a run."""
    return (
        lambda: resume.latest(paths),
        lambda: resume.check_resumable(CONFIG, paths),
        lambda: resume.repaired_latest(paths),
        lambda: directory.prune(paths, keep_last=1),
    )


# --- links of Forge's own runs --------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kind", ["absolute", "relative", "gone", "above", "here", "a link"])
def test_latest_that_leads_out_is_refused_and_nothing_is_moved(paths, thesis, kind, there):
    paths.checkpoints.mkdir(parents=True)
    if there:
        save(paths, 10)
        paths.latest.unlink()
    if kind == "a link":
        (paths.checkpoints / "step-00000020").symlink_to(thesis)
    paths.latest.symlink_to(
        {
            "absolute": thesis,
            "relative": os.path.relpath(thesis, paths.checkpoints),
            "gone": thesis / "gone",
            "above": "..",
            "here": ".",
            "a link": "step-00000020",
        }[kind]
    )
    before = tree(thesis.parents[1])
    fix = f"ln -sfn step-00000010 {paths.latest}" if there else f"rm {paths.latest}"
    for action in use(paths):
        with pytest.raises(DataError, match="it is not followed") as caught:
            action()
        assert str(paths.latest.readlink()) in str(caught.value)
        assert fix in caught.value.fix
    assert tree(thesis.parents[1]) == before


def test_latest_on_a_checkpoint_of_another_run_is_refused_and_it_stays_there(paths, tmp_path):
    """As a user sets it to start from there; were it corrupt, it would be taken away from its run."""
    other = save(RunPaths(tmp_path / "results" / "other"), 20)
    (other.folder / "__0_0.distcp").write_bytes(b"corrupt")
    save(paths, 10)
    paths.latest.unlink()
    paths.latest.symlink_to(f"../../other/checkpoints/{other.folder.name}")
    for action in use(paths):
        with pytest.raises(DataError, match=f"other/checkpoints/{other.folder.name}") as caught:
            action()
        assert f"ln -sfn step-00000010 {paths.latest}" in str(caught.value)
        assert "`parent`" in str(caught.value)
    assert other.folder.is_dir()


def test_latest_by_a_name_with_a_slash_behind_it_is_followed(paths):
    save(paths, 10)
    paths.latest.unlink()
    paths.latest.symlink_to("./step-00000010/")  # as a shell completes it
    assert resume.repaired_latest(paths).step == resume.latest(paths).step == 10


def test_unfinished_commit_places_nothing_outside(paths, tmp_path):
    startup = tmp_path / "home" / ".ipython" / "startup"
    startup.parent.mkdir(parents=True)
    planted = paths.checkpoints / f"{directory.TEMPORARY}replaced-{startup}"
    planted.mkdir(parents=True)
    (planted / "00-evil.py").write_text("print('pwned')")
    (paths.checkpoints / f"{directory.TEMPORARY}latest").symlink_to(startup)
    for action in (lambda: resume.repaired_latest(paths), lambda: resume.latest(paths)):
        with pytest.raises(DataError, match=r"\.writing-latest points to .*it is not followed"):
            action()
    assert list(startup.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/quarantine"])
def test_directory_of_a_run_that_is_a_link_is_not_written_into(paths, tmp_path, name):
    theirs = tmp_path / "home" / "theirs"
    (theirs / ".writing-thesis").mkdir(parents=True)
    link = paths.root / name
    if name == "checkpoints":
        paths.root.mkdir(parents=True)
    else:
        saved = save(paths, 10)
        (saved.folder / "__0_0.distcp").unlink()  # to be moved there
    link.symlink_to(theirs)
    before = tree(theirs)
    with pytest.raises(DataError, match=f"{name} is a link to .*theirs.*it is not followed"):
        resume.repaired_latest(paths)
    assert tree(theirs) == before


def test_results_and_a_run_may_be_links(paths, tmp_path):
    """As on clusters, where both are on scratch."""
    for place in (paths.root.parent, paths.root):
        (tmp_path / "scratch" / place.name).mkdir(parents=True)
        place.symlink_to(tmp_path / "scratch" / place.name)
    for step in (10, 20, 30):
        save(paths, step)
    assert resume.repaired_latest(paths).step == resume.latest(paths).step == 30
    assert list(resume.latest(paths).bad_files()) == []


def test_link_in_a_checkpoint_to_a_file_outside_is_corrupt(paths, thesis):
    saved = save(paths, 10, content=b"years")
    (saved.folder / "__0_0.distcp").unlink()
    (saved.folder / "__0_0.distcp").symlink_to(thesis / "main.tex")
    assert list(saved.bad_files()) == ["__0_0.distcp is a link out of its directory"]
    with pytest.raises(DataError, match="is a link out of its directory"):
        saved.file_list.check_sizes()


def test_linked_checkpoint_is_none_of_the_run(paths, tmp_path):
    other = save(RunPaths(tmp_path / "results" / "other"), 20)
    save(paths, 10)
    (paths.checkpoints / other.folder.name).symlink_to(other.folder)
    assert [path.name for path in directory.committed(paths.checkpoints)] == ["step-00000010"]


# --- seals of programs ----------------------------------------------------------------------------


@pytest.fixture
def one(paths):
    """The checkpoint of step 1 of a program, with one file."""
    folder = paths.checkpoints / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / "w.bin").write_text("weights")
    program = {"command": ["true"], "goal": 1, "checkpoints": {}}
    values = {"run": "stranger", "results": str(paths.root.parent), "program": program}
    write_json(paths.config, values)
    return folder


def seal(folder, *names):
    """A seal of these files, with their right digests, as a stranger makes it."""
    files = {
        name: StoredFile(bytes=(folder / name).stat().st_size, digest=digest_file(folder / name))
        for name in names
    }
    entries = {name: file.model_dump(mode="json") for name, file in files.items()}
    lineage = MADE_BY.model_dump(mode="json")
    digest = digest_bytes(canonical([1, entries]))
    facts = {"format": 1, "step": 1, "files": entries, "lineage": lineage, "digest": digest}
    write_json(folder.with_name(f"{folder.name}.forge.json"), facts)
    folder.with_name("latest").unlink(missing_ok=True)
    folder.with_name("latest").symlink_to(folder.name)


def export(paths, *more):
    return cli.main(["export", str(paths.root), *map(str, more)])


@pytest.mark.parametrize(
    "name", ["../.bashrc", "sub/../../.bashrc", "/absolute", "./w.bin", "a//b"]
)
def test_seal_that_names_a_file_outside_exports_nothing(one, paths, tmp_path, name, capsys):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("# mine\n")
    name = str(tmp_path / "evil") if name == "/absolute" else name
    (one / "sub").mkdir()
    (one / "a").mkdir()
    for evil in {one / name, one.parent / ".bashrc"} - {one / "w.bin"}:
        evil.write_text("echo pwned\n")
    seal(one, "w.bin", name)
    before = tree(home)
    assert export(paths, "--to", home / "out") == 65
    assert "has no sealed checkpoint" in capsys.readouterr().err
    assert tree(home) == before


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_link_in_a_sealed_checkpoint_is_not_exported(one, paths, thesis, linked, capsys):
    name = "main.tex" if linked == "file" else "sub/main.tex"
    (one / name.partition("/")[0]).symlink_to(thesis / name if linked == "file" else thesis)
    seal(one, "w.bin", name)
    assert export(paths, "--to", paths.root.parent / "out") == 65
    assert "a link out of its directory" in capsys.readouterr().err
    assert not (paths.root.parent / "out").exists()
    (found,) = sealed.ProgramCheckpoints(paths, Checkpoints(), 1).sealed()
    assert list(found.bad_files()) == [f"{name} is a link out of its directory"]


def test_links_inside_of_a_checkpoint_are_sealed_and_others_are_not(one, paths, thesis):
    (one / "again.bin").symlink_to("w.bin")
    (one / "out.tex").symlink_to(thesis / "main.tex")
    checkpoints = sealed.ProgramCheckpoints(paths, Checkpoints(), 1)
    found = checkpoints.seal(one, 1, MADE_BY)
    assert sorted(found.manifest.files) == ["again.bin", "w.bin"]
    assert list(found.bad_files()) == []


def test_name_that_no_seal_may_have_is_said(one, paths):
    (one / "a\nb").write_text("")
    with pytest.raises(DataError, match=r"cannot be sealed: .*is not a path below"):
        sealed.ProgramCheckpoints(paths, Checkpoints(), 1).seal(one, 1, MADE_BY)


@pytest.mark.parametrize("name", ["export", "checkpoints"])
def test_export_into_a_linked_directory_of_the_run_is_refused(one, paths, thesis, name, capsys):
    seal(one, "w.bin")
    if name == "checkpoints":
        paths.checkpoints.rename(thesis / "theirs")
        (paths.root / name).symlink_to(thesis / "theirs")
    else:
        (paths.root / name).symlink_to(thesis)
    before = tree(thesis)
    assert export(paths) == 65
    assert f"{paths.root / name} is a link" in capsys.readouterr().err
    assert tree(thesis) == before


def test_unsealed_checkpoint_is_not_moved_through_a_linked_quarantine(one, paths, tmp_path):
    """A program's checkpoint may be a file of any name, which startup directories would run."""
    startup = tmp_path / "startup"
    startup.mkdir()
    paths.quarantine.symlink_to(startup)
    with pytest.raises(DataError, match="quarantine is a link"):
        sealed.ProgramCheckpoints(paths, Checkpoints(), 1).repaired_latest()
    assert list(startup.iterdir()) == [] and one.is_dir()
