"""Hooks: what a plugin adds to a run, and the typed functions by which the kernel asks for it.

A plugin is a folder `forge/plugins/NAME`; functions in its `hooks.py` that are marked with `hook`
implement some of `Hooks`. Plugins are found by listing these files, so a deleted folder is an absent
plugin and no error. They are called in order of their names. None is looked for before it is asked for:
ranks have none. A plugin of a project (`core.project_plugins`) implements some of OF_PROJECTS, and is
taken up by `register`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pluggy

from forge.core.errors import ConfigError
from forge.core.text_formats import NAME, TextFormat

if TYPE_CHECKING:
    from forge.attestation.verify import Links
    from forge.core.config import Config, ResolvedConfig
    from forge.core.errors import ForgeError
    from forge.core.file_list import FileList
    from forge.core.machine import Machine
    from forge.core.models.base import Model
    from forge.core.optimizers import Optimizer
    from forge.core.paths import RunPaths
    from forge.core.records import Check, RunSettings
    from forge.core.section import Section

PROJECT = "forge"
FOLDER = Path(__file__).parents[1] / "plugins"
# Hooks that a plugin of a project may implement. A run is bound to the digest of one that has its
# architecture or its optimizer (`content_ids.used_plugins`), tokens to that of one that has their text
# format, and to no other.
OF_PROJECTS = {
    *("architectures", "optimizers", "text_formats", "trackers", "node_checks"),
    *("rule_file", "wanted_files"),
}
hook = pluggy.HookimplMarker(PROJECT)
_specified = pluggy.HookspecMarker(PROJECT)
_first = _specified(firstresult=True)  # asked until one plugin gives something else than None
T = TypeVar("T")


class RunDirectories(Protocol):
    """Directories that stand for a run's on nodes that do not see it, during one launch."""

    @property
    def spec_path(self) -> Path:
        """Path of the `LaunchSpec` on all nodes."""

    @property
    def lost(self) -> Mapping[str, str]:
        """Nodes that cannot be reached any more, and why: the launch cannot go on."""

    def finish(self) -> None:
        """Wait, after the last rank has exited, until all that ranks wrote is in the run's directory."""


BeginLaunch = Callable[[Any], AbstractContextManager[RunDirectories]]
ExportStep = Callable[[Path, Any, str | None], None]


@dataclass(frozen=True)
class Finding:
    """Fault of a run, whatever its state is: a line for people, and the command that helps."""

    text: str
    next: str = ""


