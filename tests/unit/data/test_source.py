"""The code of another program: which files belong to it, and that a change of them is another digest."""

from forge.data.inputs import source_digest, source_files


def test_code_has_another_digest_when_it_changes_and_keys_are_no_part_of_it(tmp_path):
    (tmp_path / "train.py").write_text("1")
    before = source_digest(tmp_path)
    for name in (".git/HEAD", ".env", "key.pem", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("secret")
    assert source_digest(tmp_path) == before
    (tmp_path / "train.py").write_text("2")
    assert source_digest(tmp_path) != before


def test_outputs_below_the_directory_and_what_links_to_directories_lead_to_are_no_code(tmp_path):
    source = tmp_path / "source"
    for name in ("train.py", "results/p/log.txt", "lib/results/x.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / "linked").symlink_to(tmp_path)
    found = source_files(source, [str(source / "results")])
    assert found == [source / "lib/results/x.py", source / "train.py"]
    assert source_digest(source, [str(source / "results")]) != source_digest(source)
