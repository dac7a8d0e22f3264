"""Merges of real runs. Threats: a number that is not the mean, a checkpoint of another trunk or a corrupt
one in it, half a merge under its name, a run that resumes from it or starts elsewhere, a merge taken for
training."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.batches import batches, record_batches
from support.live_run import TWO_RANKS, Run, forge
from support.processes import Outcome

from forge import cli
from forge.attestation import verify
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.export_folder import MANIFEST
from forge.checkpoint.manifest import StoredFile
from forge.checkpoint.stored_tensors import WEIGHTS, stored_tensors
from forge.core.files import digest_file, read_json
from forge.core.paths import checkpoint_name
from forge.plugins.merge.verify import verify_merge
from forge.plugins.merge.weights import weights_of

pytestmark = pytest.mark.all
STEPS, GOAL = (6, 12, 18, 24), 24
WSD = (
    *("--train.schedule=wsd", f"--train.max_steps={GOAL}", "--train.decay_steps=200"),
    *("--train.checkpoint_every=6", "--train.keep_last=9"),
)
LAYOUTS = {
    "sharded": (*TWO_RANKS, "--train.shard=all"),
    "gpt2": ("--model.architecture=gpt2", "--model.positions=16"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def trunk(request: pytest.FixtureRequest, session_runs: Callable[..., Run]) -> Run:
    """24 steps at a constant rate: shards of two ranks, and weights that an export has transposed."""
    layout = LAYOUTS[request.param]
    of_model = [one for one in layout if one.startswith(("--model", "--train"))]
    run = session_runs(f"trunk-{request.param}", *WSD, *of_model)
    outcome = run.fork("train", *(one for one in layout if one not in of_model)).end()
    assert outcome.code == 0, outcome.text
    return run


@pytest.fixture(scope="module")
def base(session_runs: Callable[..., Run]) -> Run:
    """The run of most tests, on two ranks."""
    run = session_runs("base", *WSD)
    outcome = run.fork("train", *TWO_RANKS, arm=record_batches).end()
    assert outcome.code == 0, outcome.text
    return run


def merge(run: Run, *options: str) -> Outcome:
    return forge("merge", str(run.folder), run.data, *options)


def folder_of(run: Run, step: int = GOAL) -> Path:
    return run.paths.merged / checkpoint_name(step)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Weights by name, read from the files without the code that merges: part by part, as fp32."""
    found, index = {}, read_json(folder / "index.json")["tensors"]
    for name, tensor in index.items():
        if name.startswith(WEIGHTS):
            whole = np.zeros(tensor["shape"], "<f4")
            for part in tensor["parts"]:
                data = (folder / part["file"]).read_bytes()[part["start"] :][: part["bytes"]]
                where = tuple(
                    slice(at, at + n) for at, n in zip(part["offset"], part["shape"], strict=True)
                )
                whole[where] = np.frombuffer(data, "<f4").reshape(part["shape"])
            found[name] = whole
    return found


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        (("--last", "4"), (0.25, 0.25, 0.25, 0.25)),
        (("--form", "minus-sqrt"), None),
        (("--steps", "6,12,24", "--weights", "0.2,1/2,0.3"), (0.2, 0.5, 0.3)),
    ],
)
def test_merge_has_the_bits_of_a_plain_loop_in_fp64(
    trunk: Run, tmp_path: Path, options: tuple[str, ...], shares: tuple[float, ...] | None
) -> None:
    run = trunk.copy(tmp_path / "run")
    outcome = merge(run, *options)
    assert outcome.code == 0, outcome.text
    steps = (6, 12, 24) if "--steps" in options else STEPS
    shares = shares or tuple(weights_of("minus-sqrt", steps))
    loaded = [weights(run.paths.checkpoints / checkpoint_name(step)) for step in steps]
    merged = weights(folder_of(run))
    assert merged.keys() == loaded[0].keys() and len(merged) > 10
    for name, numbers in merged.items():
        total = np.zeros(numbers.shape, np.float64)
        for share, parent in zip(shares, loaded, strict=True):
            total = total + share * parent[name].astype(np.float64)
        assert numbers.tobytes() == total.astype(np.float32).tobytes(), name
    manifest = Checkpoint.open_complete(folder_of(run)).manifest
    assert manifest.merged
    assert [(one.step, one.weight) for one in manifest.merged.parents] == [
        *zip(steps, shares, strict=True)
    ]
    assert set(stored_tensors(Checkpoint.open(folder_of(run)))) == merged.keys()


