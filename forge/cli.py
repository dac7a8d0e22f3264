"""The `forge` command: parse arguments, run one subcommand, map errors to messages and exit codes."""

from __future__ import annotations

import argparse
import io
import locale
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import forge
from forge.core.config import Config, ResolvedConfig, is_boolean, load_config, parse_override
from forge.core.errors import ConfigError, Exit, ForgeError
from forge.core.terminal import copy_to, say

# Imports of the verbs stay inside their functions: `forge --help` answers without torch or pandas.

EXIT_CODES = """exit codes: 0 done · 75 stopped early, a checkpoint is committed, rerun the command
65 bad data · 69 node, network or disk unfit · 70 diverged, or a bug · 78 bad config or command line"""

RUNS = "folders of runs, or their names (default: all runs of the project in this folder)"

OVERRIDES = (
    "Every key of the config can be given by its dotted name, for example --train.max_steps=1000,"
    " and every key of machine.yaml with --machine.KEY=VALUE."
)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; the exit code. arguments: those of the command line where None."""
    if arguments is None:
        _in_utf8()
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_keys:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        options.overrides, options.machine_overrides = _overrides(rest)
        with _disk_trouble():
            _prepare(options)
            options.action(options)
    except ForgeError as err:
        say(f"forge {options.verb}: {err}")
        return int(err.code)
    except BrokenPipeError:
        # The reader of our output (head, less) has left; not a failure of the verb.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:
        say(
            traceback.format_exc()
            + f"forge {options.verb}: this is a bug of Forge, please report it"
        )
        return int(Exit.FAILED)
    except KeyboardInterrupt:
        say(f"forge {options.verb}: interrupted; rerun the same command to resume")
        return int(Exit.STOPPED)
    return int(Exit.DONE)


def _in_utf8() -> None:
    """All text that Forge reads and writes is UTF-8, also where the locale says otherwise: a corpus, a
    tokenizer and a report do not change with LANG. Starts Python again, since only that sets it for
    every file and every process to come. A terminal without some character shows its number.
    """
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _disk_trouble() -> AbstractContextManager[None]:
    """A last net: what a disk or a network file system does is no bug, wherever it strikes."""
    from forge.core.files import disk_trouble

    return disk_trouble(Path("a file"), "read or write")


def _prepare(options: argparse.Namespace) -> None:
    from forge.core.process import in_workflow, stop_with_parent

    if in_workflow():
        stop_with_parent()
    if options.log:
        Path(options.log).parent.mkdir(parents=True, exist_ok=True)
        # Names of files and excerpts of text may be no UTF-8. Open until the process ends.
        copy_to(open(options.log, "a", buffering=1, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115


def _overrides(rest: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leftover arguments as config overrides and machine overrides."""
    joined: list[str] = []
    for argument in rest:
        # "--train.seed 3" is as good as "--train.seed=3".
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
    """`--train.compile` as `--train.compile=true`, where the key is one that is true or false."""
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
            fix=f"give one, as in {argument}=VALUE; only keys that are true or false may stand alone",
        )
    return f"{argument}=true"


class _Parser(argparse.ArgumentParser):
    """Usage errors end with 78: 2, argparse's own, is none of the documented exit codes."""

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
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        name: str, action: Callable[[argparse.Namespace], None], text: str, *, keys: bool = True
    ) -> Any:
        """keys: whether keys of the config can be given as options; every other one is refused."""
        epilog = OVERRIDES if keys else None
        added = verbs.add_parser(name, help=text, description=text, epilog=epilog)
        added.allow_abbrev = False
        added.set_defaults(action=action, takes_keys=keys, parser=added, log=None)
        return added

    def of_config(name: str, action: Callable[[argparse.Namespace], None], text: str) -> Any:
        added = verb(name, action, text)
        added.add_argument("--log", metavar="FILE", help="write the lines for people there too")
        added.add_argument("config", metavar="CONFIG", help="config.yaml, or a run's config.json")
        return added

    of_config("tokenizer", _tokenizer, "train, copy or fetch the tokenizer")
    _workers(of_config("tokenize", _tokenize, "turn the corpus into shards of token ids"))
    _machine(of_config("stage", _stage, "put the shards onto the nodes' own disks"))
    _machine(of_config("preflight", _preflight, "check nodes and ranks before training"))
    train = of_config("train", _train, "train to the goal, resuming from the last checkpoint")
    train.add_argument(
        "--require-checkpoint",
        action="store_true",
        help="end with 65 instead of starting at step 0 when no checkpoint is left",
    )
    _machine(train)
    _validate_options(
        of_config("validate", _validate, "check the last checkpoint of a run, or any")
    )
    of_config("report", _report, "write the run's report.html")
    of_config("config", _config, "write a run's config.json with all defaults and ids")
    show = verb("show", _show, "show status, samples and lineage of runs", keys=False)
    show.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    _logs_options(
        verb("logs", _logs, "show what ranks and launcher said, errors first", keys=False)
    )
    _status_options(verb("status", _status, "show where each run stands now", keys=False))
    _export_options(verb("export", _export, "write a checkpoint as transformers loads it"))
    return parser