class Hooks:
    """Specification of all hooks. An error of a hook ends the command like one of the kernel's own."""

    @_specified
    def architectures(self) -> Mapping[str, type[Model]]:
        """Values of `model.architecture`, each with its keys; `Model.LAYERS` names the module with the
        layers, which only ranks import. For plugins of a project."""
        raise NotImplementedError

    @_specified
    def optimizers(self) -> Mapping[str, Optimizer]:
        """Values of `train.optimizer`; `Optimizer.module` names the module with the update, which only
        ranks import, and whose contract is in `forge.trainer.optimizers`. For plugins of a project."""
        raise NotImplementedError

    @_specified
    def text_formats(self) -> Mapping[str, TextFormat]:
        """Values of `tokenize.format`; `TextFormat.module` names the module with the reader, whose
        contract is in `forge.data.text_formats`."""
        raise NotImplementedError

    @_specified
    def trackers(self) -> Mapping[str, type[Section]]:
        """Keys of the section `tracking`, each with its own keys; the method `tracker` of such a section
        makes the tracker, as docs/plugins/own.md says. For plugins of a project."""
        raise NotImplementedError

    @_specified
    def node_checks(self) -> Sequence[Callable[[], Check]]:
        """Checks of a node before it trains. Each runs on each node, for a few seconds at most; what it
        raises is a check that fails. For plugins of a project."""
        raise NotImplementedError

    @_specified
    def sections(self) -> dict[str, type[Section]]:
        """Sections of config.yaml by key, read by `config.of(CLASS)`. Training does not read them."""
        raise NotImplementedError

    @_specified
    def check_config(self, config: Config) -> None:
        """Check a config that has a section of a plugin. Raises ValueError."""

    @_specified
    def check_run(self, config: Config, where: str, trains: bool) -> None:
        """Check, before a run is planned, or trains here, what this machine has. where: of the config,
        for an error. Raises ForgeError."""

    @_specified
    def run_files(self) -> Sequence[str]:
        """Names of files and directories in that of a run into which commands write besides its
        training."""
        raise NotImplementedError

    @_specified
    def add_subcommands(self, subcommands: Any) -> None:
        """Add to the `commands.subcommands.Subcommands` of `forge`."""

    @_specified
    def add_options(self, subcommand: str, parser: Any) -> None:
        """Add options to a subcommand of the kernel. parser: argparse's."""

    @_specified
    def export_step(self, options: Any) -> ExportStep:
        """Check the options of `forge export` before anything is written. Returns a function of the
        directory that was written, the run or checkpoint (`of_options.saved_run`), and the dtype of the
        weights where the directory may have been there before, else None. Raises ForgeError."""
        raise NotImplementedError

    @_specified
    def export_keys(
        self, config: ResolvedConfig, tokenizer: Any
    ) -> Mapping[str, Mapping[str, Any]]:
        """Keys of JSON files of an export, such as generation_config.json, beside or in place of those of
        the kernel. tokenizer: the `data.tokenizer.LoadedTokenizer` of the run."""
        raise NotImplementedError

    @_specified
    def verify_by_run(self, export: Path, run: RunPaths, links: Links) -> Sequence[str]:
        """Compare an export with the checkpoints of its run beyond their digests: sentences on what is
        right. links: of its statement, verified. Raises VerificationError."""
        raise NotImplementedError

    @_specified
    def findings(self, paths: RunPaths) -> Sequence[Finding]:
        """Faults of a run whatever its state is, part of the reason that people read. Raises
        DataError for a record that cannot be read: the state of the run is unknown then."""
        raise NotImplementedError

    @_specified
    def run_lines(self, paths: RunPaths) -> Mapping[str, Sequence[str]]:
        """Label -> lines about a run for `forge show` and the report. Raises DataError for a record that
        cannot be read."""
        raise NotImplementedError

    @_specified
    def rule_file(self) -> Path:
        """A file of Snakemake rules, which use the object FORGE (`forge.flow.flow.Flow`). Of a plugin of
        a project: one of its own files."""
        raise NotImplementedError

    @_specified
    def rules_on_nodes(self) -> Sequence[str]:
        """Rules whose jobs start Snakemake once: those that run a `forge` command and nothing else."""
        raise NotImplementedError

    @_specified
    def rules_here(self) -> Sequence[str]:
        """Rules that need the internet, or what nodes may not see: `forge submit` runs them before it
        submits. `localrules` in the file of rules keeps them where Snakemake runs."""
        raise NotImplementedError

    @_specified
    def rule_settings(self, runs: Mapping[str, ResolvedConfig]) -> Mapping[str, dict[str, Any]]:
        """Rule -> run -> its `rule_inputs.RuleSettings`; of a rule over all runs by its output."""
        raise NotImplementedError

    @_specified
    def wanted_files(self, config: ResolvedConfig, target: str) -> Sequence[str]:
        """Files, relative to the run's directory, that a target of the workflow asks for besides its
        own. target: such as train."""
        raise NotImplementedError

    @_specified
    def check_targets(self, runs: Mapping[str, ResolvedConfig], targets: Sequence[str]) -> None:
        """Check the targets of a command, before Snakemake plans it. Raises ForgeError."""

    @_specified
    def check_plan(
        self, runs: Mapping[str, ResolvedConfig], rules: Mapping[str, Sequence[str]]
    ) -> None:
        """Check what will be run, before anything is submitted. rules: rule -> names of runs, of the jobs
        that are due. Raises ForgeError."""

    @_specified
    def after_dry_run(self, flow: Any, refusal: ForgeError | None) -> None:
        """Take note of the plan that a dry run has shown. flow: the `forge.flow.flow.Flow`. refusal: with
        what a start would be refused. Raises nothing."""

    @_specified
    def job_requests(self, settings: Any, mem_mb: int) -> Mapping[str, dict[str, Any]]:
        """Rule -> `Request.to_json` of the jobs that are submitted while a run trains. settings:
        Snakemake's ResourceSettings. mem_mb: memory that the run's model needs."""
        raise NotImplementedError

    @_specified
    def while_training(
        self, paths: RunPaths, settings: RunSettings, data: str
    ) -> AbstractContextManager[None]:
        """Work beside a run while the body trains it, in the launcher, which holds the run's lock. data:
        the directory with the run's tokenizer. Raises nothing."""
        raise NotImplementedError

    @_specified
    def status_lines(self) -> Sequence[str]:
        """Lines of `forge status` above the runs, made anew whenever it is drawn."""
        raise NotImplementedError

    @_specified
    def status_json(self) -> Mapping[str, Any]:
        """Keys of the object that `forge status --json` prints, besides `runs`."""
        raise NotImplementedError

    @_specified
    def agent_functions(self) -> Sequence[Callable[..., Any]]:
        """Functions that the agent of a node runs, as those of `forge.node_agent`."""
        raise NotImplementedError

    @_first
    def run_directories(
        self,
        paths: RunPaths,
        machine: Machine,
        placement: Any,
        python: str,
        checkpoint: FileList | None,
    ) -> BeginLaunch | None:
        """Prepare nodes that do not see the run's directory (`stage.results`) for a launch; a function of
        its `LaunchSpec` that begins it there. None where all nodes see the directory.

        placement: the `hosts.placement.Placement` of the ranks. python: of agents. checkpoint: to
        resume from, which these nodes have when this returns. Both raise NodesFailed for nodes that fail,
        ConfigError and SlurmSilent.
        """
        raise NotImplementedError


