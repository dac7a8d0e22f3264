"""What a workflow command prints, from the records that Snakemake and its plugins log."""

import io
import logging
import re
from types import SimpleNamespace

import pytest
from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter
from snakemake.settings.enums import Quietness
from snakemake.settings.types import OutputSettings
from snakemake_interface_logger_plugins.common import LogEvent

from forge.core.terminal import CLEAR_LINE, unstamped
from forge.reporting import workflow_output

SUBMITTED = (
    "Job %s has been submitted with SLURM jobid %s (log: /lab/.snakemake/slurm_logs/%s.log)."
)


class Log:
    """A logger as Snakemake's LoggerManager sets it up."""

    def __init__(self, stream=None, **options):
        settings = OutputSettings(**options)
        self.stream = stream or io.StringIO()
        known = (settings.debug_dag, settings.verbose, settings.dryrun, settings.printshellcmds)
        handler = ColorizingTextHandler(
            stream=self.stream,
            filter=DefaultFilter(settings.quiet, *known),
            formatter=DefaultFormatter(settings.quiet),
        )
        handler.name = workflow_output.TERMINAL
        self.logger = logging.Logger("snakemake")
        self.logger.addHandler(handler)
        self.workflow = SimpleNamespace(output_settings=settings)
        workflow_output.shorten(self.workflow, self.logger)

    def say(self, message=None, event=None, **fields):
        self.logger.info(message, extra={"event": event, **fields} if event else fields)

    def job(self, number, rule, *, local=True, indent=False, **wildcards):
        files = {"input": [], "output": ["a.json"], "log": ["a.log"], "benchmark": None}
        fixed = {"rule_msg": None, "is_checkpoint": False, "priority": 0, "threads": 1}
        said = {"reason": "Missing output files: a.json", "resources": {"mem_mb": 1800}}
        names = {"jobid": number, "rule_name": rule, "wildcards": wildcards}
        where = {"local": local, "indent": indent}
        self.say(event=LogEvent.JOB_INFO, **files, **fixed, **said, **names, **where)
        self.say(event=LogEvent.SHELLCMD, cmd="exec forge", indent=indent)

    def group(self, name, uuid, **jobs):
        """jobs: rule -> Snakemake's id of its job. The uuid is that of the last one."""
        last = list(jobs)[-1]
        members = [
            SimpleNamespace(jobid=number, uuid=lambda own=uuid if rule == last else rule: own)
            for rule, number in jobs.items()
        ]
        self.say(event=LogEvent.GROUP_INFO, group_id=name, jobs=members)
        for rule, number in jobs.items():
            self.job(number, rule, local=False, indent=True)

    def finished(self, *numbers, done, total=9):
        for number in numbers:
            self.say(f"Finished jobid: {number}", LogEvent.JOB_FINISHED, job_id=number)
        self.say(None, LogEvent.PROGRESS, done=done, total=total)

    def error(self, rule, *, indent=False, log="a.log"):
        fields = {"rule_name": rule, "rule_msg": None, "jobid": 3, "input": [], "output": []}
        fields |= {"conda_env": None, "aux": {}, "shellcmd": "exec forge train", "indent": indent}
        event = LogEvent.JOB_ERROR
        self.logger.error("Error in rule", extra={"event": event, **fields, "log": [log]})

    @property
    def lines(self):
        """Without the time at which they were printed."""
        text = re.sub(
            r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", "", self.stream.getvalue(), flags=re.M
        )
        return text.splitlines()


def start(log):
    """What Snakemake logs of its own work before the first job."""
    host = {"host": "ctl", "snakemake_version": "9.27.1", "python_version": "3.11.7 (main)"}
    log.say("Workflow has started!", LogEvent.WORKFLOW_STARTED, **host, quietness=Quietness.HOST)
    for line in ("Building DAG of jobs...", "SLURM run ID: eda5", "Using shell: /usr/bin/bash"):
        log.say(line)
    log.say("Provided remote nodes: 20", LogEvent.RESOURCES_INFO, nodes=20)
    stats = {"config_run": 2, "train_run": 1, "total": 3}
    log.say("Job stats:\njob  count\n", LogEvent.RUN_INFO, stats=stats)
    log.say("Select jobs to execute...")
    log.say("Execute 1 jobs...", LogEvent.JOB_STARTED, jobs=[3])


def test_jobs_on_this_machine_have_one_line_when_they_start_and_one_when_they_are_done():
    log = Log()
    start(log)
    log.job(3, "train_run", run="base")
    log.finished(3, done=1)
    log.say("Removing temporary output stage.json.", quietness=Quietness.RULES)
    assert log.lines == [
        "Snakemake 9.27.1, Python 3.11.7 on ctl",
        "jobs to run: 3 (2 config_run, train_run)",
        "train_run base: started",
        "train_run base: done (1 of 9)",
    ]


