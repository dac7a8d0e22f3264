"""Make the fixture of a commit: what its product left on disk, and the digests that later ones must
reach.

    python tests/past/make.py 81f9dc7

clones this repository into /tmp/forge-past/forge at that commit, sets up an environment there, and builds
everything with the product of that commit alone (as root, with Slurm's Debian packages; 5 minutes). It
writes COMMIT.tar.xz, with the directories below, and COMMIT.json, with the recorded digests and what
decides their bits, beside this file. README.md there says how a later format gets a fixture of its own.

| directory | holds |
|---|---|
| `finished` | a run that was trained, validated, reported, exported and reproduced, both signed |
| `interrupted` | a run of two ranks (GPT-2, Muon, two sources) that Ctrl-C stopped before its goal |
| `sealed` | a finished run of another training program |
| `queued` | the project of a job that waits in Slurm's queue, and the job's script |
| `tokens` | token sets of each reading, with their texts and configs |
| `verify.py` | `forge/attestation/verify.py` of the commit |
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Paths, the host name and the time zone below reach records of runs: they are those of no machine.
ROOT = Path("/tmp/forge-past")
CLONE, MADE = ROOT / "forge", ROOT / "made"
HOST = "node00"
# What no promise needs: the product itself, scratch, and all of Snakemake's but its records of jobs.
LEFT_OUT = ("workflow", "tmp", "snakemake0.out")
LOCK = ".workflow-lock"  # of a command that was killed, with ids of the machine
OF_SNAKEMAKE = ("metadata", "forge")

WORDS = ["the", "a", "of", "in", "two", "past", "run", "step", "model", "token", "shard", "rank"]
WORDS += ["node", "loss", "seed", "state", "text", "data", "file", "digest"]

TEXT = {"inputs": ["corpus"], "document_separator": "\n\n", "val_fraction": 0.2}
TINY: dict[str, Any] = {
    "tokenizer": {"vocab_size": 270},
    "tokenize": TEXT,
    "model": {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 32},
    "train": {
        **{"seq_len": 16, "batch_size": 4, "max_steps": 8, "warmup_steps": 2, "log_every": 1},
        **{"eval_every": 4, "eval_samples": 8, "checkpoint_every": 4},
    },
    "report": {"prompts": ["the "], "sample_tokens": 4},
}
GOAL, STOP_FROM = 60, 20
INTERRUPTED: dict[str, Any] = {
    **TINY,
    "tokenize": {
        "sources": {
            "even": {"inputs": ["corpus/*[02468].txt"], "document_separator": "\n\n"},
            "odd": {"inputs": ["corpus/*[13579].txt"], "document_separator": "\n\n"},
        },
        "val_fraction": 0.2,
    },
    "model": {
        **{"architecture": "gpt2", "dim": 16, "layers": 1, "heads": 2, "positions": 16},
        "dropout": 0.1,
    },
    "train": {
        **TINY["train"],
        **{"optimizer": "muon", "mix": {"even": 0.7, "odd": 0.3}, "max_steps": GOAL},
        **{"eval_every": 20, "checkpoint_every": 10, "keep_last": 1},
    },
    "validate": {"depth": "digests"},
}
SEALED: dict[str, Any] = {
    "program": {
        "command": ["python", "count.py", "{goal}"],
        "source": "program",
        "goal": 8,
        "checkpoints": {"pattern": "checkpoint-{step}", "complete": ["state.json"]},
        "keep_last": 2,
        "heartbeat": {"timeout_sec": 300},
    }
}
PROGRAM = '''"""A training program that needs Python alone: its only weight is a 64-bit integer."""

import json
import os
import sys
from contextlib import chdir
from pathlib import Path

step, weight = 0, 1
if resume := os.environ["FORGE_RESUME"]:
    step, weight = json.loads((Path(resume) / "state.json").read_text())
while step < int(sys.argv[1]):
    step, weight = step + 1, weight * 6364136223846793005 % 2**64
    Path(os.environ["FORGE_HEARTBEAT"]).write_text(str(step))
    if step % 4 == 0:
        folder = Path(os.environ["FORGE_CHECKPOINTS"]) / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps([step, weight]))
        Path(os.environ["FORGE_SAVED"]).write_text(str(step))
'''


def main() -> None:
    if sys.argv[1] == "--inside":
        make(sys.argv[2])
    else:
        make_inside_clone(sys.argv[1])


def make_inside_clone(commit: str) -> None:
    """Start this script again, with the commit's own environment and under another host name."""
    if not CLONE.exists():
        subprocess.run(["git", "clone", "-q", HERE.parents[1], CLONE], check=True)
    subprocess.run(["git", "fetch", "-q"], cwd=CLONE, check=True)  # of an earlier fixture
    subprocess.run(["git", "checkout", "-q", commit], cwd=CLONE, check=True)
    subprocess.run(["make", "setup", "EXTRAS=dev"], cwd=CLONE, check=True)
    script = f'hostname {HOST} && exec "$@"'
    inside = [CLONE / ".venv/bin/python", __file__, "--inside", commit]
    plain = {"PATH": os.environ["PATH"], "HOME": str(ROOT), "TZ": "UTC", "LANG": "C.UTF-8"}
    plain |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = ["unshare", "--uts", "sh", "-c", script, "sh", *inside]
    subprocess.run(command, cwd=CLONE, env=plain, check=True)


