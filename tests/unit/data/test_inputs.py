"""Input files of another program: their digests, and that a change of them is noticed."""

import os

import pytest

from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.files import digest_bytes, read_json, write_json
from forge.core.paths import inputs_folder
from forge.data import content_ids
from forge.data.content_ids import resolve
from forge.data.inputs import InputSet, make_inputs


@pytest.fixture
def config(tmp_path):
    for name in ("ag/train.csv", "ag/deep/test.csv"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    program = {"command": ["x"], "inputs": [f"{tmp_path}/in/ag/**"]}
    values = {"data": str(tmp_path / "data"), "program": program}
    return resolve(checked(Config, values, "config.yaml"))


def test_every_file_has_its_digest_below_the_directory_that_has_all(config, tmp_path):
    found = InputSet.open(make_inputs(config).parent)
    assert found.data == str(tmp_path / "in/ag")
    assert {e.name: e.digest for e in found.manifest.files} == {
        "deep/test.csv": digest_bytes(b"ag/deep/test.csv"),
        "train.csv": digest_bytes(b"ag/train.csv"),
    }


def test_a_second_time_nothing_is_read(config, capsys):
    make_inputs(config)
    make_inputs(config)
    assert "nothing to do" in capsys.readouterr().err


def test_file_that_was_edited_after_its_digest_was_made_is_named(config, tmp_path):
    folder = make_inputs(config).parent
    found = InputSet.open(folder)
    found.check_unchanged()
    path = tmp_path / "in/ag/train.csv"
    path.write_text("AG/train.csv")
    os.utime(path, ns=(2**62, 2**62))
    with pytest.raises(DataError, match=r"train\.csv has changed since its digest was made"):
        found.check_unchanged()


@pytest.mark.parametrize("place", ["files", "downloads"])
@pytest.mark.parametrize("name", ["../../.ssh/id", "/etc/passwd", "a//b", "."])
def test_list_that_names_a_file_outside_is_not_believed(config, place, name):
    path = make_inputs(config)
    listed = read_json(path)
    listed[place] = [{"name": name, "size": 1, "digest": "0" * 64}]
    write_json(path, listed)
    for opened in (InputSet.open, InputSet.open_copy):
        with pytest.raises(DataError, match=f"{place}.0.name: .* is not a path below"):
            opened(path.parent)


def test_input_with_a_line_break_in_its_name_is_refused_by_name(config, tmp_path):
    (tmp_path / "in/ag/a\nb.csv").write_text("")
    with pytest.raises(DataError, match="has a control character in its name"):
        make_inputs(config)


def test_other_files_are_another_id(config, tmp_path):
    (tmp_path / "in/ag/more.csv").write_text("more")
    content_ids._inputs_id.cache_clear()
    again = resolve(checked(Config, {**config.to_json(), "ids": None}, "config.yaml"))
    assert inputs_folder("data", again.ids.inputs) != inputs_folder("data", config.ids.inputs)


def test_inputs_that_match_nothing_are_named():
    program = {"command": ["x"], "inputs": ["nowhere/**"]}
    with pytest.raises(DataError, match=r"program\.inputs: 'nowhere/\*\*' matches no files"):
        resolve(checked(Config, {"program": program}, "config.yaml"))
