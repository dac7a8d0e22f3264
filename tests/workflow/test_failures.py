"""A rule that fails leaves what people need to see why; Snakemake deletes only what it declared."""

import contextlib
import shutil
import subprocess
from contextlib import contextmanager

import pytest
from support.clone import started


@pytest.fixture(scope="module")
def small(shared_project):
    shared_project.one_rank()
    return shared_project


def test_failing_preflight_leaves_its_findings(small):
    small.machine(preflight={"min_free_memory_gib": 100000})
    code, output = small.snakemake("train")
    assert code != 0
    assert "memory: " in output and "100,000" not in output.split("memory:")[0]
    last = output.splitlines()[-1]
    assert last.startswith("base  failed  preflight: memory  results/base/logs/preflight.log")
    assert small.read("preflight.json")["status"] == "failed"
    assert "memory\tfail" in small.path("preflight.tsv").read_text()
    assert not small.path("trained.json").exists()
    small.machine(preflight={})


BAD = "run\ttrain.lr\ttrain.warmup_steps\ttrain.checkpoint_every\nbad\t1e30\t0\t1\n"


def test_failing_training_leaves_checkpoints_metrics_events_and_logs(small):
    small.write_runs(BAD)
    code, output = small.snakemake("train")
    assert code != 0
    assert "not finite" in output
    error = output.partition("Error in rule train_run:")[2]
    assert "log: results/bad/logs/train.log" in error and "exec forge train" in error, output
    assert "train_run bad: done" not in output and "Traceback" not in output
    assert output.splitlines()[-1].startswith("bad  failed at step ")
    assert not small.path("trained.json", "bad").exists()
    for name in ("metrics.jsonl", "events.jsonl", "preflight.json", "config.json"):
        assert small.path(name, "bad").exists()
    assert list(small.path("checkpoints", "bad").glob("step-*"))
    assert list(small.path("logs", "bad").glob("local.*.0.log"))
    report = small.forge("report", "results/bad/config.json")
    assert report.returncode == 0
    assert "not finite" in small.path("report.html", "bad").read_text()


def test_known_failure_is_not_started_again_and_the_other_runs_of_the_sheet_continue(small):
    before = small.path("events.jsonl", "bad").read_text()
    assert '"event": "failed"' in before

    small.write_runs(f"{BAD}good\t\t\t\n")
    code, output = small.snakemake("train", "--keep-going")
    assert code != 0
    assert "this config failed before: " in output and "not finite" in output, output
    assert small.read("validated.json", "good")["status"] == "valid"
    assert small.path("report.html", "good").exists()
    assert small.path("events.jsonl", "bad").read_text() == before
    # No job of its allocation was started, where `forge train` would have refused.
    assert "train_run good" in started(output) and "train_run bad" not in started(output)


def test_failing_validation_leaves_its_verdict_and_the_checkpoint(small):
    small.write_runs("run\ngood\n")
    small.path("validated.json", "good").unlink()
    shard = next(small.path("checkpoints/latest", "good").resolve().glob("__0_*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    code, output = small.snakemake("train")
    assert code != 0
    verdict = small.read("validation.json", "good")
    assert verdict["status"] == "invalid"
    assert "has digest" in verdict["reasons"][0]
    assert output.splitlines()[-1].startswith("good  invalid at step 12  digests: ")
    assert not small.path("validated.json", "good").exists()
    assert shard.exists()


@contextmanager
def small_disk(folder):
    """A new directory on a file system of 300 KiB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs permission to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_reported_as_such(project):
    project.one_rank()
    project.machine(preflight={"min_free_disk_gib": 0})
    with small_disk(project.root / "results"):
        code, output = project.snakemake("train")
    assert code != 0
    assert "MiB are free" in output, output[-3000:]
    assert "free space" in output, output[-3000:]
    assert "this is a bug" not in output


@pytest.mark.parametrize("name", ["results", ".snakemake"])
def test_disk_that_is_full_at_the_start_is_one_message(project, name):
    """Also of the disk on which Snakemake has its log: no traceback for each of its lines."""
    with small_disk(project.root / name):
        with contextlib.suppress(OSError), open(project.root / name / "filler", "wb") as filler:
            while True:
                filler.write(bytes(2**12))
        code, output = project.snakemake("train")
    assert code == 1
    assert f"cannot write {name}/" in output, output[-3000:]
    assert "No space left on device" in output and "free space there" in output
    assert "Traceback" not in output, output[-3000:]
