"""The batch step of a run's job: `python -m forge.batch_step FILE` stages, checks the nodes and trains.

Does for the three rules of an allocation what Snakemake in the job would do: removes their outputs,
runs their commands, and ends with the first that fails. Each runs in a fork of this process, which has
imported what all of them need; a Snakemake and a Python for each took 3 s of every start of a job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from forge import cli
from forge.core.errors import Exit, ForgeError
from forge.core.terminal import say
from forge.flow.batch_steps import BatchStep, BatchSteps
from forge.flow.workflow_command import prepare_environment
from forge.slurm import slurm

POLL_SEC = 0.2
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main() -> int:
    """Exit code of the job."""
    cli.in_utf8()
    try:
        plan = BatchSteps.read(Path(sys.argv[1]))
    except ForgeError as err:
        say(f"forge: {err}")
        return int(err.code)
    os.chdir(plan.folder)
    prepare_environment()
    _import_commands()
    commands = Commands()
    for step in plan.steps:
        if commands.received:
            return Exit.STOPPED
        # It would remove outputs of the later start, which has the run.
        if slurm.is_superseded():
            return Exit.UNFIT
        missing = _prepare(step, plan.wait_sec)
        if not missing:
            say(f"{step.name}: started")
            code = commands.run(step)
            if code is None:  # the fork
                return cli.main()
            missing = [] if code else _absent(step.outputs, plan.wait_sec)
        if missing:
            say(f"{step.name}: there is no {', '.join(missing)}")
            code = Exit.UNFIT
        if code:
            # Outputs stay where Slurm does not answer: they are complete or absent.
            if slurm.is_superseded() is False:
                _remove(step)
            return code
        say(f"{step.name}: done")
    return Exit.DONE


def _import_commands() -> None:
    """Import what the commands import, before the forks."""
    import forge.preflight.preflight
    import forge.run.train
    import forge.staging.stage  # noqa: F401


def _prepare(step: BatchStep, wait_sec: float) -> list[str]:
    """Remove outputs, and make directories; inputs that are missing."""
    _remove(step)
    for path in (*step.outputs, *step.logs):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return _absent(step.inputs, wait_sec)


def _remove(step: BatchStep) -> None:
    for path in step.outputs:
        Path(path).unlink(missing_ok=True)


def _absent(paths: list[str], wait_sec: float) -> list[str]:
    """Files that do not come within this time."""
    end = time.monotonic() + wait_sec
    while absent := [path for path in paths if not Path(path).exists()]:
        if time.monotonic() > end:
            return absent
        time.sleep(POLL_SEC)
    return []


class Commands:
    """Forks that run the commands one after the other, and get the signals of this process."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._pid = 0
        self._before = {number: signal.signal(number, self._pass_on) for number in STOPS}

    def _pass_on(self, number: int, _: object) -> None:
        self.received.append(number)
        if self._pid:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._pid, number)

    def run(self, step: BatchStep) -> int | None:
        """Run the command of a step; its exit code. None in the fork, which is to run it."""
        # Until the fork is known here, and has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self._pid = os.fork()
        if not self._pid:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            sys.argv = ["forge", *step.arguments]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if not self._pid:
            return None
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