def test_in_a_file_each_line_has_the_time_as_those_of_forge_do(tmp_path):
    with open(tmp_path / "output", "w+") as file:
        log = Log(file)
        start(log)
        log.job(3, "train_run", run="base")
        log.finished(3, done=1)
        log.error("train_run", log="train.log")
        file.seek(0)
        times, texts = zip(*(unstamped(line) for line in file.read().splitlines()), strict=True)
    assert texts[0].startswith("times are local, ")
    assert texts[1:5] == (
        "Snakemake 9.27.1, Python 3.11.7 on ctl",
        "jobs to run: 3 (2 config_run, train_run)",
        "train_run base: started",
        "train_run base: done (1 of 9)",
    )
    assert "    log: train.log (check log file(s) for error details)" in texts
    assert all(times)


def test_jobs_of_slurm_have_their_id_and_log_whatever_the_order_of_submission():
    log = Log()
    log.job(5, "tokenize", local=False, tokens="6249")
    log.group("allocation-a", "uuid-a", preflight_run=7, stage_run=6, train_run=3)
    log.group("allocation-b", "uuid-b", preflight_run=17, stage_run=16, train_run=13)
    for job, number in (("uuid-b", 9), (5, 8), ("uuid-a", 10)):
        log.say(SUBMITTED % (job, number, number))
    log.finished(6, 7, 3, done=3)
    assert log.lines == [
        "allocation-b: submitted with SLURM jobid 9 (log: /lab/.snakemake/slurm_logs/9.log).",
        "tokenize 6249: submitted with SLURM jobid 8 (log: /lab/.snakemake/slurm_logs/8.log).",
        "allocation-a: submitted with SLURM jobid 10 (log: /lab/.snakemake/slurm_logs/10.log).",
        "allocation-a: done (3 of 9)",
    ]


def test_the_outer_snakemake_of_a_job_leaves_its_lines_to_the_inner_one():
    log = Log()
    log.job(0, "tokenize", local=False, tokens="6249")
    log.finished(0, done=1, total=1)
    assert log.lines == []


def test_errors_warnings_and_lines_that_are_not_known_are_printed_as_they_are():
    log = Log()
    log.error("train_run", log="results/bad/logs/train.log")
    log.logger.warning("Building DAG of jobs takes long")
    log.say("removed results/base/STOP")
    _, *lines = log.lines
    assert lines[0] == "Error in rule train_run:"
    assert "    log: results/bad/logs/train.log (check log file(s) for error details)" in lines
    assert "        exec forge train" in lines
    assert lines[-2:] == ["Building DAG of jobs takes long", "removed results/base/STOP"]


def test_error_of_a_group_stands_once_and_names_no_rule_that_has_not_failed():
    log = Log()
    info = {"rule_name": "train_run", "jobid": 3, "output": [], "log": ["train.log"]}
    fields = {"event": LogEvent.GROUP_ERROR, "aux_logs": ["9.log"], "job_error_info": [info]}
    log.logger.error("Error in group allocation-bad", extra=fields)
    log.error("stage_run", indent=True)
    assert "    message: Error in group allocation-bad" in log.lines
    assert "    log: 9.log (check log file(s) for error details)" in log.lines
    assert "Error in rule" not in log.stream.getvalue()


@pytest.mark.parametrize("option", ["verbose", "dryrun"])
def test_verbose_and_a_dry_run_print_all(option):
    log = Log(**{option: True})
    log.job(3, "train_run", run="base")
    assert {"    reason: Missing output files: a.json", "    resources: mem_mb=1800"} <= set(
        log.lines
    )


def test_shell_commands_are_printed_for_who_asks_for_them():
    log = Log(printshellcmds=True)
    log.job(3, "train_run", run="base")
    assert log.lines == ["train_run base: started", "exec forge"]


@pytest.mark.parametrize(
    ("quiet", "left"),
    [
        (Quietness.PROGRESS, ["train_run base: started", "removed"]),
        (Quietness.RULES, ["train_run base: done (1 of 9)", "removed"]),
        (Quietness.ALL, []),
    ],
)
def test_quiet_is_quieter_still(quiet, left):
    log = Log(quiet={quiet})
    log.job(3, "train_run", run="base")
    log.finished(3, done=1)
    log.say("removed")
    assert log.lines == left


def test_a_snakefile_that_is_read_twice_changes_nothing():
    log = Log()
    workflow_output.shorten(log.workflow, log.logger)
    log.job(3, "train_run", run="base")
    assert log.lines == ["train_run base: started"]


def test_line_on_a_terminal_takes_the_place_of_the_bar_of_a_job(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    stream.isatty = lambda: True
    log = Log(stream, nocolor=True)
    stream.write("tokenize ━━━ 3/10 MiB")
    log.finished(done=1)
    log.job(3, "train_run", run="base")
    [bar, line] = stream.getvalue().rstrip().split(CLEAR_LINE)
    assert bar.startswith("tokenize") and "train_run base: started" in line
