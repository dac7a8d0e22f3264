"""The `forge` command: parse arguments, run one subcommand, map errors to messages and exit codes.

What takes long to import is imported inside of `main`, for which Ctrl-C is no traceback.
"""

from __future__ import annotations

import argparse
import io
import json
import locale
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import forge
from forge.core.errors import ConfigError, Exit, ForgeError
from forge.core.terminal import begin_log, copy_to, say

EXIT_CODES = """exit codes: 0 done · 75 stopped early with a committed checkpoint, rerun the command
65 bad data · 69 unhealthy node, network or disk · 70 diverged, or a bug
78 bad config or command line"""


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code. arguments: None for those of the command line."""
    if arguments is None:
        in_utf8()
        sys.meta_path.insert(0, _BeforeCompiler())
    name = "forge"
    try:
        options, rest = _parsed(arguments)
        name = f"forge {options.subcommand}"
        _refuse_option_of_snakemake(options, rest)
        options.overrides, options.machine_overrides = _overrides(rest)
        _refuse_unread_machine_keys(options)
        from forge.core.files import disk_trouble

        # The last resort: no disk or network file system error is reported as a bug.
        with disk_trouble(Path("a file"), "read or write"):
            _prepare(options)
            options.action(options)
    except ForgeError as err:
        say(f"{name}: {err}")
        return int(err.code)
    except BrokenPipeError:
        # The reader of standard output (head, less) has exited; that is not a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:
        say(traceback.format_exc() + f"{name}: this is a bug of Forge, please report it")
        return int(Exit.FAILED)
    except KeyboardInterrupt:
        say(f"{name}: interrupted; rerun the same command to resume")
        return int(Exit.STOPPED)
    return int(Exit.DONE)


def _parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of the subcommand, and the arguments that are not known to it: overrides."""
    parser = _parser()
    parser.refuse_other(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_overrides:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options, rest


class _BeforeCompiler:
    """Opens the directory of kernels once this process imports torch's compiler, which many functions of
    torch do when they are first called: the import creates that directory, by default in /tmp under a
    name that anybody can make before, and sets its variable for all that the process starts. A finder
    that finds nothing sees each import first."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("torch._dynamo", "torch._inductor"):
            from forge.launch.kernel_cache import open_kernel_cache

            open_kernel_cache()
            sys.meta_path.remove(self)


def in_utf8() -> None:
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
    from forge.core import project_plugins
    from forge.core.process import in_workflow, stop_with_parent

    if in_workflow():
        stop_with_parent()
        project_plugins.use_given()
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
    from forge.core.config import parse_override

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


def _refuse_unread_machine_keys(options: argparse.Namespace) -> None:
    """ConfigError for keys of machine.yaml where the subcommand reads none (`machine_options`)."""
    if options.machine_overrides and not hasattr(options, "machine"):
        keys = ", ".join(f"--machine.{key}" for key in options.machine_overrides)
        raise ConfigError(
            f"{keys}: forge {options.subcommand} reads no machine.yaml",
            fix="leave it out; subcommands with the option --machine read one, such as train and plan",
        )


OF_SNAKEMAKE = (
    *("--config", "--configfile", "--profile", "--cores", "--jobs", "--dry-run"),
    *("-n", "-c", "-j", "-p"),
)


def _refuse_option_of_snakemake(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """ConfigError that says what to write. rest: arguments that argparse did not know."""
    from forge.core.config import CONFIG, apply_overrides
    from forge.core.values import read_cell

    words = [word.split("=", 1) if word.startswith("--") else [word] for word in rest]
    option = next((name for name, *_ in words if name in OF_SNAKEMAKE), None)
    if option is None:
        return
    config = getattr(options, "config", None) or ""  # may be a key behind --config
    given = [config, *(text for word in words for text in word)]
    keys = dict(pair for text in given if (pair := text.split("=", 1))[1:] and text[:1] != "-")
    fix = "give it to snakemake: snakemake --profile profiles/local train"
    if keys:
        line = f"forge {options.subcommand} {CONFIG if '=' in config else config}"
        nested = apply_overrides({}, {key: read_cell(value) for key, value in keys.items()})
        sections = [shlex.quote(f"{key}={json.dumps(value)}") for key, value in nested.items()]
        overrides = [shlex.quote(f"--{key}={value}") for key, value in keys.items()]
        fix = f"{line} {' '.join(overrides)}\n         or {fix} --config {' '.join(sections)}"
    raise ConfigError(f"{option} is an option of snakemake", fix=fix)


def _with_value(argument: str) -> str:
    """`--train.compile` becomes `--train.compile=true`; ConfigError for a key that is not boolean."""
    from forge.core.config import Config, is_boolean
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

    subcommands: Sequence[str] = ()

    def refuse_other(self, words: Sequence[str]) -> None:
        """Exit where no subcommand is named, with all of them, or where none has this name."""
        name = next((word for word in words if not word.startswith("-")), "")
        if not words:
            self.print_help(sys.stderr)
            self.exit(int(Exit.CONFIG))
        if name and name not in self.subcommands:
            import difflib

            close = difflib.get_close_matches(name, self.subcommands, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"there is no subcommand {name!r:.80}{meant}; forge --help lists all")

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(int(Exit.CONFIG), f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    from forge.commands.data_steps import add_data_steps
    from forge.commands.exports import add_exports
    from forge.commands.project import add_project
    from forge.commands.run_steps import add_run_steps
    from forge.commands.subcommands import OVERRIDES, Subcommands
    from forge.commands.views import add_views
    from forge.core import hooks

    parser = _Parser(
        prog="forge",
        description=forge.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"forge {forge.__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    subcommands = Subcommands(subparsers)
    for add in (add_data_steps, add_run_steps, add_project, add_views, add_exports):
        add(subcommands)
    hooks.add_subcommands(subcommands)
    steps = (
        f"Also, each called by a rule of the workflow: {', '.join(sorted(subcommands.of_rules))}."
    )
    parser.epilog = f"{steps}\n\n{OVERRIDES}\n\n{EXIT_CODES}"
    parser.subcommands = list(subparsers.choices)
    return parser
