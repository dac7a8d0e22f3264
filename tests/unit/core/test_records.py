"""Records of another version are refused by name, and edited ones by key."""

import pytest

from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.core.process import Process
from forge.core.records import (
    Check,
    Damage,
    Lock,
    NodeResult,
    PreflightPass,
    PreflightResult,
    RanksIdentity,
    RanksResult,
    Sample,
    Trained,
    Validated,
    Validation,
    WorkflowRuns,
)

CHECK = Check("disk", "fail", "2 GiB are free", fix="free some", cause="others fill it")
RECORDS = [
    Trained(
        **{"run": "base", "goal_step": 20, "step": 20, "checkpoint": "checkpoints/step-00000020"},
        **{"weights_digest": "w" * 64, "config_digest": "c" * 64},
        parent={"run": "older", "step": 10, "digest": "p" * 64},
    ),
    Validated(step=20, loss=3.5, weights_digest="w" * 64, checkpoint_digest="c" * 64),
    Validation(
        **{"step": 20, "status": "invalid", "depth": "digests", "checkpoint_digest": "c" * 64},
        reasons=["disk: 2 GiB are free"],
        checks=[CHECK],
        samples=[Sample(prompt="a", text="ab")],
    ),
    Lock(**Process.current().to_json(), command="train", restart=1),
    Damage(reasons=["a file is missing"]),
    WorkflowRuns(folders={"base": "results/base"}),
    PreflightPass(host="node01", nodes=["node01", "node02"]),
    PreflightResult(
        **{"status": "ok", "chosen": ["node01"], "left_out": {"node02": "disk"}, "restart": 1},
        nodes=[NodeResult(node="node01", line="NODE node01 OK", checks=[CHECK])],
        ranks=RanksResult(world_size=1, checks=[]),
        identity=RanksIdentity(
            **{"job": "17", "nodes": {"node01": {"python": "3.11"}, "node02": None}},
            **{
                "ranks_per_node": 1,
                "launcher": "srun",
                "fabric": {"backend": "gloo"},
                "staged": [],
            },
        ),
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_is_read_as_it_was_written(tmp_path, record):
    path = tmp_path / "record.json"
    assert type(record).read_if_there(path) is None
    record.write(path)
    assert type(record).read(path) == record
    assert read_json(path)["format"] == record.FORMAT


@pytest.mark.parametrize("other", [0, 2, "1", None])
def test_record_of_another_version_is_refused_by_its_format(tmp_path, other):
    path = tmp_path / "trained.json"
    RECORDS[0].write(path)
    write_json(path, {**read_json(path), "format": other, "new": "key"})
    with pytest.raises(DataError, match="this version of Forge reads 1") as caught:
        Trained.read(path)
    assert f"{path} has format {other!r}" in str(caught.value) and "remove it" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step": "many"}, "step: Input should be a valid integer"),
        ({"older": 1}, "older: Extra inputs"),
    ],
)
def test_edited_record_is_refused_by_its_key(tmp_path, change, told):
    path = tmp_path / "trained.json"
    RECORDS[0].write(path)
    write_json(path, read_json(path) | change)
    with pytest.raises(DataError, match=f"trained.json cannot be read: {told}"):
        Trained.read_if_there(path)


def test_what_later_steps_depend_on_leaves_out_what_people_read():
    short = RECORDS[2].short
    assert (short.status, short.step, short.checkpoint_digest) == ("invalid", 20, "c" * 64)
    where_known = {"bpb", "bpb_estimated"}
    assert set(short.model_dump()) == set(Validated.model_fields) - where_known
