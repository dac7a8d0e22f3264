"""Against numbers that a tracker has twice or not at all: a run that is killed and rerun, read back with
the readers of TensorBoard and MLflow, and W&B's offline files with W&B's own protobuf.
"""

from __future__ import annotations

import json
import shutil
import struct
from unittest import mock

import pytest
import yaml
from support import live_run
from support.live_run import living, wait_until
from support.run_directory import unnamed
from support.wandb_server import wandb_server

from forge.core import json_lines
from forge.core.files import read_object_or_empty
from forge.plugins.tracking import feed_process

pytestmark = pytest.mark.all


def sent(run, name):
    return read_object_or_empty(run.paths.root / "tracking" / f"{name}.json").get("step", -1)


@pytest.fixture(scope="module")
def tracked(session_runs, tmp_path_factory):
    """A run whose every process was killed when each tracker had been sent something, then rerun for
    another 20 steps: (run, address of MLflow, what the rerun said)."""
    address = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    run = session_runs(
        "tracked",
        *("--train.decay_steps=1000000", "--train.checkpoint_every=100"),
        "--tracking.tensorboard=true",
        "--tracking.wandb={project: tests, mode: offline, tags: [a, b]}",
        f"--tracking.mlflow={{tracking_uri: '{address}'}}",
    )
    started = run.start("train", "--train.max_steps=1000000")
    # MLflow makes its database first, at the lowest priority.
    with mock.patch.object(live_run, "PATIENCE_SEC", 400):
        for name in ("tensorboard", "wandb", "mlflow"):
            wait_until(lambda name=name: sent(run, name) >= 5, f"{name} is sent rows")
    for one in living():
        one.kill()
    started.process.wait()
    with mock.patch.object(feed_process, "FINISH_SEC", 400):
        done = run.forge("train", f"--train.max_steps={run.step() + 20}")
    assert done.code == 0, done.text
    return run, address, done.text


def numbers(run, name):
    """Step -> number of this name, of the first line that has the step."""
    found = {}
    for line in json_lines.read(run.paths.metrics):
        if line["kind"] == "train":
            found.setdefault(line["step"], line[name])
    return found


def test_tensorboard_has_each_step_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _, _ = tracked
    reader = EventAccumulator(str(run.paths.root / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    points = reader.Scalars("train/loss")
    assert [point.step for point in points] == sorted(numbers(run, "loss"))
    assert [point.value for point in points] == pytest.approx(
        [numbers(run, "loss")[point.step] for point in points]
    )
    assert len(reader.Scalars("run/launches")) == 2
    assert "config" in reader.Tags()["tensors"]


def test_mlflow_has_each_step_once_in_one_run(tracked):
    from mlflow.tracking import MlflowClient

    run, address, _ = tracked
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("forge")
    [found] = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(found.info.run_id, "train/loss")
    assert {point.step: point.value for point in points} == numbers(run, "loss")
    assert len(points) == len(numbers(run, "loss"))
    assert found.info.status == "FINISHED" and found.data.tags["forge.state"] == "completed"
    assert found.data.params["train.lr"] == "0.003" and found.data.params["ids.tokens"]


def records(file):
    """The records of an offline file: after 7 bytes, blocks of 32 KiB as in LevelDB's log format
    (github.com/google/leveldb, doc/log_format.md): checksum, length and kind (1 full, 2 first, 3 middle,
    4 last) of each fragment."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no header fits into the rest of the block
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def test_wandb_has_each_step_once_under_one_id(tracked):
    run, _, _ = tracked
    files = sorted((run.folder / "wandb").glob("offline-run-*/*.wandb"))
    found = [record for file in files for record in records(file)]
    rows = [
        {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    losses = {row["_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == numbers(run, "loss")
    assert len([row for row in rows if "train/loss" in row]) == len(losses)
    begun = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {one.run_id for one in begun} == {
        read_object_or_empty(run.paths.root / "tracking" / "wandb.json")["id"]
    }
    assert {(one.project, one.display_name, *one.tags) for one in begun} == {
        ("tests", "tracked", "a", "b")
    }


def test_trackers_are_no_part_of_the_config_that_was_trained(tracked):
    run, _, said = tracked
    assert "tracking" not in json.loads(run.paths.config.read_text())
    assert "warning" not in said
    assert unnamed(run.folder) == set()


def sync(run, folder, **tracking):
    """`forge sync` of the run, which is in no sample sheet, with these trackers."""
    config = folder / "mine.yaml"
    config.write_text(yaml.safe_dump({"tracking": tracking}))
    return ["sync", str(run.folder), f"--config={config}"]


def test_sync_sends_the_rest_and_fails_clearly_where_there_is_no_key(
    tracked, monkeypatch, tmp_path
):
    run, address, _ = tracked
    mlflow = {"tracking_uri": address}
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    done = run.launch(sync(run, tmp_path, tensorboard=True, wandb={}, mlflow=mlflow)).end(400)
    assert done.code == 69, done.text
    assert f"sent to tensorboard up to step {run.step()}" in done.text
    assert "tracking.wandb: there is no API key" in done.text
    assert "fix:   run `wandb login` once" in done.text
    # MLflow, which comes after it, is tried all the same.
    assert f"sent to mlflow up to step {run.step()}" in done.text


def test_sync_writes_all_of_it_again_where_the_files_of_tensorboard_were_removed(tracked, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked[0].copy(tmp_path / "tracked")
    shutil.rmtree(run.paths.root / "tensorboard")
    done = run.launch(sync(run, tmp_path, tensorboard=True)).end(400)
    assert done.code == 0, done.text
    reader = EventAccumulator(str(run.paths.root / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    assert [p.step for p in reader.Scalars("train/loss")] == sorted(numbers(run, "loss"))


def test_sync_gives_the_server_each_step_once_under_the_id_of_the_offline_run(tracked, tmp_path):
    run = tracked[0].copy(tmp_path / "tracked")
    name = read_object_or_empty(run.paths.root / "tracking" / "wandb.json")["id"]
    steps = sorted(numbers(run, "loss"))
    with wandb_server() as server:
        environ = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        # The server has the first steps already, as after a connection that was lost.
        server.runs[name] = [{"_step": step, "train/loss": 0.0} for step in steps[:7]]
        first = run.launch(sync(run, tmp_path, wandb={}), **environ).end(400)
        again = run.launch(sync(run, tmp_path, wandb={}), **environ).end(400)
    assert (first.code, again.code) == (0, 0), first.text + again.text
    assert [row["_step"] for row in server.runs[name] if "train/loss" in row] == steps
    assert {one["name"] for one in server.upserted} == {name}
    assert not list((run.folder / "wandb").glob("offline-run-*"))