def test_minus_sqrt_is_the_decay_of_the_updates_between_the_checkpoints() -> None:
    """A merge of the form is the first checkpoint and each later move by its factor of 1 - sqrt."""
    for steps in ([10, 20, 30, 40, 50], [300, 500, 600]):
        n, span = len(steps), steps[-1] - steps[0]
        moves = [1 - ((step - steps[0]) / span * (n - 1) / n) ** 0.5 for step in steps]
        found = weights_of("minus-sqrt", steps)
        assert sum(found) == pytest.approx(1) and min(found) > 0
        for i, factor in enumerate(moves):
            assert sum(found[i:]) == pytest.approx(factor)
    # Positions of evenly spaced checkpoints are 0/n, 1/n, …, as those of Megatron-LM.
    assert weights_of("minus-sqrt", [1, 2]) == [0.5**0.5, 1 - 0.5**0.5]


def test_both_losses_are_told_those_of_validation_and_the_better_one_is_named(
    base: Run, tmp_path: Path
) -> None:
    run = base.copy(tmp_path / "run")
    outcome = merge(run)
    assert outcome.code == 0, outcome.text
    losses = {}
    for folder in (folder_of(run), run.paths.checkpoints / checkpoint_name(GOAL)):
        validated = forge("validate", str(folder), run.data)
        assert validated.code == 0, validated.text
        [line] = [one for one in validated.text.splitlines() if "ok   validation loss" in one]
        losses[folder.parent.name] = line.partition("validation loss: ")[2].partition(" over ")[0]
    assert f"validation loss of the merge: {losses['merged']}" in outcome.text
    assert f"validation loss of step {GOAL}: {losses['checkpoints']}" in outcome.text
    made = Checkpoint.open(folder_of(run)).manifest.merged
    assert made and made.loss > made.newest_loss  # after 24 steps the mean lags behind
    assert f"better: step {GOAL}" in outcome.text and "the merge hurts" in outcome.text
    again = merge(run)
    assert again.code == 0 and "nothing to do" in again.text and "better: step" in again.text
    other = merge(run, "--form", "minus-sqrt")
    assert other.code == 78 and f"rm -r {folder_of(run)}" in other.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "24"], "1 checkpoint of"),
        (["--last", "1"], "1 checkpoint of"),
        (["--last", "0"], "0 checkpoints of"),
        (["--last", "5"], "a merge needs 5, as --last says"),
        (["--steps", "6,7"], "has no checkpoint of step 7"),
        (["--steps", "12,6"], "name each step once, in ascending order"),
        (["--steps", "6,x"], "is no list of steps"),
        (["--weights", "1/0,1"], "is no list of numbers"),
        (["--last", "2", "--weights", "0.3,0.3,0.4"], "3 weights for 2 checkpoints"),
        (["--last", "2", "--weights", "0.3,0.6"], "the sum is 0.9"),
        (["--last", "2", "--weights=-0.5,1.5"], "the smallest -0.5"),
        (["--last", "2", "--form", "weights"], "--weights is not given"),
        (["--form", "mean", "--weights", "0.5,0.5"], "--weights is given"),
    ],
)
def test_what_is_no_mean_is_refused_by_name_and_nothing_is_written(
    base: Run, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["merge", str(base.folder), base.data, *options])
    except SystemExit as err:  # of argparse
        code = err.code
    assert code == 78 and message in capsys.readouterr().err
    assert not base.paths.merged.exists()