@cache
def _call() -> Any:
    """The hooks of all plugins, by name."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    # pluggy calls the last one that was registered first.
    for name in reversed(names()):
        manager.register(import_module(f"forge.plugins.{name}.hooks"), name)
    return manager.hook


# What plugins of the project have, with the plugin that has it.
_architectures: dict[str, tuple[str, type[Model]]] = {}
_optimizers: dict[str, tuple[str, Optimizer]] = {}
_text_formats: dict[str, tuple[str, TextFormat]] = {}
_trackers: dict[str, type[Section]] = {}
_node_checks: list[tuple[str, Callable[[], Check]]] = []
_rule_files: list[Path] = []
_of_project: dict[str, Any] = {}  # all hooks of a plugin, as `_call` gives them


def register(name: str, module: ModuleType, taken: Collection[str]) -> None:
    """Take up a plugin of the project. taken: architectures, optimizers and formats of Forge.

    Raises pluggy.PluginValidationError for a function that is marked as a hook and is none of `Hooks`, or
    takes other arguments; TypeError for a value that its hook does not have; ValueError for other hooks,
    which jobs would not call, and for a name that is taken.
    """
    own = pluggy.PluginManager(PROJECT)
    own.add_hookspecs(Hooks)
    own.register(module, name)
    own.check_pending()
    if others := {call.name for call in own.get_hookcallers(module) or ()} - OF_PROJECTS:
        raise ValueError(
            f"{', '.join(sorted(others))}: a plugin of a project has {', '.join(sorted(OF_PROJECTS))}"
        )
    models = _named(own.hook.architectures(), "architectures", type)
    updates = _named(own.hook.optimizers(), "optimizers", tuple)
    sent_to = _named(own.hook.trackers(), "trackers", type)
    readers = _named(own.hook.text_formats(), "text_formats", TextFormat)
    for key in (*models, *updates, *readers):
        if key in {*taken, *_architectures, *_optimizers, *_text_formats}:
            raise ValueError(f"the name {key} is taken, by Forge or by another plugin")
    for key, reader in readers.items():
        reader.check_of_plugin(key)
    for key, section in sent_to.items():
        if key in _trackers or not re.fullmatch(NAME, key):
            raise ValueError(f"trackers: the name {key} is taken by another plugin, or no name")
        if not callable(getattr(section, "tracker", None)):
            raise TypeError(f"trackers: {key} is {section!r:.80}, which has no method `tracker`")
    checks = _listed(own.hook.node_checks())
    if wrong := [one for one in checks if not callable(one)]:
        raise TypeError(f"node_checks: {wrong[0]!r:.80} is no function")
    own_files = Path(str(module.__file__)).parent
    rules = [Path(path) for path in own.hook.rule_file()]
    if wrong := [path for path in rules if not path.is_file() or path.parent != own_files]:
        raise ValueError(f"rule_file: {wrong[0]} is no file beside its hooks")
    _architectures.update({key: (name, model) for key, model in models.items()})
    _optimizers.update({key: (name, one) for key, one in updates.items()})
    _text_formats.update({key: (name, one) for key, one in readers.items()})
    _trackers.update(sent_to)
    _node_checks.extend((name, one) for one in checks)
    _rule_files.extend(rules)
    _of_project[name] = own.hook


def _named(found: list[Any], hook_name: str, kind: type) -> dict[str, Any]:
    """Values that a hook of one plugin gave, by name."""
    for one in found:
        if not isinstance(one, dict):
            raise TypeError(f"{hook_name} gives {one!r:.80}, which is no dictionary")
        for key, value in one.items():
            if not isinstance(key, str) or not isinstance(value, kind):
                raise TypeError(f"{hook_name}: {key} is {value!r:.80}")
    return _merged(found)


@cache
def names() -> tuple[str, ...]:
    """Names of the plugins that are here."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/hooks.py")))


