"""A manifest decides what a checkpoint is: one with a wrong byte, key or bound must not be believed, and
one that a commit of Forge with fewer config keys wrote must still open."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.manifests import IDS, manifest_of, stored, write_as_another_program

import forge
from forge.checkpoint.manifest import FORMAT, MANIFEST, Lineage, Manifest, ParentCheckpoint
from forge.core import provenance
from forge.core.config import Ids, ResolvedConfig
from forge.core.errors import DataError, OtherFormat
from forge.core.files import canonical, digest_bytes, read_json, write_json

# Its config lacks keys that configs have today; host and paths are made up.
RECORDED = Path(__file__).parent / "recorded"
HUGE = "9" * 5000


@pytest.fixture
def folder(tmp_path):
    """A directory with a valid manifest and nothing else."""
    manifest_of(10, files={"__0_0.distcp": stored(b"weights")}).write(tmp_path)
    return tmp_path


def test_recorded_manifest_opens_and_is_written_again_with_the_same_bytes_and_digest(tmp_path):
    found = Manifest.read(RECORDED)
    assert found.sealed() == found
    assert found.digest == "8c6187ed41caf38885e745836440fe10a450c9fab8aa403ce821c0faf307e3a9"
    assert found.write(tmp_path) == found
    assert (tmp_path / MANIFEST).read_bytes() == (RECORDED / MANIFEST).read_bytes()


def test_recorded_manifest_is_read_by_attributes():
    found = Manifest.read(RECORDED)
    assert (found.step, found.world_size, found.decay_steps, found.next_sample) == (30, 1, 30, 240)
    assert found.reference.losses == [2.759774923324585]
    assert found.files["__0_0.distcp"].bytes == 181200
    assert found.lineage.parent and found.lineage.parent.run == "hot"
    assert found.lineage.config.model.dropout == 0.0


def test_what_is_written_is_read_again(folder):
    written = manifest_of(10, files={"__0_0.distcp": stored(b"weights")}).sealed()
    assert Manifest.read(folder) == written


def test_every_manifest_has_every_key_also_where_it_is_empty(folder):
    content = read_json(folder / MANIFEST)
    assert content.keys() == Manifest.model_fields.keys() - {"merged"}  # absent but in a merge
    assert (content["mix"], content["spike_window"]) == (None, [])
    lineage = content["lineage"]
    assert lineage.keys() == Lineage.model_fields.keys() - {"environment"}  # most machines add none
    assert (lineage["parent"], lineage["sources"], lineage["model"]) == (None, {}, None)
    assert lineage["versions"]["torchao"] is None
    assert lineage["config"]["train"]["fp8"] is None
    ids = lineage["config"]["ids"]
    assert ids.keys() == Ids.model_fields.keys() - {"plugins", "plugins_before"}  # most need none
    assert (ids["sources"], ids["inputs"], ids["model"]) == ({}, "", "")


@pytest.mark.parametrize("key", ["mix", "spike_window", "reference", "lineage"])
def test_manifest_without_a_key_is_refused_by_its_name(folder, key):
    content = read_json(folder / MANIFEST)
    del content[key], content["digest"]
    write_json(folder / MANIFEST, {**content, "digest": digest_bytes(canonical(content))})
    with pytest.raises(DataError, match=f"cannot be read: {key}: Field requ"):
        Manifest.read(folder)


def test_files_are_part_of_the_digest():
    manifest = manifest_of(10).sealed()
    other = manifest.with_files({"__0_0.distcp": stored(b"weights")})
    assert other.digest == "" != other.sealed().digest != manifest.digest


def test_manifest_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        manifest_of(10).step = 20


def test_key_of_a_later_version_is_kept_and_counts_in_the_digest(folder):
    write_as_another_program(folder, later=[1])
    found = Manifest.read(folder)
    assert found.sealed() == found
    assert found.to_json()["later"] == [1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "10"),
        ("step", -1),
        ("step", True),
        ("step", 10**400),
        ("world_size", 0),
        ("files", ["__0_0.distcp"]),
        ("files", {"../../config.json": {"bytes": 1, "digest": "a"}}),
        *(
            ("files", {name: {"bytes": 1, "digest": "a"}})
            for name in ("", ".", "..", "/etc/passwd", "a/b", "a\0", "a\n", "\x1b[2J", "a" * 256)
        ),
        ("files", {"a": {"bytes": 10**400, "digest": "a"}}),
        ("files", {"a": 7}),
        ("lineage", None),
        ("lineage", {"config": []}),
        ("reference", {"losses": "none"}),
    ],
)
def test_manifest_with_a_wrong_key_and_the_right_digest_is_refused(folder, key, value):
    write_as_another_program(folder, **{key: value})
    with pytest.raises(DataError, match=rf"cannot be read: {key}"):
        Manifest.read(folder)


@pytest.mark.parametrize("text", ["[]", "7", "null", f'{{"format": {HUGE}}}', "[" * 10**5])
def test_file_without_a_json_object_is_refused(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=r"is not a checkpoint|is not JSON"):
        Manifest.read(folder)


@pytest.mark.parametrize(("old", "new"), [('"step": 10', '"step": 11'), ("5.5", "NaN")])
def test_changed_manifest_does_not_match_its_digest(folder, old, new):
    """NaN: numbers that JSON does not have."""
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new))
    with pytest.raises(DataError, match="does not match the digest"):
        Manifest.read(folder)


@pytest.mark.parametrize("other", [FORMAT - 1, 9, "1", None])
def test_manifest_of_another_format_is_refused_by_name_with_what_to_do(folder, other):
    """Before its digest is looked at: what the digest covers is a matter of the format."""
    write_json(folder / MANIFEST, {"format": other})
    said = f"has format {other!r}, this version of Forge reads {FORMAT}"
    with pytest.raises(OtherFormat, match=said) as caught:
        Manifest.read(folder)
    assert "use that version for this run" in caught.value.fix
    assert "start again under a new run name" in caught.value.fix


def test_lineage_names_everything_that_made_the_model():
    config = ResolvedConfig(ids=IDS)
    numerics = read_json(RECORDED / MANIFEST)["lineage"]["numerics"]
    parent = ParentCheckpoint(run="base", step=50, digest="p" * 64)
    lineage = Lineage.of(
        config,
        tokenizer_digest="t" * 64,
        tokens_digest="d" * 64,
        numerics=numerics,
        parent=parent,
    )
    record = lineage.to_json()
    assert record["config"] == {**config.to_json(), "ids": config.ids.model_dump()}
    assert record["config_digest"] == provenance.config_digest(config)
    assert record["tokenizer"] == {"id": IDS.tokenizer, "digest": "t" * 64}
    assert record["tokens"] == {"id": IDS.tokens, "digest": "d" * 64}
    assert set(record["versions"]) == {"python", "torchao", *provenance.PACKAGES}
    assert record["hardware"]["cpu"]
    assert record["code"]["version"] == forge.__version__
    assert record["numerics"] == numerics
    assert record["parent"] == {"run": "base", "step": 50, "digest": "p" * 64}
    canonical(record)  # plain JSON