def test_corrupt_checkpoint_is_refused_by_name(base: Run, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run")
    file = run.paths.checkpoints / checkpoint_name(12) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    outcome = merge(run)
    assert outcome.code == 65 and f"checkpoint {file.parent} is corrupt" in outcome.text
    assert [*run.paths.merged.iterdir()] == []
    assert merge(run, "--steps", "18,24").code == 0


def rewritten(folder: Path, number: float) -> None:
    """Put a number into the first weight of a checkpoint, with digests that are right."""
    checkpoint = Checkpoint.open(folder)
    tensors = stored_tensors(checkpoint)
    part = tensors[min(name for name in tensors if name.startswith(WEIGHTS))].parts[0]
    with open(folder / part.file, "r+b") as file:
        file.seek(part.start)
        file.write(np.array([number], "<f4").tobytes())
    files = checkpoint.manifest.files
    new = StoredFile(bytes=files[part.file].bytes, digest=digest_file(folder / part.file))
    checkpoint.manifest.with_files({**files, part.file: new}).write(folder)


def test_merge_that_is_not_finite_is_refused(base: Run, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run")
    rewritten(run.paths.checkpoints / checkpoint_name(12), float("nan"))
    of_trunk = merge(run)
    assert of_trunk.code == 78 and "not of one trunk: its digest is" in of_trunk.text
    run.paths.events.unlink()  # so that the digest of another training is not known
    outcome = merge(run)
    assert outcome.code == 65 and "numbers that are not finite" in outcome.text
    assert [*run.paths.merged.iterdir()] == []


def test_checkpoints_of_two_trunks_are_not_merged(base: Run, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run")
    run.paths.latest.unlink()
    run.paths.latest.symlink_to(checkpoint_name(12))
    outcome = run.fork("train", "--train.max_steps=18").end()  # by one rank: other last bits
    assert outcome.code == 0, outcome.text
    mixed = merge(run, "--steps", "12,18,24")
    assert mixed.code == 78 and "not of one trunk: its digest is" in mixed.text, mixed.text
    newest = merge(run)
    assert newest.code == 0 and "a merge (mean) of steps 6, 12, 18" in newest.text


def test_checkpoint_of_another_run_is_not_merged(
    base: Run, runs: Callable[..., Run], tmp_path: Path
) -> None:
    other = runs("other", *WSD, "--train.max_steps=6", "--train.lr=0.001")
    assert other.fork("train").end().code == 0
    run = base.copy(tmp_path / "run")
    run.paths.events.unlink()
    target = run.paths.checkpoints / checkpoint_name(6)
    subprocess.run(["rm", "-r", str(target)], check=True)
    (other.paths.checkpoints / checkpoint_name(6)).rename(target)
    outcome = merge(run, "--steps", "6,12")
    assert outcome.code == 78 and "train.lr is 0.003, the checkpoint has 0.001" in outcome.text


KILLED = """
import os, signal, sys
from forge import cli
from forge.core import failpoints
point, name = sys.argv[1:3]
def kill(reached, path):
    if reached == point and path.name == name:
        os.kill(os.getpid(), signal.SIGKILL)
failpoints.hook = kill
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ("save.write", "__0_0.distcp"),
        ("save.sync", "__0_0.distcp"),
        ("save.sync", "index.json"),
        ("load.read", f".writing-{checkpoint_name(GOAL)}"),  # while it is evaluated
    ],
)
def test_killed_merge_leaves_nothing_under_its_name_and_is_made_by_the_same_command(
    base: Run, tmp_path: Path, point: str, name: str
) -> None:
    run = base.copy(tmp_path / "run")
    words = ["merge", str(run.folder), run.data]
    command = [sys.executable, "-c", KILLED, point, name, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not folder_of(run).exists() and any(run.paths.merged.glob(".writing-*"))
    outcome = forge(*words)
    assert outcome.code == 0, outcome.text
    assert [path.name for path in run.paths.merged.iterdir()] == [checkpoint_name(GOAL)]
    assert not [*Checkpoint.open_complete(folder_of(run)).bad_files()]


def test_run_does_not_resume_from_its_merge(base: Run, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run")
    assert merge(run).code == 0
    outcome = run.fork("train", "--train.max_steps=26").end()
    assert outcome.code == 0, outcome.text
    assert f"resume from {run.paths.checkpoints / checkpoint_name(GOAL)}" in outcome.text
    assert folder_of(run).is_dir()


def test_child_starts_from_the_merge_with_the_next_sample_and_new_moments(
    base: Run, tmp_path: Path
) -> None:
    run = base.copy(tmp_path / "run")
    assert merge(run).code == 0
    children = {}
    for name, parent in (("mean", "run@merged"), ("plain", f"run@{GOAL}")):
        words = (f"--run={name}", f"--parent={parent}", "--train.max_steps=26")
        child = replace(run, folder=tmp_path / name, overrides=(*run.overrides, *words))
        outcome = child.fork("train", *TWO_RANKS, arm=record_batches).end()
        assert outcome.code == 0, outcome.text
        children[name] = (child, outcome)
    child, outcome = children["mean"]
    assert f"start from {folder_of(run)}" in outcome.text
    said = "a merge (mean) of steps 6, 12, 18, 24: step, next sample and mix of the newest, new moments"
    assert said in outcome.text
    drawn = batches(child.folder)
    assert sorted(drawn) == [24, 25] and drawn == batches(children["plain"][0].folder)
    updates = {name: updates_of(one) for name, (one, _) in children.items()}
    assert updates == {"mean": {2.0}, "plain": {26.0}}
    parent = Checkpoint.open(child.paths.checkpoints / checkpoint_name(26)).manifest.lineage.parent
    assert parent and parent.digest == Checkpoint.open(folder_of(run)).manifest.digest
    for step in ("3", "25"):  # of the trunk, and its own
        told = forge("samples", str(child.folder), "--step", step, child.data)
        assert told.code == 0, told.text
    # The child resumes from its own checkpoint, also once the merge is gone.
    subprocess.run(["rm", "-r", str(run.paths.merged)], check=True)
    on = child.fork("train", "--train.max_steps=27").end()
    assert on.code == 0 and "resume from" in on.text, on.text


def updates_of(run: Run) -> set[float]:
    """The number of updates that AdamW has counted, of each weight."""
    folder, found = run.paths.checkpoints / checkpoint_name(26), set()
    for name, tensor in read_json(folder / "index.json")["tensors"].items():
        if name.endswith(".step"):
            [part] = tensor["parts"]
            data = (folder / part["file"]).read_bytes()[part["start"] :][:4]
            found.add(float(np.frombuffer(data, "<f4")[0]))
    return found


def test_parent_without_a_merge_is_refused_with_the_command_that_makes_one(
    base: Run, tmp_path: Path
) -> None:
    run = base.copy(tmp_path / "run")
    for parent in ("run@merged", "run@merged-12"):
        outcome = run.forge("train", "--run=child", f"--parent={parent}", "--train.max_steps=26")
        assert outcome.code == 78 and "forge merge run" in outcome.text, outcome.text


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_is_verified_bit_by_bit_and_is_no_training(
    trunk: Run, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trunk.copy(tmp_path / "run")
    assert merge(run, "--form", "minus-sqrt").code == 0
    outcome = forge("export", str(folder_of(run)), run.data, f"--dtype={dtype}")
    assert outcome.code == 0, outcome.text
    export = run.paths.exports / f"merged-{checkpoint_name(GOAL)}"
    assert not run.paths.exported.exists()  # that of the run is of a checkpoint
    statement = read_json(export / verify.STATEMENT)
    assert statement["predicateType"] == "urn:forge:merge:v1"
    outcome = forge("verify", str(export), "--checkpoints", str(run.folder))
    assert outcome.code == 0, outcome.text
    assert "tensors computed again, equal in every bit" in capsys.readouterr().out
    links = verify.check_chain(statement)
    merged = {**links["merge"], "form": "weights"}
    merged["parents"] = [{**one, "weight": 0.25} for one in merged["parents"]]
    with pytest.raises(verify.VerificationError, match="is not what the checkpoints of the merge"):
        verify_merge(export, run.paths, {**links, "merge": merged})
    with pytest.raises(verify.VerificationError, match="are not those of the form"):
        verify_merge(export, run.paths, {**links, "merge": {**merged, "form": "minus-sqrt"}})
    assert forge("reproduce", str(export), run.data).code == 65


def test_verification_without_a_checkpoint_of_the_merge_is_refused(
    base: Run, tmp_path: Path
) -> None:
    run = base.copy(tmp_path / "run")
    assert merge(run).code == 0
    export = tmp_path / "export"
    assert forge("export", str(folder_of(run)), run.data, f"--to={export}").code == 0
    assert read_json(export / MANIFEST)["merged"]["form"] == "mean"
    subprocess.run(["rm", "-r", str(run.paths.checkpoints / checkpoint_name(6))], check=True)
    outcome = forge("verify", str(export), "--checkpoints", str(run.folder))
    assert outcome.code == 65 and "has no checkpoint of step 6" in outcome.text