def is_implemented(name: str) -> bool:
    """Return whether a plugin that is here implements this hook."""
    return bool(getattr(_call(), name).get_hookimpls())


def _merged(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for one in found for key, value in one.items()}


def _listed(found: list[Sequence[T]]) -> list[T]:
    if wrong := [one for one in found if not isinstance(one, list | tuple)]:
        raise TypeError(f"it gives {wrong[0]!r:.80}, which is no list")
    return [value for one in found for value in one]


def architectures() -> dict[str, tuple[str, type[Model]]]:
    """Value of `model.architecture` -> the plugin of the project that has it, and its keys."""
    return dict(_architectures)


def optimizers() -> dict[str, tuple[str, Optimizer]]:
    """Value of `train.optimizer` -> the plugin of the project that has it, and what is known of it."""
    return dict(_optimizers)


@cache
def own_text_formats() -> dict[str, TextFormat]:
    """Value of `tokenize.format` -> what is known of a format that a plugin of Forge has."""
    return _merged(_call().text_formats())


def text_formats() -> dict[str, tuple[str, TextFormat]]:
    """Value of `tokenize.format` -> the plugin of the project that has it, and what is known of it."""
    return dict(_text_formats)


def trackers() -> dict[str, type[Section]]:
    """Key of `tracking` -> the section of a tracker that a plugin of the project has."""
    return dict(_trackers)


def node_checks() -> list[tuple[str, Callable[[], Check]]]:
    """Each check of a node that plugins of the project have, with the plugin."""
    return list(_node_checks)


@cache
def sections() -> dict[str, type[Section]]:
    """Sections of plugins by key."""
    return _merged(_call().sections())


def check_config(config: Config) -> None:
    """Raise ValueError for a config that a plugin refuses."""
    _call().check_config(config=config)


def check_run(config: Config, where: str, *, trains: bool = False) -> None:
    """Raise ForgeError for a run that cannot work here. trains: now, by `forge train`."""
    _call().check_run(config=config, where=where, trains=trains)


def run_files() -> list[str]:
    """Names of files and directories that plugins have in that of a run."""
    return _listed(_call().run_files())


def add_subcommands(subcommands: Any) -> None:
    """Add the subcommands of plugins."""
    _call().add_subcommands(subcommands=subcommands)


def add_options(subcommand: str, parser: Any) -> None:
    """Add options of plugins to a subcommand of the kernel."""
    _call().add_options(subcommand=subcommand, parser=parser)


def export_steps(options: Any) -> list[ExportStep]:
    """Functions of plugins, to be called with an export that was written. Raises ForgeError for options
    that one refuses."""
    return list(_call().export_step(options=options))