def _workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, help="processes, one per core at most (default)")


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", help="machine.yaml of a profile (default: built-in values)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks (default: 1)")


def _validate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="check all of the run, print a table")
    parser.add_argument(
        "--fix", action="store_true", help="as --all, and move damaged ones to quarantine"
    )


def _logs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name in results/")
    parser.add_argument("--follow", action="store_true", help="go on with what is written")
    parser.add_argument("--rank", type=int, metavar="N", help="the log of this rank")
    parser.add_argument("--restart", metavar="N", help="restart N, a start's name, or all")
    parser.add_argument("--lines", type=int, default=20, metavar="N", help="lines (default: 20)")


def _status_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    parser.add_argument("--watch", action="store_true", help="draw it again every few seconds")
    parser.add_argument("--json", action="store_true", help="for scripts")


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run's folder, its name in results/, or a checkpoint's folder"
    )
    parser.add_argument(
        "--format", choices=("safetensors",), default="safetensors", help="layout (safetensors)"
    )
    parser.add_argument(
        "--to", metavar="FOLDER", type=Path, help="default: export/step-… in the run's folder"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (fp32, as stored)"
    )


def _load(options: argparse.Namespace) -> Config:
    return load_config(options.config, options.overrides)


def _resolved(options: argparse.Namespace) -> ResolvedConfig:
    from forge.data.content_ids import resolve

    return resolve(_load(options))


def _load_machine(options: argparse.Namespace) -> Any:
    from forge.core.machine import load_machine

    return load_machine(options.machine, options.machine_overrides)


def _layout(options: argparse.Namespace) -> Any:
    from forge.cluster.placement import WorldLayout

    return WorldLayout(options.nodes, options.ranks_per_node)


def _cores(options: argparse.Namespace) -> int:
    from forge.cluster.network import available_cores

    cores = available_cores()
    if options.workers is not None and options.workers < 1:
        raise ConfigError(
            f"--workers is {options.workers}: there must be at least one",
            fix=f"leave it out for one process per core ({cores} here)",
        )
    return min(options.workers or cores, cores)  # more than cores only take each other's time


def _tokenizer(options: argparse.Namespace) -> None:
    from forge.cluster.lock import lock
    from forge.core.paths import tokenizer_folder
    from forge.data.tokenizer import build_tokenizer

    config = _resolved(options)
    with lock(tokenizer_folder(config.data, config.ids.tokenizer), "tokenizer"):
        build_tokenizer(config)


def _tokenize(options: argparse.Namespace) -> None:
    from forge.cluster.lock import lock
    from forge.core.paths import tokens_folder
    from forge.data.tokenize import tokenize

    config = _resolved(options)
    with lock(tokens_folder(config.data, config.ids.tokens), "tokenize"):
        tokenize(config, workers=_cores(options))


def _stage(options: argparse.Namespace) -> None:
    from forge.run.requeue import back_to_the_queue_if_preempted
    from forge.staging.stage import stage

    machine = _load_machine(options)
    with back_to_the_queue_if_preempted(machine):
        stage(_resolved(options), machine, _layout(options))


def _preflight(options: argparse.Namespace) -> None:
    from forge.preflight.preflight import preflight
    from forge.run.requeue import back_to_the_queue_if_preempted

    machine = _load_machine(options)
    with back_to_the_queue_if_preempted(machine):
        preflight(_resolved(options), machine, _layout(options))


def _train(options: argparse.Namespace) -> None:
    from forge.run.train import train

    config, machine, layout = _resolved(options), _load_machine(options), _layout(options)
    train(config, machine, layout, require_checkpoint=options.require_checkpoint)


def _validate(options: argparse.Namespace) -> None:
    from forge.validation.validate import validate, validate_all, validate_folder

    place = Path(options.config)
    if options.all or options.fix:
        run = place if place.is_dir() else _resolved(options)
        validate_all(run, options.overrides, fix=options.fix)
    elif place.is_dir():
        validate_folder(place, options.overrides)
    else:
        validate(_resolved(options))


def _report(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths
    from forge.reporting.report import write_report

    path = write_report(RunPaths.of(_load(options)))
    say(f"report: {path}")


def _config(options: argparse.Namespace) -> None:
    from forge.core.files import write_json
    from forge.core.paths import RunPaths

    config = _resolved(options)
    write_json(RunPaths.of(config).config, config.to_json())


def _show(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.show import show

    runs = find_runs(options.runs)
    for run in runs:
        if not run.config.exists():
            raise ConfigError(
                f"{run.root} is not a run's folder", fix="name folders such as results/base"
            )
    show(runs)


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


def _export(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.trainer.export import export

    (run,) = find_runs([options.run])
    export(run.root, options.to, options.dtype, options.overrides)


if __name__ == "__main__":
    raise SystemExit(main())
