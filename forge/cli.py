"""The `forge` command: parse arguments, run one subcommand, map errors to messages and exit codes."""

from __future__ import annotations

import argparse
import io
import locale
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import forge
from forge.core.config import (
    Config,
    ResolvedConfig,
    is_boolean,
    load_config,
    parse_override,
)
from forge.core.errors import ConfigError, Exit, ForgeError
from forge.core.terminal import begin_log, copy_to, say

# Subcommands import what they need inside their functions: `forge --help` must not wait for torch.

EXIT_CODES = """exit codes: 0 done · 75 stopped early with a committed checkpoint, rerun the command
65 bad data · 69 unhealthy node, network or disk · 70 diverged, or a bug
78 bad config or command line"""

RUNS = "directories or names of runs (default: all runs of the project in the current directory)"

OVERRIDES = (
    "Any config key can be overridden by its dotted name, for example --train.max_steps=1000, and any"
    " key of machine.yaml with --machine.KEY=VALUE."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code. arguments: None for those of the command line."""
    if arguments is None:
        _in_utf8()
    parser = _parser()
    arguments, of_snakemake = _of_snakemake(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_overrides:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        options.overrides, options.machine_overrides = _overrides(rest)
        options.of_snakemake = of_snakemake
        from forge.core.files import disk_trouble

        # The last resort: no disk or network file system error is reported as a bug.
        with disk_trouble(Path("a file"), "read or write"):
            _prepare(options)
            options.action(options)
    except ForgeError as err:
        say(f"forge {options.subcommand}: {err}")
        return int(err.code)
    except BrokenPipeError:
        # The reader of standard output (head, less) has exited; that is not a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:
        say(
            traceback.format_exc()
            + f"forge {options.subcommand}: this is a bug of Forge, please report it"
        )
        return int(Exit.FAILED)
    except KeyboardInterrupt:
        say(f"forge {options.subcommand}: interrupted; rerun the same command to resume")
        return int(Exit.STOPPED)
    return int(Exit.DONE)


def _of_snakemake(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments for `forge`, and those behind `forge submit`, which are Snakemake's."""
    name, words = arguments[:1], arguments[1:]
    if name != ["submit"] or words[:1] in (["-h"], ["--help"]):
        return arguments, []
    for at, word in enumerate(words):
        if word == "--stop":  # which Snakemake does not have
            return [*name, word, *(job for job in words[at + 1 : at + 2] if job.isdigit())], []
        if word.startswith("--stop="):
            return [*name, word], []
    return name, words


def _in_utf8() -> None:
    """Read and write all text as UTF-8, whatever the locale: a corpus, a tokenizer and a report must not
    depend on LANG. Restarts Python in UTF-8 mode, which covers every file and child process. Characters
    that the terminal cannot show are printed as escapes.
    """
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _prepare(options: argparse.Namespace) -> None:
    from forge.core.process import in_workflow, stop_with_parent

    if in_workflow():
        stop_with_parent()
    else:  # Snakemake names the zone in what it shares with its jobs
        begin_log(sys.stderr)
    if options.log:
        Path(options.log).parent.mkdir(parents=True, exist_ok=True)
        # File names and excerpts of text may not be valid UTF-8. Stays open until the process ends.
        log = open(options.log, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        begin_log(log)
        copy_to(log)


def _overrides(rest: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config overrides and the machine overrides in the arguments that argparse did not know."""
    joined: list[str] = []
    for argument in rest:
        # "--train.seed 3" means the same as "--train.seed=3".
        if joined and not argument.startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    config: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    for argument in joined:
        key, value = parse_override(_with_value(argument))
        if key.startswith("machine."):
            machine[key.removeprefix("machine.")] = value
        else:
            config[key] = value
    return config, machine


def _with_value(argument: str) -> str:
    """`--train.compile` becomes `--train.compile=true`; ConfigError for a key that is not boolean."""
    from forge.core.machine import Machine

    key = argument.removeprefix("--")
    if "=" in argument or not argument.startswith("--"):
        return argument
    model, name = (
        (Machine, key.removeprefix("machine.")) if key.startswith("machine.") else (Config, key)
    )
    if not is_boolean(model, name):
        raise ConfigError(
            f"cannot read {argument!r}: it has no value",
            fix=f"write {argument}=VALUE; only boolean keys may be given without a value",
        )
    return f"{argument}=true"


class _Parser(argparse.ArgumentParser):
    """Usage errors exit with 78; argparse's own 2 is not one of the documented exit codes."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(int(Exit.CONFIG), f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="forge",
        description=forge.__doc__,
        epilog=f"{OVERRIDES}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"forge {forge.__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    subcommands = _Subcommands(subparsers)
    _add_steps(subcommands)
    _add_project(subcommands)
    _add_views(subcommands)
    return parser


class _Subcommands:
    """Adds subcommands to the parser."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers

    def plain(
        self,
        name: str,
        action: Callable[[argparse.Namespace], None],
        text: str,
        *,
        keys: bool = True,
    ) -> Any:
        """keys: whether config keys can be overridden with options."""
        epilog = OVERRIDES if keys else None
        added = self._subparsers.add_parser(name, help=text, description=text, epilog=epilog)
        added.allow_abbrev = False
        added.set_defaults(action=action, takes_overrides=keys, parser=added, log=None)
        return added

    def hidden(self, name: str, action: Callable[[argparse.Namespace], None], text: str) -> None:
        """One that Forge itself calls: without `help`, argparse does not list it."""
        added = self._subparsers.add_parser(name, description=text, allow_abbrev=False)
        added.set_defaults(action=action, takes_overrides=False, parser=added, log=None)

    def logged(self, name: str, action: Callable[[argparse.Namespace], None], text: str) -> Any:
        """With --log."""
        added = self.plain(name, action, text)
        added.add_argument("--log", metavar="FILE", help="also append all messages to FILE")
        return added

    def with_config(
        self,
        name: str,
        action: Callable[[argparse.Namespace], None],
        text: str,
        what: str = "config.yaml, or a run's config.json",
    ) -> Any:
        """With --log and a config. what: that its argument names."""
        added = self.logged(name, action, text)
        added.add_argument("config", metavar="CONFIG", help=what)
        return added


def _add_steps(subcommands: _Subcommands) -> None:
    """What makes a run, and what goes before it."""
    subcommands.with_config("tokenizer", _tokenizer, "train, copy or download the tokenizer")
    tokenize = subcommands.with_config(
        "tokenize", _tokenize, "tokenize the corpus into shards of token ids"
    )
    tokenize.add_argument(
        "--workers", type=int, metavar="N", help="processes (default and most: one per core)"
    )
    subcommands.with_config("sources", _sources, "list the tokens of all sources, after tokenize")
    subcommands.with_config(
        "model", _model, "find or download the pretrained weights of model.init"
    )
    subcommands.with_config(
        "inputs", _inputs, "download inputs from a hub, digest those of a program"
    )
    _machine(
        subcommands.with_config("stage", _stage, "copy shards or inputs to the nodes' local disks")
    )
    _machine(
        subcommands.with_config("preflight", _preflight, "check nodes and ranks before training")
    )
    train = subcommands.with_config(
        "train", _train, "train up to the goal, resuming from the last checkpoint"
    )
    train.add_argument(
        "--require-checkpoint",
        action="store_true",
        help="exit with 65 when there is no checkpoint, instead of starting at step 0",
    )
    _settings_option(train)
    _machine(train)
    validate = subcommands.with_config(
        "validate",
        _validate,
        "check the last checkpoint of a run, or a given checkpoint",
        "config.yaml, a run's config.json, or the directory of a run or of a checkpoint",
    )
    _its_config(validate)
    _settings_option(validate)
    _validate_options(validate)
    _machine(
        subcommands.with_config(
            "plan", _plan, "show the memory, checkpoints and time a run will need"
        )
    )
    subcommands.with_config("report", _report, "write the run's report.html")
    subcommands.with_config(
        "config", _config, "write the run's config.json, with every default filled in"
    )


def _add_project(subcommands: _Subcommands) -> None:
    """A new project, its profile, and its workflow without a terminal."""
    init = subcommands.plain(
        "init",
        _init,
        "write a new project that uses Forge's workflow as a module",
        keys=False,
    )
    init.add_argument("folder", metavar="DIR", type=Path, help="a directory that is not there yet")
    _profile_options(
        subcommands.plain(
            "profile",
            _profile,
            "write a profile for this cluster, from what its Slurm says",
            keys=False,
        )
    )
    submit = subcommands.plain(
        "submit", _submit, "run a Snakemake command as a Slurm job of its own", keys=False
    )
    submit.usage = (
        "forge submit --profile PROFILE [arguments of snakemake]\n       forge submit --stop [JOB]"
    )
    submit.epilog = (
        "All arguments are Snakemake's. Example: forge submit --profile profiles/mine train"
    )
    submit.add_argument(
        "--stop",
        nargs="?",
        const="",
        metavar="JOB",
        help="end the controller and its jobs, with a checkpoint; JOB: which, where several live",
    )
    subcommands.hidden("controller", _controller, "what the job of `forge submit` runs")


def _add_views(subcommands: _Subcommands) -> None:
    """What shows runs, scores them and hands them on."""
    show = subcommands.plain("show", _show, "show status, samples and lineage of runs", keys=False)
    show.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    _logs_options(
        subcommands.plain(
            "logs", _logs, "show the logs of ranks and launcher, errors first", keys=False
        )
    )
    _status_options(
        subcommands.plain("status", _status, "show the current state of each run", keys=False)
    )
    _evaluate_options(
        subcommands.with_config(
            "evaluate",
            _evaluate,
            "score checkpoints of a run by tasks of the lm-evaluation-harness",
            "config.yaml, directory or name of a run, or directory of one of its checkpoints",
        )
    )
    compare = subcommands.plain(
        "compare", _compare, "show runs side by side: configs, losses, cost", keys=False
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.add_argument("--html", metavar="FILE", type=Path, help="write a page instead")
    compare.add_argument("--log", metavar="FILE", help="also append all messages to FILE")
    sync = subcommands.plain(
        "sync", _sync, "send to the trackers what they have not been sent", keys=False
    )
    sync.add_argument("runs", nargs="+", metavar="RUN", help="directories or names of runs")
    _its_config(sync)
    _export_options(
        subcommands.logged("export", _export, "write a checkpoint as a directory that others load")
    )
    key = subcommands.plain("key", _key, "make a key that signs exports", keys=False)
    key.add_argument("file", metavar="FILE", type=Path, help="private key to write; also FILE.pub")
    _verify_options(
        subcommands.plain(
            "verify", _verify, "verify an export by the statement that it comes with", keys=False
        )
    )
    _reproduce_options(
        subcommands.plain(
            "reproduce",
            _reproduce,
            "train parts of the run of an export again, and certify how they ended",
            keys=False,
        )
    )


def _machine(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--machine", metavar="FILE", help="machine.yaml of a profile (default: built-in values)")
    option("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    option("--ranks-per-node", type=int, default=1, metavar="N", help="ranks per node (default: 1)")


def _profile_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("name", metavar="NAME", nargs="?", default="", help="directory to make in profiles/")
    option(
        "--partition", metavar="NAME", default="", help="of training (default: with the best GPUs)"
    )
    option("--gpus", type=int, metavar="N", help="GPUs of a node (default: all); 0: train on CPUs")
    option("--nodes", type=int, metavar="N", help="nodes that train (default: 2)")
    option("--save", type=Path, metavar="FILE", help="write Slurm's answers to FILE as well")
    option("--from", dest="answers", type=Path, metavar="FILE", help="read them from FILE instead")


def _its_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        dest="its_config",
        metavar="FILE",
        help="config of the run, for one that is not in the project's sample sheet: what is executed,"
        " contacted or opened comes from it",
    )


def _settings_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="of the workflow: sections validate, report, evaluate and tracking of the run's config",
    )


def _validate_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--all", action="store_true", help="check every checkpoint of the run and print a table")
    option("--fix", action="store_true", help="as --all, and move corrupt ones to quarantine/")


def _logs_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("run", metavar="RUN", help="a run's directory, or its name in results/")
    option("--follow", action="store_true", help="keep printing new lines as they are written")
    option("--rank", type=int, metavar="N", help="show the log of rank N")
    option("--restart", metavar="N", help="show restart N, the launch of this name, or all")
    option("--lines", type=int, default=20, metavar="N", help="lines of a log (default: 20)")


def _status_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    parser.add_argument("--watch", action="store_true", help="refresh every few seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    _its_config(parser)
    _settings_option(parser)
    parser.add_argument(
        "--download",
        action="store_true",
        help="only put the data of the tasks into the cache, on a node with internet",
    )


def _export_options(parser: argparse.ArgumentParser) -> None:
    _its_config(parser)
    option = parser.add_argument
    option("run", metavar="RUN", help="directory or name of a run, or directory of a checkpoint")
    option("--format", choices=("safetensors",), default="safetensors", help="file format")
    option("--to", metavar="DIR", type=Path, help="default: export/step-… in the run's directory")
    option(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)"
    )
    option("--sign", metavar="KEY", type=Path, help="sign the statement with this private key")


def _statement_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("folder", metavar="FOLDER", type=Path, help="directory of the export")
    option("--key", metavar="FILE", type=Path, help="public key of the author, in PEM")
    option("--digest", metavar="SHA256", help="that the statement must have, as a paper prints it")


def _reproduce_options(parser: argparse.ArgumentParser) -> None:
    _statement_options(parser)
    option = parser.add_argument
    option(
        "--data",
        metavar="TEXTS",
        help="make the tokens again from the text files in this directory (or python:stdlib;"
        " default: the project's tokens, if they are those of the statement)",
    )
    option(
        "--checkpoints",
        metavar="RUN",
        type=Path,
        help="directory of the run whose checkpoints to use (default: any run of the project)",
    )
    option("--intervals", type=int, default=3, metavar="K", help="how many to draw (default: 3)")
    option("--seed", type=int, metavar="N", help="of the draw (default: chosen now, and recorded)")
    option("--whole", action="store_true", help="train all steps again instead, from the first on")
    option(
        "--code",
        metavar="CHECKOUT",
        type=Path,
        help="train by the Forge in this directory (default: the installed one)",
    )
    option(
        "--minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="longest time for an interval (default: 60)",
    )
    option(
        "--to",
        metavar="FILE",
        type=Path,
        help="the certificate (default: FOLDER.certificate.json beside the directory)",
    )
    option("--sign", metavar="KEY", type=Path, help="sign the certificate with this private key")


def _verify_options(parser: argparse.ArgumentParser) -> None:
    _statement_options(parser)
    option = parser.add_argument
    option(
        "--data",
        metavar="TEXTS",
        help="also make the tokens again from the text files in this directory (or python:stdlib)",
    )
    option(
        "--checkpoints",
        metavar="RUN",
        type=Path,
        help="also compare the checkpoints in this directory of a run with the statement",
    )
    option(
        "--certificate", metavar="FILE", type=Path, help="also check this one of forge reproduce"
    )
    option("--certifier", metavar="FILE", type=Path, help="public key of who certifies, in PEM")


def _settings(options: argparse.Namespace) -> Any:
    """What the file of --settings has; None without it."""
    from forge.core.records import RunSettings

    return RunSettings.read(Path(options.settings)) if options.settings else None


def _use_settings(options: argparse.Namespace) -> None:
    """Let the sections in the file of --settings hold; keys of the command line win."""
    if settings := _settings(options):
        options.overrides = {**settings.sections, **options.overrides}


def _load(options: argparse.Namespace) -> Config:
    return load_config(options.config, options.overrides)


def _resolved(options: argparse.Namespace) -> ResolvedConfig:
    from forge.checkpoint.family import with_steps
    from forge.data.content_ids import resolve

    [config] = with_steps({"": _load(options)}).values()
    return resolve(config)


def _load_machine(options: argparse.Namespace) -> Any:
    from forge.cluster.network import with_exported_timeout
    from forge.core.machine import load_machine

    machine = load_machine(options.machine, options.machine_overrides)
    given = "fabric.timeout_sec" in options.machine_overrides
    return machine if given else with_exported_timeout(machine)


def _layout(options: argparse.Namespace) -> Any:
    from forge.cluster.placement import WorldLayout

    return WorldLayout(options.nodes, options.ranks_per_node)


def _fitting_layout(options: argparse.Namespace, machine: Any, config: Config) -> Any:
    """As `_layout`, or fewer nodes where the job got fewer (slurm.nodes_min)."""
    from forge.cluster.placement import fitting_layout

    return fitting_layout(machine, _layout(options), config)


def _cores(options: argparse.Namespace) -> int:
    from forge.cluster.network import available_cores

    cores = available_cores()
    if options.workers is not None and options.workers < 1:
        raise ConfigError(
            f"--workers is {options.workers}, but must be 1 or more",
            fix=f"leave it out for one process per core ({cores} here)",
        )
    return min(options.workers or cores, cores)  # more would only compete for the cores


def _tokenizer(options: argparse.Namespace) -> None:
    from forge.cluster.lock import shared_lock
    from forge.core.paths import tokenizer_folder
    from forge.data.tokenizer import build_tokenizer

    config = _resolved(options)
    with shared_lock(tokenizer_folder(config.data, config.ids.tokenizer), "tokenizer"):
        build_tokenizer(config)


def _tokenize(options: argparse.Namespace) -> None:
    from forge.cluster.lock import shared_lock
    from forge.core.paths import tokens_folder
    from forge.data.content_ids import single_corpora
    from forge.data.tokenize import tokenize

    config = _resolved(options)
    for corpus in single_corpora(config):
        with shared_lock(tokens_folder(corpus.data, corpus.ids.tokens), "tokenize"):
            tokenize(corpus, workers=_cores(options))
    if config.ids.sources:
        _sources(options)


def _sources(options: argparse.Namespace) -> None:
    from forge.cluster.lock import shared_lock
    from forge.core.paths import tokens_folder
    from forge.data.sources import list_sources

    config = _resolved(options)
    if not config.ids.sources:
        raise ConfigError(
            f"{options.config} has no tokenize.sources", fix="a single corpus needs no such step"
        )
    with shared_lock(tokens_folder(config.data, config.ids.tokens), "sources"):
        list_sources(config)


def _model(options: argparse.Namespace) -> None:
    from forge.cluster.lock import shared_lock
    from forge.core.paths import model_folder
    from forge.trainer.pretrained import make_model

    config = _resolved(options)
    if not config.ids.model:
        raise ConfigError(
            f"{options.config} has no model.init", fix="a run from scratch needs no such step"
        )
    with shared_lock(model_folder(config.data, config.ids.model), "model"):
        make_model(config)


def _inputs(options: argparse.Namespace) -> None:
    from forge.cluster.lock import shared_lock
    from forge.core.paths import inputs_folder
    from forge.data.content_ids import single_corpora
    from forge.data.inputs import make_inputs

    named = [corpus for corpus in single_corpora(_resolved(options)) if corpus.ids.inputs]
    if not named:
        raise ConfigError(
            f"{options.config} has no program.inputs, and no hf:// URL in tokenize.inputs",
            fix="a run without them needs no such step",
        )
    for config in named:
        with shared_lock(inputs_folder(config.data, config.ids.inputs), "inputs"):
            make_inputs(config)


def _stage(options: argparse.Namespace) -> None:
    from forge.run.requeue import requeue_if_preempted
    from forge.staging.stage import stage

    machine = _load_machine(options)
    with requeue_if_preempted(machine):
        config = _resolved(options)
        stage(config, machine, _fitting_layout(options, machine, config))


def _preflight(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths, place_logs
    from forge.launch.rank import refuse_left_over
    from forge.preflight.preflight import preflight
    from forge.run.requeue import requeue_if_preempted

    refuse_left_over()
    machine = _load_machine(options)
    with requeue_if_preempted(machine):
        config = _resolved(options)
        place_logs(RunPaths.of(config))
        preflight(config, machine, _fitting_layout(options, machine, config))


def _train(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths, place_logs
    from forge.launch.rank import refuse_left_over
    from forge.reporting.trusted import training_settings
    from forge.run.train import train
    from forge.tracking.tracker import refuse_missing_packages

    refuse_left_over()
    config, machine = _resolved(options), _load_machine(options)
    layout = _fitting_layout(options, machine, config)
    refuse_missing_packages(config.tracking, options.config)
    place_logs(RunPaths.of(config))
    settings = _settings(options) or training_settings(options.config, config, options.overrides)
    train(config, machine, layout, settings, require_checkpoint=options.require_checkpoint)


def _plan(options: argparse.Namespace) -> None:
    from forge.data.model import with_pretrained
    from forge.run.plan import plan

    plan(with_pretrained(_load(options)), _load_machine(options), _layout(options))


def _validate(options: argparse.Namespace) -> None:
    from forge.core.process import fast_imports

    _use_settings(options)
    with fast_imports():
        from forge.validation.validate import validate, validate_all

        run = _to_validate(options)
    if options.all or options.fix:
        validate_all(run, fix=options.fix)
    else:
        validate(run)


def _to_validate(options: argparse.Namespace) -> Any:
    """The checks of the run or checkpoint that is named."""
    from forge.reporting.trusted import directory_of, trusted
    from forge.run.programs import program_of

    run = directory_of(options.config)
    if run is None:
        return program_of(_resolved(options)).checks
    needed = ["data"] if options.all or options.fix else ["program.validate", "data"]
    if Path(options.config).is_dir():
        return _saved_run(options, run, *needed).checks
    accepted = trusted(run, options.its_config, options.overrides, *needed)
    return program_of(accepted.config).checks


def _saved_run(options: argparse.Namespace, place: Any, *needed: str, writes: bool = False) -> Any:
    """The run in a directory that is named, or the checkpoint of Forge's own trainer. needed: as for
    `trusted`. writes: whether the command writes beside checkpoints of Forge's own trainer."""
    from forge.reporting.trusted import is_of_program, run_of, trusted, trusted_data
    from forge.run.forge_trainer import ForgeRun
    from forge.run.programs import program_of

    if is_of_program(place):
        accepted = trusted(place, options.its_config, options.overrides, *needed)
        return program_of(accepted.config)
    data = trusted_data(run_of(place), options.its_config, writes=writes)
    return ForgeRun(place, None, {"data": data, **options.overrides})


def _report(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths
    from forge.core.process import fast_imports

    with fast_imports():
        from forge.reporting.report import write_report
        from forge.reporting.trusted import directory_of

    path = write_report(directory_of(options.config) or RunPaths.of(_load(options)))
    say(f"report: {path}")


def _config(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths

    config = _resolved(options)
    config.write(RunPaths.of(config).config)


def _init(options: argparse.Namespace) -> None:
    from forge.run.init import init

    init(options.folder)


def _profile(options: argparse.Namespace) -> None:
    from forge.cluster.profile import profile
    from forge.cluster.site_choice import Wishes

    wishes = Wishes(options.partition, options.gpus, options.nodes)
    profile(options.name, wishes, options.answers, options.save)


def _submit(options: argparse.Namespace) -> None:
    from forge.controller.submit import stop, submit

    if options.stop is not None:
        stop(options.stop)
    else:
        submit(options.of_snakemake)


def _controller(_options: argparse.Namespace) -> None:
    from forge.controller.control import control

    control()


def _show(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.show import show

    show(find_runs(options.runs, with_config=True))


def _logs(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.logs import logs

    (run,) = find_runs([options.run])
    logs(
        run,
        rank=options.rank,
        restart=options.restart,
        lines=options.lines,
        follow=options.follow,
    )


def _status(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.status import status

    status(find_runs(options.runs), watch=options.watch, as_json=options.json)


def _evaluate(options: argparse.Namespace) -> None:
    from forge.evaluation.tasks import download, go_offline, refuse_missing_package

    _use_settings(options)
    paths, checkpoint, config, is_ours = _to_evaluate(options)
    refuse_missing_package(config.evaluate, options.config)
    if options.download:
        download(paths, config.evaluate)
        return
    go_offline()
    from forge.evaluation.evaluate import evaluate_checkpoint, evaluate_run

    if checkpoint:
        evaluate_checkpoint(checkpoint, config.evaluate, config.data, is_ours=is_ours)
    else:
        evaluate_run(paths, config.evaluate, config.data, is_ours=is_ours)


def _to_evaluate(options: argparse.Namespace) -> tuple[Any, Path | None, Config, bool]:
    """Paths of the run, the checkpoint if one is named, the config, and whether the run is the user's."""
    from forge.core.paths import RunPaths
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import directory_of, run_of, trusted

    place = directory_of(options.config)
    if place is None and Path(options.config).is_file():
        config = _load(options)
        return RunPaths.of(config), None, config, True
    place = place or find_runs([options.config])[0]
    run = run_of(place)
    accepted = trusted(run, options.its_config, options.overrides, "evaluate", "data")
    checkpoint = place.root.resolve() if run is not place else None
    return run, checkpoint, accepted.config, accepted.is_ours


def _compare(options: argparse.Namespace) -> None:
    from forge.reporting.compare import compare
    from forge.reporting.find_runs import find_runs

    compare(find_runs(options.runs, with_config=True), as_json=options.json, page=options.html)


def _sync(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import trusted
    from forge.tracking.feed import sync

    runs = find_runs(options.runs, with_config=True)
    sync([(run, trusted(run, options.its_config, {}, "tracking").config.tracking) for run in runs])


def _export(options: argparse.Namespace) -> None:
    from forge.checkpoint.export_folder import record_export
    from forge.reporting.find_runs import find_runs

    key = None
    if options.sign:  # refused before anything is written
        from forge.attestation.signing import load_key

        key = load_key(options.sign)
    (run,) = find_runs([options.run])
    saved = _saved_run(options, run, writes=not options.to)
    folder = saved.export(options.to, options.dtype)
    if not options.to:
        record_export(folder)
    _attest(folder, saved, key)


def _attest(folder: Path, saved: Any, key: Any) -> None:
    """Write the statement of an export, signed where there is a key."""
    from forge.attestation.statement import write_statement
    from forge.cluster.lock import lock

    with lock(folder.parent, "export", name=f".{folder.name}.lock"):
        write_statement(folder, saved)
        if key:
            from forge.attestation.signing import sign

            sign(folder, key)


def _key(options: argparse.Namespace) -> None:
    from forge.attestation.signing import make_key

    make_key(options.file)


def _verify(options: argparse.Namespace) -> None:
    from forge.attestation.verify_run import verify_export

    verify_export(
        options.folder,
        options.key,
        options.digest,
        texts=options.data,
        checkpoints=options.checkpoints,
        certificate=options.certificate,
        certifier=options.certifier,
    )


def _reproduce(options: argparse.Namespace) -> None:
    from forge.attestation.reproduce import ReproduceOptions, reproduce

    reproduce(
        ReproduceOptions(
            folder=options.folder,
            texts=options.data,
            checkpoints=options.checkpoints,
            intervals=options.intervals,
            whole=options.whole,
            seed=options.seed,
            code=options.code,
            minutes=options.minutes,
            key=options.key,
            digest=options.digest,
            to=options.to,
            sign=options.sign,
        )
    )