def export_keys(config: ResolvedConfig, tokenizer: Any) -> dict[str, Mapping[str, Any]]:
    """File of an export -> keys that plugins add."""
    return _merged(_call().export_keys(config=config, tokenizer=tokenizer))


def verify_by_run(export: Path, run: RunPaths, links: Links) -> list[str]:
    """Sentences of plugins on an export that its run has. Raises VerificationError."""
    return _listed(_call().verify_by_run(export=export, run=run, links=links))


def findings(paths: RunPaths) -> list[Finding]:
    """Faults of a run that plugins find. Raises DataError."""
    return _listed(_call().findings(paths=paths))


def run_lines(paths: RunPaths) -> dict[str, list[str]]:
    """Label -> lines of plugins about a run; none without lines. Raises DataError."""
    return {k: list(v) for k, v in _merged(_call().run_lines(paths=paths)).items() if v}


def rule_files() -> list[str]:
    """The files of Snakemake rules of plugins."""
    return [str(path) for path in (*_call().rule_file(), *_rule_files)]


def rules_on_nodes() -> list[str]:
    """Rules of plugins whose jobs start Snakemake once."""
    return _listed(_call().rules_on_nodes())


def rules_here() -> list[str]:
    """Rules of plugins that run where the user's command is."""
    return _listed(_call().rules_here())


def rule_settings(runs: Mapping[str, ResolvedConfig]) -> dict[str, dict[str, Any]]:
    """Rule -> run, or output -> `rule_inputs.RuleSettings` of plugins."""
    return _merged(_call().rule_settings(runs=runs))


def wanted_files(config: ResolvedConfig, target: str) -> list[str]:
    """Files of a run that plugins add to a target. Raises ConfigError where one of a project raises."""
    wanted = _listed(_call().wanted_files(config=config, target=target))
    for name, own in _of_project.items():
        try:
            wanted += _listed(own.wanted_files(config=config, target=target))
        except Exception as err:
            said = f"{type(err).__name__}: {err}"
            raise ConfigError(
                f"the plugin {name}: wanted_files: {said}", fix="correct it"
            ) from None
    return wanted


def check_targets(runs: Mapping[str, ResolvedConfig], targets: Sequence[str]) -> None:
    """Raise ForgeError for a target that has nothing to do."""
    _call().check_targets(runs=runs, targets=targets)


def check_plan(runs: Mapping[str, ResolvedConfig], rules: Mapping[str, Sequence[str]]) -> None:
    """Raise ForgeError for a plan that a plugin refuses."""
    _call().check_plan(runs=runs, rules=rules)


def after_dry_run(flow: Any, refusal: ForgeError | None) -> None:
    """Tell plugins the plan of a dry run, or with what a start would be refused."""
    _call().after_dry_run(flow=flow, refusal=refusal)


def job_requests(settings: Any, mem_mb: int) -> dict[str, dict[str, Any]]:
    """Rule -> request of the jobs that plugins submit while a run trains."""
    return _merged(_call().job_requests(settings=settings, mem_mb=mem_mb))


@contextmanager
def while_training(paths: RunPaths, settings: RunSettings, data: str) -> Iterator[None]:
    """Let plugins work beside a run while the body trains it."""
    with ExitStack() as stack:
        for beside in _call().while_training(paths=paths, settings=settings, data=data):
            stack.enter_context(beside)
        yield


def status_lines() -> list[str]:
    """Lines that plugins add to `forge status`."""
    return _listed(_call().status_lines())


def status_json() -> dict[str, Any]:
    """Keys that plugins add to the object of `forge status --json`."""
    return _merged(_call().status_json())


def agent_functions() -> list[Callable[..., Any]]:
    """Functions of plugins that the agent of a node runs."""
    return _listed(_call().agent_functions())


def run_directories(
    paths: RunPaths,
    machine: Machine,
    placement: Any,
    *,
    python: str,
    checkpoint: FileList | None,
) -> BeginLaunch | None:
    """Function that begins a launch on nodes that do not see the run; None where all see it."""
    begin: BeginLaunch | None = _call().run_directories(
        paths=paths, machine=machine, placement=placement, python=python, checkpoint=checkpoint
    )
    return begin
