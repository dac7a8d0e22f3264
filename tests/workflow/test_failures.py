"""A rule that fails leaves what people need to see why; Snakemake deletes only what it declared."""

import shutil
import subprocess

import pytest

pytestmark = pytest.mark.xdist_group("failures")


def test_failing_preflight_leaves_its_findings(project):
    project.one_rank()
    project.machine(preflight={"min_free_memory_gib": 100000})
    code, output = project.snakemake("train")
    assert code != 0
    assert "memory: " in output and "100,000" not in output.split("memory:")[0]
    last = output.splitlines()[-1]
    assert last.startswith("base  failed  preflight: memory  results/base/logs/preflight.log")
    assert project.read("preflight.json")["status"] == "failed"
    assert "memory\tfail" in project.path("preflight.tsv").read_text()
    assert not project.path("trained.json").exists()


def test_failing_training_leaves_checkpoints_metrics_events_and_logs(project):
    project.one_rank()
    project.write_config(train={"lr": 1e30, "warmup_steps": 0, "checkpoint_every": 1})
    code, output = project.snakemake("train")
    assert code != 0
    assert "not finite" in output
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("base  failed at step ")
    assert not project.path("trained.json").exists()
    for name in ("metrics.jsonl", "events.jsonl", "preflight.json", "config.json"):
        assert project.path(name).exists()
    assert list(project.path("logs").glob("local.*.0.log"))
    report = project.forge("report", "results/base/config.json")
    assert report.returncode == 0
    assert "not finite" in project.path("report.html").read_text()


def test_known_failure_is_not_started_again_and_the_other_runs_of_the_sheet_continue(project):
    project.one_rank()
    header = "run\ttrain.lr\ttrain.warmup_steps\nbad\t1e30\t0\n"
    project.write_runs(header)
    assert project.snakemake("train")[0] != 0
    before = project.path("events.jsonl", "bad").read_text()
    assert '"event": "failed"' in before

    project.write_runs(header + "good\t\t\n")
    code, output = project.snakemake("train", "--keep-going")
    assert code != 0
    assert "this config failed before: " in output and "not finite" in output, output
    assert project.read("validated.json", "good")["status"] == "valid"
    assert project.path("report.html", "good").exists()
    assert project.path("events.jsonl", "bad").read_text() == before
    # No job of its allocation was started, where `forge train` would have refused.
    assert "results/bad/trained.json" not in output and "results/good/trained.json" in output


def test_failing_validation_leaves_its_verdict_and_the_checkpoint(project):
    project.one_rank()
    code, output = project.snakemake("results/base/trained.json")
    assert code == 0, output
    assert project.path("trained.json").exists(), output
    shard = next(project.path("checkpoints/latest").resolve().glob("__0_*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    code, output = project.snakemake("train")
    assert code != 0
    verdict = project.read("validation.json")
    assert verdict["status"] == "invalid"
    assert "another digest" in verdict["reasons"][0]
    assert output.splitlines()[-1].startswith("base  invalid at step 12  digests: ")
    assert not project.path("validated.json").exists()
    assert shard.exists()


@pytest.fixture
def small_disk(project):
    """The project's results on a file system of 300 KiB."""
    results = project.root / "results"
    results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(results)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs permission to mount a small file system")
    yield results
    subprocess.run(["umount", "-l", str(results)], check=True)


def test_full_disk_is_reported_as_such(project, small_disk):
    project.one_rank()
    project.machine(preflight={"min_free_disk_gib": 0})
    code, output = project.snakemake("train")
    assert code != 0
    assert "MiB are free" in output, output[-3000:]
    assert "free space" in output, output[-3000:]
    assert "this is a bug" not in output
