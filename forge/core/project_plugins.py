"""Plugins of a project: code that its config names, kept by digest for its jobs and restarts.

`plugins` in the config of the project, or in the file that a user names, is trusted as `program` is:
`read` keeps a copy of each file, directory or installed package below COPIES, and imports that copy. A
config that was recorded (config.json of a run, a checkpoint, a statement) has names and digests in
`ids.plugins`, and of a text format in `tokenize.format`, which name nothing else than such a copy: `use`
imports it, or refuses it by name before any import. So a directory of somebody else imports nothing, and
an edit does not change a job that waits in the queue.

The bytes that are digested are those that run: sources are compiled from memory, and `__pycache__` is
neither read nor written.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from forge.core import hooks
from forge.core.errors import ConfigError
from forge.core.files import canonical, digest_bytes, disk_trouble

COPIES = Path(".snakemake/forge/plugins")  # below it a directory for each digest
STAGED = (
    Path(__file__).parents[2] / "project_plugins"
)  # where `stage.project` has copied them to a node
DIGEST = re.compile("[0-9a-f]{64}")
PACKAGE = "forge_plugin_"  # before the name: the package of a plugin's modules
HOOKS = "hooks"  # the module that has the hooks; a plugin of one file is this module
MOST_BYTES = 2**22  # of all files of a plugin
# Variable with name and digest of each plugin that a program has imported, for those that it starts.
GIVEN = "FORGE_PLUGINS"

# Plugins of this process: name -> digest; those that a run may go on with after they were edited.
_used: dict[str, str] = {}
_may_change: set[str] = set()


def read(named: Sequence[str], *, may_change: bool = False) -> dict[str, str]:
    """Name -> digest of the plugins in these files, directories and installed packages, kept and
    imported.

    Only for those that the user's own config names. may_change: whether runs of the project go on with
    what was edited since their last start. Raises ConfigError for what is none, and for code
    that cannot be imported; UnfitError where the copy cannot be written.
    """
    found: dict[str, str] = {}
    for path in map(Path, named):
        name = path.stem if path.suffix == ".py" else path.name
        _check_name(name, path)
        if name in found:
            raise ConfigError(f"plugins names {name} twice", fix="rename one of the two")
        is_path = path.suffix == ".py" or path.name != str(path) or path.is_dir()
        files = _files(path) if is_path else _files_of_package(name)
        found[name] = digest_of(files)
        _keep(found[name], files)
    use(found, "plugins")
    _may_change.update(found if may_change else ())
    return found


def use(recorded: Mapping[str, str], where: str) -> None:
    """Import the copies with these digests. where: the place of the names, for errors. Raises
    ConfigError before any import where there is no such copy, or another one is in use."""
    for name, digest in recorded.items():
        if name in _used and _used[name] != digest:
            raise ConfigError(
                f"{where}: the plugin {name} has digest {digest[:12]}, and the project's has"
                f" {_used[name][:12]}",
                cause="its files were changed after the run had begun",
                fix="restore them, or give the changed run a new name; the old files:"
                f" {COPIES / digest}",
            )
    new = {name: digest for name, digest in recorded.items() if name not in _used}
    sources = {name: _copy(name, digest, where) for name, digest in new.items()}
    for name, files in sources.items():
        _import(name, new[name], files)
        _used[name] = new[name]


def used() -> dict[str, str]:
    """Name -> digest of the plugins that this process has imported."""
    return dict(_used)


def may_change(name: str) -> bool:
    """Return whether a run of the project goes on with this plugin after it was edited."""
    return name in _may_change


def hand_on() -> dict[str, str]:
    """The variable by which processes that this one starts import the same copies, with `use_given`: also
    those plugins to which no config of a run is bound."""
    return {GIVEN: " ".join(f"{name}={digest}" for name, digest in _used.items())}


def use_given() -> None:
    """Import the plugins that `hand_on` has named. Raises ConfigError."""
    named = [word.partition("=") for word in os.environ.get(GIVEN, "").split()]
    use({name: digest for name, _, digest in named}, GIVEN)


def is_kept(digest: object) -> bool:
    """Return whether there is a copy with this digest."""
    return isinstance(digest, str) and bool(DIGEST.fullmatch(digest)) and folder_of(digest).is_dir()


def bring_along(place: Path) -> None:
    """Give the copies of plugins in use to a directory in which commands of Forge run. Raises UnfitError
    on a full disk."""
    for digest in _used.values():
        copy = place / COPIES / digest
        if not copy.is_dir():
            with disk_trouble(copy):
                shutil.copytree(folder_of(digest), copy)


def folder_of(digest: str) -> Path:
    """The copy with this digest: of the project, or of a node."""
    staged = STAGED / digest
    return staged if staged.is_dir() else COPIES / digest


def digest_of(files: Mapping[str, bytes]) -> str:
    """Digest of a plugin's files by their names."""
    return digest_bytes(canonical([[n, digest_bytes(data)] for n, data in sorted(files.items())]))


