"""`forge reproduce`: retrain parts of a run by the statement of its export, and certify the result.

Nothing is fetched, installed or run because a statement names it. Trained is what it has of numbers and
names of choices; code is the installed Forge, or a checkout that the user names. Another program is run
where the user trusts it, and by the user's own config.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from forge.attestation import verify
from forge.attestation.verify import MOST_NAMED, VerificationError
from forge.checkpoint.manifest import Code
from forge.core.errors import DataError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.provenance import code
from forge.core.records import Exported
from forge.core.scratch import scratch_directory
from forge.core.terminal import say, show
from forge.plugins.attestation.certificate import envelope_path
from forge.plugins.attestation.draw import Draw, recipe_of
from forge.plugins.attestation.judgement import code_differences
from forge.plugins.attestation.places import REPRODUCED
from forge.plugins.attestation.records import Reproduced
from forge.plugins.attestation.reproduce_options import ReproduceOptions, check
from forge.plugins.attestation.reproduce_output import (
    MACHINES,
    print_interval,
    print_notes,
    print_summary,
)
from forge.plugins.attestation.retrain import Recipe, Retrainer


def find_export(named: Path) -> tuple[Path, RunPaths | None]:
    """The directory of an export, and its run where a user has named the directory of that instead.
    Raises DataError where the record of the run's last export is corrupt."""
    run = RunPaths(named)
    if (named / verify.STATEMENT).exists() or not run.exported.is_file():
        return named, None
    return named / Exported.read(run.exported).folder, run


def reproduce(request: ReproduceOptions) -> None:
    """Verify an export, retrain parts of its run, and write the certificate; for a run also
    reproduced.json, if the result is that.

    The certificate is renewed after each interval, so that no end of this process loses what was trained.
    Raises DataError where the export fails its verification, or is not reproduced; ConfigError for what
    the user names; UnfitError where this machine is too small or too slow, also for one interval.
    """
    refuse_bad(retrained(request))


def retrained(request: ReproduceOptions) -> Draw:
    """Retrain and write as `reproduce` does, but return the draw also where the result is bad."""
    check(request)
    key = _signing_key(request)
    try:
        # Read once: another statement may be put in its place while files are verified.
        statement = verify.read_bytes(request.folder / verify.STATEMENT)
        links = verify.verify(
            request.folder, request.key, request.digest, show, statement_bytes=statement
        )
        if "merge" in links:
            raise VerificationError(
                "it is a merge of checkpoints, which is not retrained: `forge verify --checkpoints RUN`"
                " computes it again, and exports of its checkpoints can be reproduced"
            )
        recipe = recipe_of(request, statement)
        if request.run:  # nothing is refused any more
            with disk_trouble(request.run.root / REPRODUCED):
                (request.run.root / REPRODUCED).unlink(missing_ok=True)
        with (
            stopped_by_sigterm(),
            scratch_directory("reproduce") as scratch,
        ):
            draw = Draw.of(request, statement, key, recipe)
            _retrain(draw, scratch)
            _certify(draw)
    except VerificationError as err:
        raise DataError(f"{request.named}: {err}") from None
    return draw


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, of Slurm or as Snakemake ends, stops the training and removes its files as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse_bad(draw: Draw) -> None:
    """Raise what keeps the result from being `reproduced`."""
    folder, failed = draw.request.named, [one for one in draw.results if one.is_unchecked]
    if draw.result == "not reproduced":
        wrong = [f"steps {one.first + 1} to {one.last}" for one in draw.results if one.is_other]
        wrong += ["the files of the export"] * (draw.export == "other")
        raise DataError(
            f"{folder} is not reproduced: {', '.join(wrong)}",
            cause="made otherwise than the statement says, by a faulty node on one of both sides, or by"
            " other code (the notes name it)",
            fix="where code differs, --code CHECKOUT trains by that of the statement's commit",
        )
    if err := draw.trouble:
        raise type(err)(
            f"{folder}: {len(failed)} of {len(draw.chosen)} intervals could not be retrained:"
            f" {err.what}",
            cause=err.cause,
            fix=err.fix,
        )


