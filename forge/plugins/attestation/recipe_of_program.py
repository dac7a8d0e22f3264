"""Recipe that retrains a run of another training program: by the user's own config of that run.

The statement has the program's command, and a statement may be a stranger's: it is only compared with the
command of the config in the project, or of the one that --config names, and that one is run.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from forge.attestation import verify
from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint.export_folder import MANIFEST as EXPORT_MANIFEST
from forge.checkpoint.sealed import ProgramCheckpoints, SealedCheckpoint
from forge.core.config import RUN_NAME, ResolvedConfig
from forge.core.errors import ConfigError, DataError, ForgeError
from forge.core.files import digest_file
from forge.core.paths import MANIFEST, RunPaths, inputs_folder
from forge.core.provenance import cpu_name
from forge.core.values import shown
from forge.data.content_ids import resolve_ids
from forge.data.inputs import InputSet, source_digest
from forge.plugins.attestation.certificate import MadeBy, Retrained
from forge.plugins.attestation.chain import ProgramUsed
from forge.plugins.attestation.intervals import Interval
from forge.plugins.attestation.judgement import code_differences, judged_program
from forge.plugins.attestation.reduce import without_folders
from forge.plugins.attestation.reproduce_options import ReproduceOptions
from forge.plugins.attestation.retrain import RUN, Retrainer
from forge.reporting.find_runs import results_folder
from forge.reporting.trusted import trusted
from forge.run.other_program import OtherProgram
from forge.run.programs import program_of

LOOK_SEC = 0.5  # between two looks for the checkpoint at the end of an interval
# By which the program trains and saves; the other keys say how Forge treats it.
OF_TRAINING = ("command", "resume", "goal", "checkpoints")


@dataclass(frozen=True)
class ProgramRecipe:
    """The recipe of a program. links: of the statement. own: the program of the user's config of that
    run. cwd: the project's directory."""

    links: Links
    own: OtherProgram
    cwd: Path

    @classmethod
    def of(cls, request: ReproduceOptions, links: Links) -> ProgramRecipe:
        """Raises VerificationError without --trust-program, ConfigError where the user's config has no
        such run, or one of another program, DataError where its input files are gone."""
        if not request.trust_program:
            raise VerificationError(
                "it is of another training program, and nothing was run: --trust-program runs the one in"
                " the project's config of that run, or in the config that --config names"
            )
        if request.texts:
            raise ConfigError(
                f"--data={request.texts} is for runs of Forge's own trainer, and {request.named} is of"
                " another program",
                cause="a program reads its inputs where its config names them",
                fix="leave it out",
            )
        here = Path.cwd()
        # Python takes modules of the directory in which the program runs first.
        if (
            request.code
            and (here / "forge/__init__.py").is_file()
            and not here.samefile(request.code)
        ):
            raise ConfigError(
                f"--code={request.code} has no effect here: the program runs in {here}, which has a"
                " forge/ of its own",
                fix="give the command in that checkout, or leave --code out",
            )
        recipe = cls(links, _program_of_user(request, links), here)
        recipe.refuse_other_program()
        return recipe

    def refuse_other_program(self) -> None:
        """ConfigError where the user's program is not that of the statement."""
        stated, config = _stated(self.links), self.links["config"]
        values = config.get("values") or config.get("without_folders")
        section = values.get("program") if isinstance(values, dict) else None
        recorded = section if isinstance(section, dict) else {"command": stated.command}
        ours = self.own.program.model_dump(mode="json", by_alias=True)
        pairs = [(key, recorded[key], ours[key]) for key in OF_TRAINING if key in recorded]
        pairs.append(("command", stated.command, ours["command"]))
        pairs.append(("source", _digest(stated.source), self._source_digest()))
        for key, then, now in pairs:
            if then not in (now, without_folders(now)):
                raise ConfigError(
                    f"program.{key} of the statement is {shown(then)}, and in your config {shown(now)}",
                    cause="the program was changed after the run, or this is the config of another run",
                    fix="check out what trained the run, or name its config: --config FILE",
                )

    def _source_digest(self) -> str:
        program, outputs = self.own.program, (self.own.config.results, self.own.config.data)
        return source_digest(program.folder, outputs) if program.source else ""

    # --- what there is to retrain ---

    def checkpoints(self, run: RunPaths) -> ProgramCheckpoints:
        return replace(self.own, paths=run).checkpoints

    @property
    def never_made_again(self) -> frozenset[int]:
        """A program that is asked to stop saves at that step, and passes it when it trains again."""
        launches = part(self.links["launches"], "launches", list)
        stopped = [one for one in launches if part(one, "outcome", str) != "completed"]
        return frozenset(part(one, "last_step", int) for one in stopped)

    def prepare_data(self, request: ReproduceOptions, scratch: Path) -> Path:
        """The files are the program's inputs, all digests of which are compared."""
        data, inputs_id = self.own.data, self.own.config.ids.inputs
        digest = ""
        if inputs_id:
            folder = inputs_folder(data, inputs_id)
            if not (folder / MANIFEST).is_file():
                raise ConfigError(
                    f"{folder} has no list of the program's input files",
                    cause="they were not digested, or downloaded, in this project",
                    fix="forge inputs CONFIG, with the config of the run",
                )
            inputs = InputSet.open(folder)
            inputs.verify()
            digest = inputs.digest
        stated = _digest(_stated(self.links).inputs)
        if digest != stated:
            raise VerificationError(
                f"its program read input files of digest {stated[:12] or 'none'}, those of your config"
                f" have {digest[:12] or 'none'}"
            )
        return data

    # --- retraining an interval ---

    def config(
        self, interval: Interval[SealedCheckpoint], data: Path, place: Path
    ) -> ResolvedConfig:
        """The user's, which keeps every checkpoint. Its goal stays: a schedule may end there."""
        program = self.own.program.model_copy(update={"keep_last": None})
        places = {"run": RUN, "results": str(place), "data": str(data)}
        return self.own.config.model_copy(update={**places, "program": program})

    def check(self, config: ResolvedConfig, interval: Interval[SealedCheckpoint]) -> None:
        if interval.end is None:
            return
        made_by, stated = interval.end.manifest.lineage, _stated(self.links)
        same_source = _digest(made_by.source) == _digest(stated.source)
        same_command = stated.command in (made_by.command, without_folders(made_by.command))
        if not same_command or not same_source:
            raise VerificationError(
                f"step {interval.last} was saved by another"
                f" {'command' if same_source else 'version of the program'} than the statement's"
            )

    def num_bytes(self, config: ResolvedConfig, ranks: int) -> float:
        return 0.0

    def threads(self, interval: Interval[SealedCheckpoint]) -> None:
        return None

    def copy(self, checkpoint: SealedCheckpoint, paths: RunPaths) -> None:
        target = paths.checkpoints / checkpoint.folder.name
        for name in checkpoint.manifest.files:
            copy = target / name if name else target
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / name if name else checkpoint.folder, copy)
        checkpoint.manifest.write(self.checkpoints(paths).seal_of(target))

    @contextmanager
    def stopped_at_end(
        self, config: ResolvedConfig, interval: Interval[SealedCheckpoint]
    ) -> Iterator[None]:
        if interval.last >= config.goal:
            yield
            return
        paths, ended = RunPaths.of(config), threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_SEC):
                with suppress(ForgeError, OSError):  # looked at again
                    if max(self.checkpoints(paths).by_step(), default=0) >= interval.last:
                        paths.stop.touch()
                        return

        thread = threading.Thread(target=watch, name="end of interval", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def made(
        self, config: ResolvedConfig, interval: Interval[SealedCheckpoint]
    ) -> SealedCheckpoint:
        checkpoints = self.checkpoints(RunPaths.of(config))
        there = checkpoints.by_step()
        if folder := there.get(interval.last):
            return checkpoints.open_complete(folder)
        others = ", ".join(str(step) for step in there if step > interval.first)
        raise DataError(
            f"the program saved no checkpoint of step {interval.last} again, but of {others or 'none'}",
            cause="it saves by the clock, or saved there because it was asked to stop",
            fix="draw other intervals: --seed N",
        )

    # --- what became of it ---

    def judged(self, interval: Interval[SealedCheckpoint], made: SealedCheckpoint) -> Retrained:
        return judged_program(interval, made, self.links)

    def different_files(
        self, folder: Path, checkpoint: SealedCheckpoint, trainer: Retrainer[SealedCheckpoint]
    ) -> list[str]:
        """By digests: the files of such an export are copies."""
        own = checkpoint.folder.name  # of a checkpoint that is a file
        digests = {name or own: file.digest for name, file in checkpoint.manifest.files.items()}
        names = {*verify.files_in(folder, of_git=True)} - {*verify.OURS, EXPORT_MANIFEST}
        wrong = [n for n in sorted(names) if digests.get(n) != digest_file(folder / n)]
        return wrong if names else ["no file of the checkpoint"]

    def differences(
        self, interval: Interval[SealedCheckpoint], made: SealedCheckpoint
    ) -> list[str]:
        return [*code_differences(self.links, made.manifest.lineage.code)]

    def by(
        self, made: SealedCheckpoint, machine: Literal["another", "the same", "unknown"]
    ) -> MadeBy:
        code = made.manifest.lineage.code
        return MadeBy(code=code, versions=None, cpu=cpu_name(), numerics=None, machine=machine)


def _program_of_user(request: ReproduceOptions, links: Links) -> OtherProgram:
    """The program in the project's config, or in --config, for the run of the statement."""
    name = part(links["export"], "run", str)
    if not re.fullmatch(RUN_NAME, name):
        raise VerificationError(f"it is of a run {name!r:.80}, which is no name of a run")
    run = request.run or RunPaths(request.checkpoints or results_folder() / name)
    accepted = trusted(run, request.config, {}, writes=False)
    own = program_of(accepted.config)
    if not accepted.is_ours or not isinstance(own, OtherProgram):
        raise ConfigError(
            f"--trust-program runs the program of your own config, which has none for the run {name}",
            cause="this is not the project of that run, or its config was changed since",
            fix="name the config of that run: --config FILE",
        )
    if own.config.ids.inputs or not own.program.inputs:
        return own
    return replace(own, config=own.config.model_copy(update={"ids": resolve_ids(own.config)}))


def _stated(links: Links) -> ProgramUsed:
    try:
        return ProgramUsed.model_validate(links["program"])
    except ValidationError:
        raise VerificationError("its link `program` is not as Forge writes it") from None


def _digest(artifact: Any) -> str:
    return artifact.digest if artifact else ""