def make(commit: str) -> None:
    """Build all directories by the product in the working directory, and write both files."""
    sys.path[:0] = [str(CLONE), str(CLONE / "tests")]
    shutil.rmtree(MADE, ignore_errors=True)
    recorded = {
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "bits": what_decides_bits(),
        "finished": make_finished(MADE / "finished"),
        "interrupted": make_interrupted(MADE / "interrupted"),
        "sealed": make_sealed(MADE / "sealed"),
        "tokens": make_tokens(MADE / "tokens"),
        "queued": make_queued(MADE / "queued"),
    }
    shutil.copy2(CLONE / "forge/attestation/verify.py", MADE)
    archive = HERE / f"{commit}.tar.xz"
    recorded["archive"] = pack(archive)
    (HERE / f"{commit}.json").write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{archive}: {archive.stat().st_size:,} bytes")


def what_decides_bits() -> dict[str, Any]:
    """By the module that the tests use, so that both look at the same things."""
    sys.path.append(str(HERE.parent))
    from support.past import bits_of_this_machine

    return bits_of_this_machine()


# --- projects ---------------------------------------------------------------------------------------


def new_project(root: Path, config: dict[str, Any], run: str, *, ranks: int = 1) -> Path:
    """A user's project that trains this run on this machine."""
    write_project(root, config, run)
    for name in ("workflow", "profiles/local"):
        shutil.copytree(CLONE / name, root / name)
    profile = root / "profiles/local/config.yaml"
    text = profile.read_text().replace("tasks_per_node: 2", f"tasks_per_node: {ranks}")
    profile.write_text(text)
    if ranks == 1:
        (root / "profiles/local/machine.yaml").write_text("launcher: single\n")
    (root / "tmp").mkdir()
    return root


def write_project(root: Path, config: dict[str, Any], run: str) -> None:
    write_corpus(root / "corpus")
    (root / "config").mkdir()
    write_json(root / "config/config.yaml", config)  # JSON is YAML
    (root / "config/runs.tsv").write_text(f"run\n{run}\n")


def write_corpus(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(6):
        documents = (" ".join(words(number * 100 + document)) for document in range(20))
        (folder / f"{number}.txt").write_text("\n\n".join(documents))


def words(seed: int, count: int = 30) -> Iterator[str]:
    """The same words for the same seed with any Python."""
    state = seed + 1
    for _ in range(count):
        state = state * 6364136223846793005 % 2**64
        yield WORDS[(state >> 33) % len(WORDS)]


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(root / "tmp")}