def _signing_key(request: ReproduceOptions) -> Any:
    if not request.sign:
        return None
    from forge.plugins.attestation.signing import load_key

    return load_key(request.sign)


def _retrain(draw: Draw, scratch: Path) -> None:
    """Train what was drawn, and renew the certificate after each interval. Raises the first error where
    nothing of it could be trained."""
    request = draw.request
    trainer = _trainer(request, draw.recipe, scratch)
    if not request.code:  # said before hours of training; that of a checkout is known afterwards
        print_notes(code_differences(draw.recipe.links, Code(**code())))
    try:
        for interval in draw.chosen:
            draw.add(interval, trainer)
            print_interval(draw.results[-1])
            if draw.last:
                draw.write()
        if draw.last is None:
            assert draw.trouble is not None
            raise draw.trouble
        # Of a checkpoint that was named the export was made just now.
        draw.export = "same" if request.checkpoint else _compared_export(draw, trainer)
    except KeyboardInterrupt:
        if draw.last:
            again = f"; --seed={draw.seed} draws the same" if request.is_drawn else ""
            say(f"{request.certificate} has what was trained so far{again}")
        raise
    draw.is_complete = True


def _certify(draw: Draw) -> None:
    """Print what is known in the end, write the certificate, and record a positive one of a run."""
    request, made = draw.request, draw.made
    known = (
        [] if request.code else [*code_differences(draw.recipe.links, made.by.code)]
    )  # printed before
    print_notes(note for note in made.differences if note not in known)
    print_notes(MACHINES[made.by.machine])
    print_summary(made, draw.parts_checked)
    digest = draw.write()
    say(f"certificate {digest[:12]}: {request.certificate}")
    if draw.key:
        from forge.plugins.attestation.signing import fingerprint

        say(f"signed by {fingerprint(draw.key)}: {envelope_path(request.certificate)}")
    if request.run and draw.result == "reproduced":
        _record(draw, request.run, digest)


def _record(draw: Draw, run: RunPaths, certificate: str) -> None:
    """Write reproduced.json. certificate: its digest."""
    made = draw.made
    Reproduced(
        step=draw.covers.last,
        statement=made.statement,
        certificate=certificate,
        file=os.path.relpath(draw.request.certificate, run.root),
        steps=made.steps,
        steps_checked=made.steps_checked,
    ).write(run.root / REPRODUCED)


def _trainer(request: ReproduceOptions, recipe: Recipe[Any], scratch: Path) -> Retrainer[Any]:
    data = recipe.prepare_data(request, scratch)
    place = scratch / "training"
    place.mkdir()
    code_folder = request.code.resolve() if request.code else None
    return Retrainer(recipe, data.resolve(), place, code_folder, request.minutes)


def _compared_export(draw: Draw, trainer: Retrainer[Any]) -> Literal["same", "other", "unchecked"]:
    """Compare the files of the export with those of the exported checkpoint, which is at hand, or was
    made again just now; `unchecked` without it."""
    covers, result = draw.covers, draw.results[-1]
    is_made = result.last == covers.last and result.outcome == "bitwise"
    checkpoint = covers.exported or (draw.last if is_made else None)
    if checkpoint is None:
        show(f"  note  export: the checkpoint of step {covers.last} is not here, files unchecked")
        return "unchecked"
    if wrong := draw.recipe.different_files(draw.request.folder, checkpoint, trainer):
        names = verify.printable(
            f"{', '.join(wrong[:MOST_NAMED])}{' …' * (len(wrong) > MOST_NAMED)}"
        )
        show(f"  FAIL  export: not as step {covers.last} gives them: {names}")
        return "other"
    show(f"  ok    export: its files are those of step {covers.last}")
    return "same"