# --- files ----------------------------------------------------------------------------------------


def _check_name(name: str, path: Path) -> None:
    if not re.fullmatch(hooks.NAME, name):
        raise ConfigError(
            f"plugins has {path}: {name!r} cannot name a plugin",
            fix="name the file or directory with small letters, digits and _, beginning with a letter",
        )
    if name in hooks.names():
        raise ConfigError(
            f"plugins has {path}, and {name} is a plugin of Forge itself", fix="rename yours"
        )


def _files(path: Path) -> dict[str, bytes]:
    """The files of a plugin by their names below its directory; of a plugin in one file, the hooks."""
    if path.is_file():
        return {f"{HOOKS}.py": _bytes(path)}
    if not path.is_dir():
        raise ConfigError(
            f"plugins has {path}, which is neither a file nor a directory",
            fix="paths are relative to the directory in which you call snakemake or forge",
        )
    names = [p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file()]
    files = {str(n): _bytes(path / n) for n in names if not _is_by_product(n)}
    if f"{HOOKS}.py" not in files:
        raise ConfigError(f"plugins has {path}, which has no {HOOKS}.py", fix="docs/plugins/own.md")
    if sum(map(len, files.values())) > MOST_BYTES:
        raise ConfigError(
            f"{path} has more than {MOST_BYTES:,} bytes", cause="it has data beside the code"
        )
    return files


def _files_of_package(name: str) -> dict[str, bytes]:
    """The files of the plugin that an installed package has under this name, an entry point. Nothing of
    the package is imported."""
    from importlib.metadata import entry_points  # slow

    known = entry_points(group=hooks.PROJECT)
    values = sorted({point.value for point in known if point.name == name})
    if len(values) != 1:
        what = "no installed package has a plugin of this name"
        if values:
            what = f"several installed packages have a plugin of this name: {', '.join(values)}"
        raise ConfigError(
            f"plugins has {name}: {what}, and it is no directory here",
            fix=f"a path has a / or ends with .py; installed: {', '.join(known.names) or 'none'}",
        )
    top, *below = values[0].partition(":")[0].removesuffix(f".{HOOKS}").split(".")
    try:
        spec = find_spec(top)  # of the top level, which imports nothing
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    place = Path(folders[0], *below) if folders else Path(str(spec and spec.origin))
    files = _files(place if place.exists() else place.with_name(f"{place.name}.py"))
    for file, data in files.items():
        if file.endswith(".py") and re.search(
            rb"^\s*(from|import)\s+%b\b" % top.encode(), data, re.M
        ):
            raise ConfigError(
                f"{place}: {file} imports {top}, the package as it is installed, and not the copy that"
                f" runs are bound to",
                fix="import modules of a plugin by `from . import`",
            )
    return files


def _is_by_product(name: Path) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in name.parts)


