"""`forge key`, `forge verify` and `forge reproduce`, and the options of `forge export` that are about its
statement."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.attestation.verify import path_option, sha256_option
from forge.commands.subcommands import Subcommands, its_config_option

INTERVALS = 3  # that `forge reproduce` draws


def add_attestation(subcommands: Subcommands) -> None:
    """Add the subcommands that prove what a model is."""
    key = subcommands.plain("key", _key, "make a key that signs exports", keys=False)
    key.add_argument(
        "file", metavar="FILE", type=path_option, help="private key to write; also FILE.pub"
    )
    _verify_options(
        subcommands.plain(
            "verify", _verify, "verify an export by the statement that it comes with", keys=False
        )
    )
    _reproduce_options(
        subcommands.logged(
            "reproduce",
            _reproduce,
            "retrain parts of the run of an export, and certify how they ended",
            keys=False,
        )
    )


def export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forge export` for its statement."""
    option = parser.add_argument
    option(
        "--sign", metavar="KEY", type=path_option, help="sign the statement with this private key"
    )
    option(
        "--full",
        action="store_true",
        help="a statement with installed packages, times of the clock and full paths, too",
    )


def attest(options: argparse.Namespace) -> Callable[[Path, Any, str | None], None]:
    """Function that writes the statement of an export, signed where there is a key; as
    `hooks.export_steps`."""
    key = None
    if options.sign:
        from forge.plugins.attestation.signing import load_key

        key = load_key(options.sign)

    def write(folder: Path, saved: Any, dtype: str | None) -> None:
        from forge.hosts.lock import lock
        from forge.plugins.attestation.statement import refuse_planted, write_statement

        expected = refuse_planted(folder, saved, dtype) if key and dtype else None
        with lock(folder.parent, "export", name=f".{folder.name}.lock"):
            write_statement(folder, saved, is_full=options.full)
            if key:
                from forge.plugins.attestation.signing import sign

                sign(folder, key, expected)

    return write


def _texts_option(text: str) -> str:
    """A name of texts, never empty: with an empty one nothing would be compared."""
    return str(path_option(text))


def _statement_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """folder: what to say of it."""
    option = parser.add_argument
    option("folder", metavar="FOLDER", type=path_option, help=folder)
    option("--key", metavar="FILE", type=path_option, help="public key of the author, in PEM")
    option(
        "--digest",
        metavar="SHA256",
        type=sha256_option,
        help="that the statement must have, as a paper prints it",
    )


def _reproduce_options(parser: argparse.ArgumentParser) -> None:
    _statement_options(
        parser,
        "directory of the export, of a run, whose last one is taken, or of a checkpoint of a run, up to"
        " which the steps since the checkpoint before are retrained",
    )
    its_config_option(parser)
    option = parser.add_argument
    option(
        "--data",
        metavar="TEXTS",
        type=_texts_option,
        help="make the tokens again from the text files in this directory (or python:stdlib;"
        " default: the project's tokens, if they are those of the statement)",
    )
    option(
        "--checkpoints",
        metavar="RUN",
        type=path_option,
        help="directory of the run whose checkpoints to use (default: FOLDER, if that is one; else any)",
    )
    option("--intervals", type=int, metavar="K", help=f"how many to draw (default: {INTERVALS})")
    option("--seed", type=int, metavar="N", help="of the draw (default: chosen now, and recorded)")
    option("--whole", action="store_true", help="retrain all steps instead, from the first on")
    option(
        "--code",
        metavar="CHECKOUT",
        type=path_option,
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
        type=path_option,
        help="the certificate (default: FOLDER.certificate.json beside the directory; of a checkpoint"
        " certificates/step-….json in the run)",
    )
    option(
        "--sign", metavar="KEY", type=path_option, help="sign the certificate with this private key"
    )
    option(
        "--trust-program",
        action="store_true",
        help="run another training program than Forge's own: that of the project's config of the run, or"
        " of --config, where it is the one of the statement; it loads the run's checkpoints, whose"
        " pickles are code",
    )


def _verify_options(parser: argparse.ArgumentParser) -> None:
    _statement_options(parser, "directory of the export")
    option = parser.add_argument
    option(
        "--data",
        metavar="TEXTS",
        type=_texts_option,
        help="also make the tokens again from the text files in this directory (or python:stdlib)",
    )
    option(
        "--keep",
        metavar="DIR",
        type=path_option,
        help="with --data: a new directory for the tokenizer and the tokens, for forge samples",
    )
    option(
        "--checkpoints",
        metavar="RUN",
        type=path_option,
        help="also compare the checkpoints in this directory of a run with the statement",
    )
    option(
        "--certificate",
        metavar="FILE",
        type=path_option,
        help="also check this one of forge reproduce",
    )
    option(
        "--certifier", metavar="FILE", type=path_option, help="public key of who certifies, in PEM"
    )


def _key(options: argparse.Namespace) -> None:
    from forge.plugins.attestation.signing import make_key

    make_key(options.file)


def _verify(options: argparse.Namespace) -> None:
    from forge.plugins.attestation.verify_run import verify_export

    verify_export(
        options.folder,
        options.key,
        options.digest,
        texts=options.data,
        keep=options.keep,
        checkpoints=options.checkpoints,
        certificate=options.certificate,
        certifier=options.certifier,
    )


def _reproduce(options: argparse.Namespace) -> None:
    from forge.plugins.attestation.reproduce import find_export, reproduce
    from forge.plugins.attestation.reproduce_checkpoint import (
        reproduce_checkpoint,
        run_of_checkpoint,
    )

    if run := run_of_checkpoint(options.folder):
        _refuse_of_exports(options)
        reproduce_checkpoint(_options(options, options.folder, run), run)
        return
    folder, of_run = find_export(options.folder)
    reproduce(_options(options, folder, of_run))


def _refuse_of_exports(options: argparse.Namespace) -> None:
    """ConfigError for options that say something of an export, where a checkpoint was named."""
    from forge.core.errors import ConfigError

    names = ("key", "digest", "checkpoints", "intervals", "seed", "whole")
    values = {name: getattr(options, name) for name in names}  # --seed=0 is one
    given = [f"--{n}" for n, value in values.items() if value is not None and value is not False]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: not for a checkpoint, {options.folder}",
            cause="the steps up to it since the checkpoint before are retrained: nothing is drawn",
            fix="leave it out, or name an export or a run",
        )


def _options(options: argparse.Namespace, folder: Path, run: Any) -> Any:
    """run: whose directory, or checkpoint, the user has named; None for an export."""
    from forge.core.paths import RunPaths
    from forge.plugins.attestation.reproduce_options import ReproduceOptions
    from forge.reporting.trusted import trusted_data

    data = trusted_data(run or RunPaths(folder), options.its_config, writes=bool(run))
    return ReproduceOptions(
        folder=folder,
        data=Path(data),
        run=run,
        texts=options.data,
        checkpoints=options.checkpoints or (run.root if run else None),
        intervals=INTERVALS if options.intervals is None else options.intervals,
        whole=options.whole,
        seed=options.seed,
        code=options.code,
        minutes=options.minutes,
        key=options.key,
        digest=options.digest,
        to=options.to,
        sign=options.sign,
        trust_program=options.trust_program,
        config=options.its_config,
    )
