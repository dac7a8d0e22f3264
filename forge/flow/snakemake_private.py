"""Changes that Forge makes inside of Snakemake (9.27). No other module reaches for what Snakemake does
not document; tests/unit/test_snakemake_private.py fails where a release has it otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forge.core.errors import Exit

# Exit statuses of a process that Ctrl-C has ended, by itself and as a shell reports it.
_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)
_STOPPING = b"already stopping: waiting for the jobs to end\n"


def refusal(message: str) -> Exception:
    """The error with which Snakemake ends for a user's mistake: the message alone. To a WorkflowError
    from these files Snakemake adds where in them that was raised, as lines of a traceback."""
    from snakemake.exceptions import WorkflowError

    class Refusal(WorkflowError):
        # Some context managers set it.
        __traceback__ = property(lambda _: None, lambda *_: None)

    return Refusal(message)


def targets_of(workflow: Any) -> list[str]:
    """The rules that make no file themselves, in the order of the rule files."""
    return [rule.name for rule in workflow.rules if not rule.output]


def unknown_targets(workflow: Any, names: Iterable[str]) -> list[str]:
    """Return the targets that are no rule, that no rule makes, and that do not exist."""
    rules = list(workflow.rules)
    known = {rule.name for rule in rules}
    return [
        name
        for name in names
        if name not in known
        and not os.path.lexists(name)
        and not any(rule.is_producer(name) for rule in rules)
    ]


def end_at_sigterm() -> None:
    """Let SIGTERM end Snakemake whatever its main thread does; before its scheduler is made.

    Its handler takes a lock in the main thread. Where that holds the lock already, as while it chooses
    jobs to start, up to 10 s with the solver of the default scheduler, Snakemake would wait for ever. A
    thread of its own waits until the lock is free.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    handler = JobScheduler.exit_gracefully

    def in_a_thread(scheduler: JobScheduler, *_: Any) -> None:
        threading.Thread(target=handler, args=(scheduler,), daemon=True).start()

    JobScheduler.exit_gracefully = in_a_thread


def end_where(is_superseded: Callable[[], bool | None]) -> None:
    """Let the Snakemake in a job end at once where a later start of the job has the run, before it
    touches files: it would remove outputs of a rule before that rule, and after it has failed.

    is_superseded: None where that is not known. Then a rule begins, and after a failure outputs stay:
    those of Forge's rules are complete or absent.
    """
    from snakemake.jobs import Job

    prepare, cleanup = Job.prepare, Job.cleanup

    async def prepare_own(job: Job) -> None:
        if is_superseded():
            os._exit(Exit.UNFIT)
        await prepare(job)

    async def cleanup_own(job: Job, skip_outputs: Any) -> None:
        if is_superseded() is not False:
            os._exit(Exit.UNFIT)
        await cleanup(job, skip_outputs)

    Job.prepare, Job.cleanup = prepare_own, cleanup_own


@contextmanager
def quiet_stops() -> Iterator[None]:
    """End with Exit.STOPPED, without errors of Snakemake, where jobs on this machine were stopped and
    none has failed: by Ctrl-C or a STOP file. Their own commands have said how they ended.

    Around the execution of the workflow. A second Ctrl-C while jobs end changes nothing. Raises
    SystemExit.
    """
    from snakemake.exceptions import WorkflowError
    from snakemake.executors.local import Executor
    from snakemake.logging import logger
    from snakemake.scheduling.job_scheduler import _ERROR_MSG_FINAL, JobScheduler

    callback, schedule = Executor._callback, JobScheduler.schedule
    stopped: set[Any] = set()
    is_interrupted = ends_well = False

    def failed(scheduler: JobScheduler) -> bool:
        # What has ended since the scheduler's last look is still in _toerror.
        return bool(scheduler._executor_error or {*scheduler.failed, *scheduler._toerror} - stopped)

    def callback_own(executor: Executor, job_info: Any, future: Any) -> None:
        if not _was_stopped(job_info.job, future.exception()):
            callback(executor, job_info, future)
            return
        stopped.add(job_info.job)
        executor.workflow.scheduler.error_callback(job_info.job)

    def schedule_own(scheduler: JobScheduler) -> bool:
        nonlocal ends_well
        cancel = scheduler._executor.cancel

        def cancel_own() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            signal.signal(signal.SIGINT, lambda *_: os.write(2, _STOPPING))
            cancel()

        def has_failures(record: Any) -> bool:
            return record.msg != _ERROR_MSG_FINAL or failed(scheduler)

        scheduler._executor.cancel = cancel_own
        logger.addFilter(has_failures)
        try:
            is_done: bool = schedule(scheduler)
        except KeyboardInterrupt:  # a second one, before `cancel` was called for the first
            cancel_own()
            is_done = False
        is_asked = stopped or is_interrupted or scheduler._user_kill  # by SIGTERM
        ends_well = bool(is_asked) and not (is_done or failed(scheduler))
        return is_done

    Executor._callback, JobScheduler.schedule = callback_own, schedule_own
    try:
        yield
    except (KeyboardInterrupt, WorkflowError) as err:
        if ends_well or isinstance(err, KeyboardInterrupt):
            raise SystemExit(Exit.STOPPED) from None
        raise


def _was_stopped(job: Any, error: BaseException | None) -> bool:
    """Return whether the command of a job ended because somebody asked it to. error: of its rule."""
    cause = error and error.__context__
    if not isinstance(cause, subprocess.CalledProcessError):
        return False
    is_of_forge = (job.shellcmd or "").startswith("exec forge ")
    return cause.returncode in _INTERRUPTED or (is_of_forge and cause.returncode == Exit.STOPPED)


def set_resources(settings: Any, rule: str, values: Mapping[str, Any]) -> None:
    """Make these the set-resources of a rule. settings: Snakemake's ResourceSettings."""
    from snakemake.resources import Resource, Resources

    settings.overwrite_resources[rule] = Resources(
        {
            name: value if isinstance(value, Resource) else Resource(name, value)
            for name, value in values.items()
        }
    )
    # Snakemake keeps them as the first rule needed them, which in a module may be one of the user's own.
    vars(settings).pop("_parsed_overwrite_resources", None)


@contextmanager
def with_executor(workflow: Any, name: str) -> Iterator[None]:
    """In a dry run, whose executor makes every job a local one, see jobs as this executor would."""
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    dry = workflow._executor_plugin
    workflow._executor_plugin = ExecutorPluginRegistry().get_plugin(name)
    for group in set(workflow.dag._group.values()):
        group._resources = None  # they depend on it
    try:
        yield
    finally:
        workflow._executor_plugin = dry
