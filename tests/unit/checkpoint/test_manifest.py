"""A manifest decides what a checkpoint is: one with a wrong byte, key or bound must not be believed, and
one that an earlier commit of Forge wrote must still open."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.manifests import IDS, manifest_of, stored, write_as_another_program

import forge
from forge.checkpoint.manifest import FORMAT, MANIFEST, Lineage, Manifest, ParentCheckpoint
from forge.core import provenance
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, OtherFormat
from forge.core.files import canonical, read_json

# Written by a training of the commit before the manifest was typed; host and paths are made up, and the
# keys that were renamed since are the new ones.
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
    assert found.digest == "7d9dcb6815a047ac7bf8c9c2fbb14bbadc1a88e66309562078c7173146cf3198"
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
    assert "parent" not in read_json(folder / MANIFEST)["lineage"]


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
        ("probe", {"losses": "none"}),
    ],
)
def test_manifest_with_a_wrong_key_and_the_right_digest_is_refused(folder, key, value):
    write_as_another_program(folder, **{key: value})
    with pytest.raises(DataError, match=rf"is not the manifest of a checkpoint: {key}"):
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


def test_manifest_of_another_format_is_refused_by_name_with_what_to_do(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace(f'"format": {FORMAT}', '"format": 9'))
    with pytest.raises(OtherFormat, match=f"is a checkpoint of format 9, not {FORMAT}") as caught:
        Manifest.read(folder)
    assert "train under a new run name" in str(caught.value)


def test_checkpoint_with_a_pickled_index_is_named_as_of_an_earlier_development_version(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace(f'"format": {FORMAT}', '"format": 3'))
    with pytest.raises(OtherFormat, match="an earlier development version of Forge, whose index"):
        Manifest.read(folder)


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
    assert record["config"] == config.to_json()
    assert record["config_digest"] == provenance.config_digest(config)
    assert record["tokenizer"] == {"id": IDS.tokenizer, "digest": "t" * 64}
    assert record["tokens"] == {"id": IDS.tokens, "digest": "d" * 64}
    assert set(record["versions"]) == {"python", *provenance.PACKAGES}
    assert record["hardware"]["cpu"]
    assert record["code"]["version"] == forge.__version__
    assert record["numerics"] == numerics
    assert record["parent"] == {"run": "base", "step": 50, "digest": "p" * 64}
    canonical(record)  # plain JSON
