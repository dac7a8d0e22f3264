"""The input files of a program: local ones, with a link among them, and files of a hub."""

from pathlib import Path

import pytest

from forge.core.config import Config, ResolvedConfig, checked
from forge.data import hub
from forge.data.content_ids import resolve
from forge.data.inputs import make_inputs

LOCAL = {"train.csv": "1,a\n", "größe/mit leer/test.csv": "2,b\n" * 900, "linked.csv": "3,c\n"}
DOWNLOADED = {"datasets/owner/news/data/part 0.parquet": "parquet" * 50}
# In a copy.
CONTENT = {f"data/{n}": t for n, t in LOCAL.items()} | {
    f"hub/{n}": t for n, t in DOWNLOADED.items()
}


def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedConfig:
    """The config of a program with these inputs, whose manifest is made. Its local files are in
    `folder`/in, all else in `folder`, too."""
    for name, text in LOCAL.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "in/linked.csv").rename(folder / "elsewhere.csv")
    (folder / "in/linked.csv").symlink_to(folder / "elsewhere.csv")
    cache = folder / "cache/snapshots/abc"
    for name, text in DOWNLOADED.items():
        path = cache / name.removeprefix("datasets/owner/news/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(hub, "list_files", lambda _: ["data/part 0.parquet"])
    monkeypatch.setattr(hub, "download", lambda _, name: cache / name)
    inputs = [f"{folder}/in", "hf://datasets/owner/news@main/data/*.parquet"]
    values = {
        **{"results": str(folder / "results"), "data": str(folder / "made")},
        "program": {"command": ["x"], "inputs": inputs},
    }
    config = resolve(checked(Config, values, "config.yaml"))
    make_inputs(config)
    return config


def content(folder: Path) -> dict[str, str]:
    """The files of a copy but its manifest and stamp, by name."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    return {str(path.relative_to(folder)): path.read_text() for path in files}
