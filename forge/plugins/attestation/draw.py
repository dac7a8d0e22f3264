"""Draw of the intervals of a run to retrain, with the results so far."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from forge.attestation import verify
from forge.attestation.verify import VerificationError
from forge.checkpoint.checkpoints import SavedCheckpoint
from forge.core import events
from forge.core.errors import DataError, ForgeError, UnfitError
from forge.core.files import atomic_open
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.plugins.attestation.certificate import Reproduction, Retrained, write_certificate
from forge.plugins.attestation.intervals import Coverage, Interval, coverage, drawn
from forge.plugins.attestation.judgement import TOLERANCE
from forge.plugins.attestation.recipe_of_program import ProgramRecipe
from forge.plugins.attestation.recipe_of_trainer import TrainerRecipe
from forge.plugins.attestation.reproduce_options import ReproduceOptions
from forge.plugins.attestation.reproduce_output import print_not_drawn
from forge.plugins.attestation.retrain import Recipe, Retrainer
from forge.reporting.find_runs import results_folder

SLOWER = 2  # than the run was: an interval that took half of --minutes there has a good chance here
NOT_YET = "the command ended before"  # of an interval whose turn did not come


def recipe_of(request: ReproduceOptions, statement: bytes) -> Recipe[Any]:
    """The recipe of the run of a statement. Raises VerificationError, and as `ProgramRecipe.of`."""
    links = verify.check_chain(verify.read_statement(statement))
    return ProgramRecipe.of(request, links) if "program" in links else TrainerRecipe(links)


@dataclass
class Draw:
    """The intervals that were drawn, and what is known of them until now."""

    request: ReproduceOptions
    statement: bytes
    key: Any
    recipe: Recipe[Any]
    covers: Coverage[Any]
    seed: int
    chosen: list[Interval[Any]]
    results: list[Retrained] = field(default_factory=list)
    differences: dict[str, None] = field(default_factory=dict)  # of all intervals, each once
    last: SavedCheckpoint | None = None  # that was made
    export: Literal["same", "other", "unchecked"] = "unchecked"
    is_complete: bool = False  # all intervals had their turn, the export too
    trouble: ForgeError | None = None  # the first

    @classmethod
    def of(cls, request: ReproduceOptions, statement: bytes, key: Any, recipe: Recipe[Any]) -> Draw:
        """Raises DataError where nothing can be retrained. recipe: of the statement."""
        links = recipe.links
        # A checkpoint that is named is tried in the time that there is.
        most_sec = math.inf if request.checkpoint else 60 * request.minutes / SLOWER
        runs = [recipe.checkpoints(run) for run in _runs(request)]
        covers = coverage(links, runs, most_sec, never_made_again=recipe.never_made_again)
        if covers.too_long and not request.whole:
            print_not_drawn(covers, links)
        seed = secrets.randbits(32) if request.seed is None else request.seed
        chosen = _chosen(request, covers, seed, recipe.never_made_again)
        return cls(request, statement, key, recipe, covers, seed, chosen)

    def add(self, interval: Interval[Any], trainer: Retrainer[Any]) -> None:
        """Train an interval again. What keeps this one from that does not keep others, but for a
        checkpoint that was removed meanwhile: DataError."""
        try:
            made = trainer.train(interval)
            result = self.recipe.judged(interval, made)
            differences = self.recipe.differences(interval, made)
        except FileNotFoundError as err:  # a certificate could not name it any more
            raise _pruned(err) from None
        except (ForgeError, VerificationError) as err:
            if isinstance(err, VerificationError):
                err = DataError(str(err))
            self.trouble = self.trouble or err
            self.results.append(Retrained.unchecked(interval, err.what.splitlines()[0]))
        else:
            self.last = made
            self.differences |= dict.fromkeys(differences)
            self.results.append(result)

    @property
    def trained(self) -> list[Interval[Any]]:
        pairs = zip(self.chosen, self.results, strict=False)  # which are fewer while it trains
        return [interval for interval, one in pairs if not one.is_unchecked]

    @property
    def parts_checked(self) -> int:
        """Parts of the run in the intervals that were retrained."""
        return self.covers.parts_in(self.trained)

    @property
    def result(self) -> Literal["reproduced", "not reproduced", "incomplete"]:
        """One difference outweighs all that could not be checked."""
        if self.export == "other" or any(one.is_other for one in self.results):
            return "not reproduced"
        is_all = self.is_complete and not any(one.is_unchecked for one in self.results)
        return "reproduced" if is_all else "incomplete"

    @property
    def made(self) -> Reproduction:
        """The predicate of the certificate, once an interval was trained."""
        assert self.last is not None
        request, covers, trained = self.request, self.covers, self.trained
        waiting = self.chosen[len(self.results) :]
        not_yet = [Retrained.unchecked(one, NOT_YET) for one in waiting]
        coverable = self.chosen if request.whole else covers.intervals
        return Reproduction(
            statement=verify.read_statement(self.statement)["predicate"]["sha256"],
            result=self.result,
            seed=self.seed if request.is_drawn else None,
            steps=covers.steps,
            steps_coverable=_steps(coverable),
            steps_checked=_steps(trained),
            parts=len(covers.saved),
            parts_coverable=covers.parts_in(coverable),
            texts="made again" if request.texts else "by digest",
            export=self.export,
            tolerance=TOLERANCE,
            differences=[*self.differences],
            by=self.recipe.by(self.last, _machine(request)),
            intervals=self.results + not_yet,
        )

    def write(self) -> str:
        """Write the certificate, for a checkpoint that was named also its statement; the digest of the
        certificate."""
        if self.request.checkpoint:
            with atomic_open(self.request.statement_copy, "wb") as file:
                file.write(self.statement)
        return write_certificate(self.request.certificate, self.made, self.statement, self.key)


def _machine(request: ReproduceOptions) -> Literal["another", "the same", "unknown"]:
    """Compare this machine with those that trained the run; unknown without the run's event log."""
    there = (
        events.trained_nodes(RunPaths(request.checkpoints).events) if request.checkpoints else ()
    )
    if not there:
        return "unknown"
    here = {hostname(), os.environ.get("SLURMD_NODENAME")}
    return "the same" if here & there else "another"