def _bytes(path: Path) -> bytes:
    with disk_trouble(path, "read"), path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _keep(digest: str, files: Mapping[str, bytes]) -> None:
    """Write the copy of a plugin, if it is not there."""
    target = COPIES / digest
    if target.is_dir():
        return
    with disk_trouble(target):
        COPIES.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=COPIES, prefix=".new-"))
        try:
            for name, data in files.items():
                file = made / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            made.chmod(0o755)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another command has made it meanwhile
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _copy(name: str, digest: str, where: str) -> dict[str, bytes]:
    """The files of a copy, whose digest was verified."""
    if not re.fullmatch(hooks.NAME, name) or not DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: {name!r} with digest {digest!r:.80} is no plugin")
    folder = folder_of(digest)
    if not folder.is_dir():
        raise ConfigError(
            f"{where} was made with the plugin {name} (digest {digest[:12]}), which this project does not"
            " have",
            cause="it is another project's, or its files were changed since",
            fix="add the plugin to `plugins` in config/config.yaml once you have read its code",
        )
    files = _files(folder)
    if digest_of(files) != digest:
        raise ConfigError(
            f"{folder} has other bytes than its name says", fix=f"remove it: rm -r {folder}"
        )
    return files


# --- import ---------------------------------------------------------------------------------------


class _Sources(MetaPathFinder, SourceLoader):  # type: ignore[misc]  # of typeshed
    """Finder and loader of the modules of one plugin, from sources in memory. Names of files, for
    tracebacks, are those of the copy."""

    def __init__(self, package: str, folder: Path, files: Mapping[str, bytes]) -> None:
        self._package, self._folder = package, folder.absolute()
        self._files = {"__init__.py": b"", **files}

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != self._package:
            return None
        inside = below.replace(".", "/")
        for name in (f"{inside}/__init__.py".lstrip("/"), f"{inside}.py"):
            if name in self._files:
                spec = ModuleSpec(
                    fullname,
                    self,
                    origin=str(self._folder / name),
                    is_package=name.endswith("__init__.py"),
                )
                spec.has_location = True
                return spec
        return None

    def get_filename(self, fullname: str) -> str:
        spec = self.find_spec(fullname)
        if spec is None or spec.origin is None:
            raise ImportError(f"no module {fullname}", name=fullname)
        return spec.origin

    def get_data(self, path: str | bytes) -> bytes:
        try:
            return self._files[str(Path(str(path)).relative_to(self._folder))]
        except (KeyError, ValueError):
            raise OSError(path) from None


def _import(name: str, digest: str, files: Mapping[str, bytes]) -> None:
    """Import a plugin and take up its hooks. Raises ConfigError with the place of an error in it."""
    from forge.core.models.architectures import ARCHITECTURES
    from forge.core.optimizers import OPTIMIZERS
    from forge.core.text_formats import AUTO, FORMATS

    package = f"{PACKAGE}{name}"
    finder = _Sources(package, folder_of(digest), files)
    sys.meta_path.append(finder)
    try:
        module = importlib.import_module(f"{package}.{HOOKS}")
        hooks.register(
            name, module, {*ARCHITECTURES, *OPTIMIZERS, AUTO, *FORMATS, *hooks.own_text_formats()}
        )
    except (Exception, SystemExit) as err:
        sys.meta_path.remove(finder)
        for known in [m for m in sys.modules if m.partition(".")[0] == package]:
            del sys.modules[known]
        raise ConfigError(
            f"the plugin {name} cannot be imported: {type(err).__name__}: {err}{place(err)}",
            fix=f"correct its code; docs/plugins/own.md has what a {HOOKS} module may have",
        ) from None


def place(err: BaseException) -> str:
    """The last line of a plugin's own code in a traceback, for an error; "" where there is none."""
    own = [
        frame
        for frame in traceback.extract_tb(err.__traceback__)
        if COPIES.name in Path(frame.filename).parts or STAGED.name in Path(frame.filename).parts
    ]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
