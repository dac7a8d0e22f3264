"""A mix of two real sources, trained with a kill and on other ranks. Threats: samples in another order,
in other proportions, twice in an epoch, or of the wrong source; data that are not those of the parent."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.batches import PAUSED, batches, record_and_pause, record_batches, windows_of
from support.live_run import TINY, TWO_RANKS, forge, make_run, wait_until
from support.repository import REPOSITORY

from forge.checkpoint import resume
from forge.checkpoint.directory import Checkpoint
from forge.core import json_lines
from forge.core.files import read_json
from forge.core.paths import checkpoint_name, tokens_folder

DOCS = REPOSITORY / "docs"
SEQ_LEN, BATCH, GOAL, CHANGE = 64, 8, 24, 10  # so long that no window is in both sources
MIX = [{"step": 0, "code": 0.75, "docs": 0.25}, {"step": CHANGE, "code": 1, "docs": 3}]
TRAIN = {
    **{"seq_len": SEQ_LEN, "max_steps": GOAL, "decay_steps": GOAL},
    **{"checkpoint_every": 6, "eval_every": 12},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A config with two sources, tokenized; a directory for results."""
    root = tmp_path_factory.mktemp("mix")
    library = Path(json.__file__).parents[1]
    sources = {
        "docs": {"inputs": [f"{DOCS}/*.md"], "document_separator": "\n\n"},
        "code": {"inputs": [f"{library}/json/*.py", f"{library}/email/*.py"]},
    }
    values = {
        **TINY,
        "data": str(root / "data"),
        "tokenize": {"sources": sources, "val_fraction": 0.2},
        "train": {**TINY["train"], **TRAIN, "keep_every": 6, "mix": MIX},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    for verb in ("tokenizer", "tokenize"):
        outcome = forge(verb, str(root / "config.yaml"))
        assert outcome.code == 0, outcome.text
    return root


def trained(run, *more, arm=record_batches):
    outcome = run.fork("train", *more, arm=arm).end()
    assert outcome.code == 0, outcome.text
    return run


@pytest.fixture(scope="module")
def base(project):
    """All steps on one rank, without an interruption."""
    return trained(make_run(project, project / "results", "base", ()))


def child_of(base, name, parent, *overrides):
    arguments = (*base.overrides, f"--run={name}", f"--parent={parent}", *overrides)
    return replace(base, folder=base.folder.with_name(name), overrides=arguments)


@pytest.fixture(scope="module")
def windows(project, base):
    """Source -> how often each window is in it: real texts repeat themselves."""
    ids = read_json(base.paths.config)["ids"]["sources"]
    found = {name: windows_of(project / "data", ids[name], SEQ_LEN) for name in ids}
    assert not found["code"].keys() & found["docs"].keys()
    return found


@pytest.fixture(scope="module")
def source_of(windows):
    """Window -> the source that it is of."""
    return {window: name for name, found in windows.items() for window in found}


def assert_no_window_twice(drawn, windows):
    """No window was drawn more often than it is in the data."""
    seen = Counter(window for rows in drawn.values() for window in rows)
    assert seen.total() == GOAL * BATCH
    there = sum(windows.values(), Counter())
    assert seen <= there, f"drawn again: {seen - there}"


def test_every_batch_has_the_weights_of_its_stage_and_no_window_comes_twice(
    base, windows, source_of
):
    drawn = batches(base.folder)
    for step, rows in drawn.items():
        sources = Counter(source_of[window] for window in rows)
        assert sources == ({"code": 6, "docs": 2} if step < CHANGE else {"code": 2, "docs": 6})
    assert_no_window_twice(drawn, windows)


def test_killed_run_resumed_on_other_ranks_has_the_samples_of_the_uninterrupted_one(project, base):
    run = make_run(project, project / "results", "killed", ("--train.on_nonfinite=stop",))
    started = run.fork("train", *TWO_RANKS, arm=record_and_pause)
    wait_until((run.folder / PAUSED).exists, "the step at which it pauses")
    wait_until(run.paths.latest.exists, "a checkpoint")
    started.kill()
    trained(run)
    assert run.events("init")[-1]["step"] in (6, 12)
    assert [event["world_size"] for event in run.events("init")] == [2, 1]
    assert batches(run.folder) == batches(base.folder)


def test_validation_loss_is_told_by_source_and_its_mean_has_the_weights_of_the_stage(base):
    lines = [one for one in json_lines.read(base.paths.metrics) if one["kind"] == "eval"]
    assert [line["step"] for line in lines] == [0, 12, 24]
    for line, share in zip(lines, (0.75, 0.25, 0.25), strict=True):
        losses = line["sources"]
        assert set(losses) == {"code", "docs"}
        mean = share * losses["code"] + (1 - share) * losses["docs"]
        assert line["loss"] == pytest.approx(mean)
    assert base.events("eval")[-1]["sources"] == lines[-1]["sources"]


def test_bits_per_byte_are_of_the_text_of_both_sources_by_their_shares(base, project):
    sizes = {}
    for name, tokens in read_json(base.paths.config)["ids"]["sources"].items():
        statistics = read_json(tokens_folder(project / "data", tokens) / "statistics.json")
        [size] = statistics["validation"].values()
        sizes[name] = size["bytes"] / size["targets"]
        assert not size["estimated"]
    lines = [one for one in json_lines.read(base.paths.metrics) if one["kind"] == "eval"]
    for line, share in zip(lines, (0.75, 0.25, 0.25), strict=True):
        bytes_per_target = share * sizes["code"] + (1 - share) * sizes["docs"]
        assert line["bpb"] == pytest.approx(line["loss"] / math.log(2) / bytes_per_target, rel=1e-9)
        assert "bpb_estimated" not in line
    assert base.events("eval")[-1]["bpb"] == lines[-1]["bpb"]


def test_checkpoint_is_valid_and_knows_how_much_was_drawn(base, source_of):
    checkpoint = Checkpoint.open(base.paths.checkpoints / checkpoint_name(12))
    outcome = forge("validate", str(checkpoint.folder), base.data)
    assert outcome.code == 0, outcome.text
    assert "next loss: replayed: step 13 bitwise equal" in outcome.text
    drawn = Counter(
        source_of[window]
        for step, rows in batches(base.folder).items()
        for window in rows
        if step < 12
    )
    assert {name: use.samples for name, use in checkpoint.manifest.mix.sources.items()} == drawn
    assert set(checkpoint.manifest.lineage.sources) == {"code", "docs"}


def test_show_has_the_sources(base, capsys):
    assert forge("show", str(base.folder)).code == 0
    shown = capsys.readouterr().out
    assert "88 samples drawn" in shown, "10 steps of 6 and 14 of 2"
    assert "75 %, 25 % from step 10" in shown


def test_child_with_the_mix_of_its_parent_is_the_parents_own_continuation(base):
    child = trained(child_of(base, "same", "base@12"))
    assert child.weights_digest() == base.weights_digest()
    assert batches(child.folder).items() <= batches(base.folder).items()


def test_annealing_branch_has_its_own_weights_and_repeats_no_window_of_its_parent(
    base, windows, source_of
):
    mix = json.dumps([{"step": 6, "code": 1, "docs": 0}, {"step": 9, "code": 1, "docs": 1}])
    child = trained(child_of(base, "annealed", "base@6", f"--train.mix={mix}"))
    found = batches(child.folder)
    assert min(found) == 6
    before = {step: rows for step, rows in batches(base.folder).items() if step < 6}
    assert_no_window_twice({**before, **found}, windows)
    for step, rows in found.items():
        share = 8 if step < 9 else 4
        assert sum(source_of[window] == "code" for window in rows) == share
    again = child.forge("train", f"--train.mix={mix.replace('9', '8')}")
    assert again.code == 78
    assert "train.mix is" in again.text
    first = child.forge("validate", "--validate.depth=load")
    assert first.code == 0, first.text


def test_sources_are_staged_as_one_copy_with_the_tokens_of_each(base, tmp_path):
    run = make_run(base.config.parent, tmp_path, "staged", ("--machine.stage.mode=always",))
    disk = f"--machine.stage.folder={tmp_path / 'disk'}"
    staged = run.forge("stage", disk)
    assert staged.code == 0, staged.text
    [folder] = read_json(run.paths.stage)["folders"].values()
    ids = read_json(base.paths.config)["ids"]
    assert {path.name for path in Path(folder).iterdir()} >= {
        "manifest.json",
        *ids["sources"].values(),
    }
    again = run.forge("stage", disk)
    assert "has the shards in" in again.text
    shard = next(Path(folder).glob("*/train-*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert "replacing a corrupt copy" in run.forge("stage", disk).text


def test_source_that_was_tokenized_again_from_other_text_is_refused_by_name(base, tmp_path):
    data = shutil.copytree(base.config.parent / "data", tmp_path / "data")
    ids = read_json(base.paths.config)["ids"]
    path = tokens_folder(data, ids["sources"]["docs"]) / "manifest.json"
    path.write_text(path.read_text() + " ")
    run = make_run(base.config.parent, base.folder.parent, "base", (f"--data={data}",))
    refused = run.forge("train", f"--train.max_steps={GOAL + 1}")
    assert refused.code == 65
    assert "the tokens of source docs" in refused.text
    assert "run `forge tokenize CONFIG` again" in refused.text
    assert run.forge("sources").code == 0
    refused = run.forge("train", f"--train.max_steps={GOAL + 1}")
    assert refused.code == 65
    assert "the tokens of source docs of this run have digest" in refused.text
    assert resume.latest(base.paths).step == GOAL