def _runs(request: ReproduceOptions) -> list[RunPaths]:
    if request.checkpoints:
        return [RunPaths(request.checkpoints)]
    return [RunPaths(path.parent) for path in sorted(results_folder().glob("*/checkpoints"))]


def _chosen(
    request: ReproduceOptions,
    covers: Coverage[Any],
    seed: int,
    never_made_again: Collection[int],
) -> list[Interval[Any]]:
    """The intervals to train. VerificationError, DataError or UnfitError where there is none."""
    if request.whole:
        if not covers.can_start:
            raise VerificationError(
                f"its run began at step {covers.first} from another run, or from pretrained weights,"
                " which are not retrained: leave --whole out"
            )
        return [Interval(0, covers.last, None, covers.exported)]
    if request.checkpoint:
        return _named(request, covers)
    if covers.too_long and not covers.intervals:
        raise UnfitError(
            f"none of the {len(covers.saved)} parts of the run can be retrained in"
            f" {request.minutes:g} minutes",
            cause="checkpoints that are here are too far apart; a smaller train.keep_every keeps more",
            fix="give more time: --minutes N; in the workflow runtime in set-resources of reproduce_run",
        )
    place = request.checkpoints or results_folder()
    if not covers.intervals and covers.exported and covers.last in never_made_again:
        raise DataError(
            f"none of the {len(covers.saved)} parts of the run can be retrained: the checkpoints of the"
            f" statement that are in {place} are of steps at which launches ended, such as {covers.last}",
            cause="a program that is asked to stop saves there, and not when it trains again",
            fix="train it on to a checkpoint that it saves by itself, and export that one",
        )
    if not covers.intervals:
        raise DataError(
            f"none of the {len(covers.saved)} parts of the run can be retrained: no checkpoint that"
            f" the statement lists is in {place}",
            cause="they were pruned (train.keep_every keeps some, of a program a larger keep_last), or"
            " they are elsewhere",
            fix="name the directory of the run: --checkpoints RUN; or train all of it: --whole",
        )
    return drawn(covers.intervals, request.intervals, seed)


def _named(request: ReproduceOptions, covers: Coverage[Any]) -> list[Interval[Any]]:
    """The interval that ends with the checkpoint that the user has named."""
    if interval := [one for one in covers.intervals if one.last == covers.last]:
        return interval
    raise DataError(
        f"the steps up to {request.checkpoint} cannot be retrained: no checkpoint before it is there",
        cause="they were pruned, and the run began from another run or from pretrained weights",
        fix="train.keep_every keeps some, a larger train.keep_last more of the newest",
    )


def _pruned(err: FileNotFoundError) -> DataError:
    return DataError(
        f"{err.filename} was removed while it was read",
        cause="the run is training and keeps only its newest checkpoints",
        fix="train.keep_every keeps some, a larger train.keep_last more of the newest",
    )


def _steps(intervals: Iterable[Interval[Any]]) -> int:
    return sum(one.last - one.first for one in intervals)