def start(root: Path, *targets: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local", *targets]
    return subprocess.Popen(command, cwd=root, env=environment(root), start_new_session=True)


def snakemake(root: Path, *targets: str) -> None:
    assert start(root, *targets).wait(300) == 0, targets


def forge(root: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "forge", *arguments]
    subprocess.run(command, cwd=root, env=environment(root), check=True, timeout=300)


# --- runs -------------------------------------------------------------------------------------------


def make_finished(root: Path) -> dict[str, Any]:
    """Both private keys are thrown away: nobody signs in their name again."""
    new_project(root, TINY, "finished")
    snakemake(root, "train")
    snakemake(root, "export")
    for name in ("author", "certifier"):
        forge(root, "key", f"tmp/{name}.pem")
        shutil.copy2(root / f"tmp/{name}.pem.pub", root / f"{name}.pub")
    forge(root, "export", "finished", "--sign=tmp/author.pem")
    forge(root, "reproduce", "results/finished", "--sign=tmp/certifier.pem", "--seed=1")
    run = root / "results/finished"
    exported = run / read(run / "exported.json")["folder"]
    statement = exported / "statement.json"
    return {
        **of_run(run),
        "export": str(exported.relative_to(root)),
        "statement": read(statement)["predicate"]["sha256"],
        "statement_file": digest(statement),
        "certificate": read(run / "reproduced.json")["certificate"],
        "weights_file": digest(exported / "model.safetensors"),
    }


def make_interrupted(root: Path) -> dict[str, Any]:
    """The twin has the same name and the same tokens in a directory of its own, which is not kept."""
    twin = new_project(root.with_name("twin"), INTERRUPTED, "interrupted", ranks=2)
    snakemake(twin, "train")
    shutil.copytree(twin, root, symlinks=True)
    shutil.rmtree(root / "results")
    shutil.rmtree(root / ".snakemake")
    run = root / "results/interrupted"
    command = start(root, "train")
    wait(lambda: step_of(run) >= STOP_FROM)
    os.killpg(command.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    command.wait(120)
    assert STOP_FROM <= step_of(run) < GOAL, step_of(run)
    forge(root, "export", "interrupted", "--to=tmp/model")
    undisturbed = of_run(twin / "results/interrupted")
    shutil.rmtree(twin)
    weights = digest(root / "tmp/model/model.safetensors")
    return {"stopped_at": step_of(run), "weights_file": weights, **undisturbed}


def step_of(run: Path) -> int:
    latest = run / "checkpoints/latest"
    return int(latest.readlink().name.partition("-")[2]) if latest.is_symlink() else 0


def wait(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.005)


def make_sealed(root: Path) -> dict[str, Any]:
    new_project(root, SEALED, "sealed")
    (root / "program").mkdir()
    (root / "program/count.py").write_text(PROGRAM)
    snakemake(root, "train")
    checkpoints = root / "results/sealed/checkpoints"
    seals = sorted(checkpoints.glob("*.forge.json"))
    states = sorted(checkpoints.glob("checkpoint-*/state.json"))
    trained = read(root / "results/sealed/trained.json")
    return {
        "config_digest": trained["config_digest"],
        "weights_digest": trained["weights_digest"],
        "files": {str(path.relative_to(root)): digest(path) for path in (*seals, *states)},
    }


def of_run(run: Path) -> dict[str, Any]:
    """Digests of what a run ended with, its losses, and the ids and manifests of its tokens."""
    trained, config = read(run / "trained.json"), read(run / "config.json")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    root = run.parents[1]
    manifests = sorted(root.glob("data/*/*/manifest.json"))
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    return {
        "goal": trained["step"],
        "weights_digest": trained["weights_digest"],
        "config_digest": trained["config_digest"],
        "checkpoints": {path.name: digest(path / "checkpoint.json") for path in checkpoints},
        "losses": {line["step"]: line["loss"] for line in metrics if line["kind"] == "train"},
        "ids": config["ids"],
        "manifests": {str(path.relative_to(root)): digest(path) for path in manifests},
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def digest(path: Path) -> str:
    from blake3 import blake3

    return blake3(path.read_bytes()).hexdigest()


# --- tokens -----------------------------------------------------------------------------------------


def make_tokens(root: Path) -> dict[str, Any]:
    """Reading -> ids, and digests of the manifests below data/ that it made."""
    write_project(root, TINY, "tokens")
    (root / "tmp").mkdir()
    forge(root, "tokenizer", "config/config.yaml")
    [made] = root.glob("data/tokenizers/*/tokenizer.json")
    shutil.copy2(made, root / "tokenizer.json")
    write_other_readings(root)
    return {name: tokenize(root, name, settings) for name, settings in READINGS.items()}


def tokenize(root: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    config = root / f"config/{name}.yaml"
    own = {"source": "path", "path": "tokenizer.json", "eos_token": "<|endoftext|>"}
    tokenizer = TINY["tokenizer"] if name == "text" else own
    write_json(config, {"tokenizer": tokenizer, "tokenize": settings})
    before = set(root.glob("data/*/*/manifest.json"))
    for verb in ("tokenizer", "tokenize"):
        forge(root, verb, f"config/{name}.yaml")
    made = sorted(set(root.glob("data/*/*/manifest.json")) - before)
    return {
        "ids": ids_of(root, config),
        "manifests": {str(path.relative_to(root)): digest(path) for path in made},
    }


def ids_of(root: Path, config: Path) -> dict[str, Any]:
    from forge.core.config import Config, checked, read_values
    from forge.data.content_ids import resolve_ids

    with chdir(root):
        ids = resolve_ids(checked(Config, read_values(str(config)), config.name))
    return {name: value for name, value in ids.model_dump().items() if value}


READINGS: dict[str, dict[str, Any]] = {
    "text": TEXT,
    "jsonl": {"inputs": ["jsonl"], "text_field": "body", "val_fraction": 0.2},
    "parquet": {"inputs": ["parquet"], "val_fraction": 0.2},
    "replaced": {"inputs": ["latin"], "invalid_utf8": "replace", "val_fraction": 0.2},
    "nanogpt": {"inputs": ["nanogpt"], "format": "nanogpt", "val_fraction": 0.2},
    "megatron": {"inputs": ["megatron"], "format": "megatron", "val_fraction": 0.2},
    "dolma": {
        **{"inputs": ["dolma"], "format": "dolma", "token_dtype": "uint32"},
        "val_fraction": 0.2,
    },
    "sources": {
        "sources": {
            "ids": {"inputs": ["nanogpt"], "format": "nanogpt"},
            "lines": {"inputs": ["jsonl"], "text_field": "body"},
            "text": {"inputs": ["corpus"], "document_separator": "\n\n"},
        },
        "val_fraction": 0.2,
    },
}


def write_other_readings(root: Path) -> None:
    for name in ("jsonl", "parquet", "latin", "nanogpt", "megatron", "dolma"):
        (root / name).mkdir()
    texts = [" ".join(words(seed)) for seed in range(1000, 1030)]
    write_json_lines(root / "jsonl", texts)
    write_parquet(root / "parquet/a.parquet", texts)
    for number, text in enumerate(texts[:10]):
        (root / f"latin/{number}.txt").write_bytes(f"{text} é".encode("latin-1"))
    write_token_files(root, texts)


def write_json_lines(folder: Path, texts: list[str]) -> None:
    import zstandard

    lines = [json.dumps({"body": text}) + "\n" for text in texts]
    parts = ["".join(lines[first : first + 10]).encode() for first in (0, 10, 20)]
    (folder / "a.jsonl").write_bytes(parts[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(parts[1], mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(parts[2]))


def write_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path)


def write_token_files(root: Path, texts: list[str]) -> None:
    """The same documents as nanoGPT, Megatron-LM and dolma write them."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = [[*tokenizer.encode(text).ids, end] for text in texts]
    ids = np.array([one for document in documents for one in document])
    lengths = np.array([len(document) for document in documents])
    first = np.cumsum(lengths) - lengths
    ids.astype(np.uint16).tofile(root / "nanogpt/train.bin")
    ids.astype(np.uint16).tofile(root / "megatron/a.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    tables = [lengths.astype(np.int32), (first * 2).astype(np.int64), np.arange(len(lengths) + 1)]
    index = head + b"".join(table.tobytes() for table in tables)
    (root / "megatron/a.idx").write_bytes(index)
    ids.astype(np.uint32).tofile(root / "dolma/a.npy")
    rows = io.StringIO()
    spans = zip(first, first + lengths, strict=True)
    csv.writer(rows).writerows([a, b, "id", "a.gz", 0] for a, b in spans)
    (root / "dolma/a.csv.gz").write_bytes(gzip.compress(rows.getvalue().encode(), mtime=0))


# --- a job in the queue -----------------------------------------------------------------------------


def make_queued(root: Path) -> dict[str, Any]:
    """A job that waits, of a Snakemake that was killed: both leave the login node alone."""
    from slurm.project import Project

    from tools.slurm_cluster.cluster import base_folder
    from tools.slurm_cluster.settings import Settings
    from tools.slurm_cluster.temporary import temporary_cluster

    with temporary_cluster(base_folder(), "past", Settings(nodes=2)) as cluster:
        folder = cluster.folder / "scratch/queued"
        write_corpus(folder / "corpus")
        train_run = {"nodes": 2, "tasks_per_node": 1}
        held = {"slurm": {"options": "--hold"}}
        project = Project.make(
            folder, cluster, values=TINY, names=cluster.nodes, train_run=train_run, machine=held
        )
        (folder / "tmp").mkdir()
        (folder / "config/runs.tsv").write_text("run\nqueued\n")
        for verb in ("tokenizer", "tokenize"):
            forge(folder, verb, "config/config.yaml")
        command = project.start()
        job = project.wait_for_job()
        queue, facts = cluster.squeue(), cluster.job(job)
        command.kill_group()
        script = ["scontrol", "write", "batch_script", job, "-"]
        text = cluster.run(*script, cwd=folder, timeout=30).stdout
        shutil.copytree(folder, root, symlinks=True)
    for path in (root / "profiles").iterdir():
        if path.name != project.profile:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (root / "job.sh").write_text(text)
    write_json(root / "job.json", {"squeue": queue, "scontrol": facts})
    config = read(root / "results/queued/config.json")
    return {"job": job, "ids": config["ids"], "config_digest": config_digest(config)}


def config_digest(values: dict[str, Any]) -> str:
    """As a checkpoint of the run would record it."""
    from forge.core import provenance
    from forge.core.config import ResolvedConfig

    return provenance.config_digest(ResolvedConfig(**values))


# --- the archive ------------------------------------------------------------------------------------


def pack(archive: Path) -> str:
    """Write the directories with their times and links; BLAKE3 of the archive.

    The same directories give the same bytes: names are sorted, and nothing else of this machine is kept.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in kept_files():
            info = tar.gettarinfo(path, str(path.relative_to(MADE)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            # Snakemake compares times; those of files that were made at once differ in the last digits.
            seconds, rest = divmod(path.lstat().st_mtime_ns, 10**9)
            info.pax_headers = {"mtime": f"{seconds}.{rest:09}"}
            if info.isfile():
                with open(path, "rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
    archive.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    return digest(archive)


def kept_files() -> Iterator[Path]:
    for path in sorted(MADE.rglob("*")):
        _project, *below = path.relative_to(MADE).parts
        top, second = [*below, "", ""][:2]
        if (
            top in LEFT_OUT
            or path.name == LOCK
            or (top == ".snakemake" and second not in (*OF_SNAKEMAKE, ""))
        ):
            continue
        yield path


if __name__ == "__main__":
    main()
