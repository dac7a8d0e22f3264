"""After a failure people read this first: the cause must stand on top, whatever 64 ranks wrote."""

import os
import pty
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest
from support import happenings
from support.repository import REPOSITORY

from forge import cli
from forge.core import events
from forge.core.errors import ConfigError
from forge.core.json_lines import last_lines
from forge.core.paths import RunPaths
from forge.launch.rank_records import NO_RECORD
from forge.reporting import logs
from forge.reporting.log_errors import find, group

NOON = 1_790_000_000.0
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "rank.py", line 61, in _attempt\n'
    "    return _do(spec)\n"
    "           ^^^^^^^^^\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB\n"
)
PEER = "RuntimeError: [pair.cc:537] Read error [10.77.0.12]:59{}: Connection reset by peer\n"


@pytest.fixture
def run(tmp_path):
    paths = RunPaths(tmp_path / "base")
    paths.logs.mkdir(parents=True)
    return paths


def write(run, name, text, at=NOON):
    path = run.logs / name
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def shown(capsys, run, **options):
    logs.logs(run, **options)
    return capsys.readouterr().out


# --- errors first ---------------------------------------------------------------------------------


def test_the_same_error_of_64_ranks_is_one_entry_of_the_first_of_them(run, capsys):
    for rank in range(64):
        at = NOON + (0 if rank == 3 else 5 + rank)
        node = f"node{rank // 4:02}"
        write(run, f"12.0.{node}.{rank}.log", f"banner\n{TRACEBACK.format(rank)}", at)
    text = shown(capsys, run)
    assert "1 error\n" in text
    assert "rank 3 (and 63 more) on node00" in text
    assert text.count("CUDA out of memory") == 2  # the entry, and the last lines of rank 0
    assert text.index("rank 3 (and 63 more)") < text.index("rank 0 on node00, last written")


def test_the_earliest_error_stands_first(run, capsys):
    write(run, "12.0.node01.0.log", "ValueError: came second\n", NOON + 2)
    write(run, "12.0.node02.1.log", "KeyError: 'came first'\n", NOON)
    text = shown(capsys, run)
    assert "2 errors, the earliest first" in text
    assert text.index("came first") < text.index("came second")


def test_a_peers_loss_stands_behind_the_cause_whatever_the_clock_says(run, capsys):
    write(run, "12.0.node01.0.log", PEER.format("108"), NOON)
    write(run, "12.0.node02.1.log", PEER.format("112"), NOON + 1)
    write(run, "12.0.srun.log", "srun: error: node02: task 3: Killed\n", NOON + 5)
    text = shown(capsys, run)
    assert "1 error\n" in text
    cause, _, rest = text.partition("said because processes were ended:")
    assert "task 3: Killed" in cause and "Connection reset" not in cause
    assert "rank 0 (and 1 more) on node01" in rest


def test_lines_with_their_own_time_are_ordered_by_it(run, capsys):
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(NOON - 60))
    write(run, "12.0.node01.0.log", "KeyError: 'later'\n", NOON - 1)
    nccl = (
        f"[rank1]:[E{stamp}.123456789 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught timeout\n"
    )
    write(run, "12.0.node01.1.log", nccl, NOON)
    text = shown(capsys, run)
    assert text.index("Watchdog caught timeout") < text.index("KeyError: 'later'")


def test_an_error_that_a_rank_sent_only_to_its_launcher_is_read_from_the_event_log(run, capsys):
    events.record(run.events, happenings.launch(job="12", restart=0))
    message = "step 3: loss nan\n  cause: a learning rate too high\n  fix:   lower train.lr"
    events.record(run.events, happenings.failed(message, rank=1))
    write(run, "12.0.node01.0.log", "banner\n")
    write(run, "12.0.node01.1.log", "banner\n")
    write(run, "train.log", f"forge train: rank 1: {message}\n", NOON + 1)
    text = shown(capsys, run)
    assert "1 error\n" in text and "rank 1 on node01" in text
    assert "lower train.lr" in text


def test_each_rank_is_shown_with_what_it_recorded_and_once_where_its_log_has_it(run, capsys):
    events.record(run.events, happenings.launch(job="12", restart=0))
    for ranks, message in (([0], "no room\n  fix:   free some"), ([1, 3], "KeyError: 'x'")):
        events.record(run.events, happenings.rank_error(message, ranks=ranks, host="node01"))
    events.record(run.events, happenings.failed("no room\n  fix:   free some", rank=0))
    for rank in range(4):
        write(run, f"12.0.node01.{rank}.log", "banner\n")
    trace = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n"
    write(run, "12.0.node01.3.log", trace)
    text = shown(capsys, run)
    assert "2 errors" in text
    assert "  rank 0 on node01, " in text and "free some" in text
    assert "  rank 3 (and 1 more) on node01, " in text and "File 'a'" in text
    assert "times" not in text


def test_tail_of_a_rank_that_left_no_record_is_shown(run, capsys):
    events.record(run.events, happenings.launch(job="12", restart=0))
    silent = happenings.rank_error(NO_RECORD, ranks=[2, 3], host="node02")
    events.record(run.events, silent)
    events.record(run.events, happenings.lost("rank 2 of 4 exited without a record on node02"))
    for rank in range(4):
        write(run, f"12.0.node02.{rank}.log", f"the last of rank {rank}\n")
    text = shown(capsys, run)
    assert "1 error\n" in text and "rank 2 of 4 exited without a record on node02" in text
    assert [f"the last of rank {rank}" in text for rank in range(4)] == [True, False, True, False]


def test_the_event_log_of_another_start_is_left_out(run, capsys):
    for restart, event in ((0, happenings.failed("old")), (1, happenings.completed(9))):
        launch = happenings.launch(launch=f"launch-{restart}", job="12", restart=restart)
        events.record(run.events, launch)
        events.record(run.events, event)
        write(run, f"12.{restart}.node01.0.log", "banner\n", NOON + restart)
    text = shown(capsys, run)
    assert "no errors" in text and "completed at step 9" in text


@pytest.mark.parametrize(
    ("written", "is_error"),
    [
        ("forge stage: no space on node02\n  fix:   free some\n", True),
        ("forge stage: no space on node02\n  fix:   free some\nstaged: 3 shards\n", False),
        ("forge train: base stopped at step 7 of 9 (SIGUSR1); a checkpoint is committed\n", False),
        ("forge train: rank 1 of 2 is gone; job 42_7 resumes from step 40\n", False),
        (TRACEBACK + "forge train: this is a bug of Forge, please report it\n", True),
    ],
)
def test_a_subcommand_failed_if_its_last_line_is_an_error(run, capsys, written, is_error):
    write(run, "stage.log", written)
    assert ("1 error\n" in shown(capsys, run)) == is_error


def test_a_verbs_error_before_this_start_is_overcome(run, capsys):
    write(run, "stage.log", "forge stage: no space on node02\n", NOON - 60)
    write(run, "12.0.node01.0.log", "banner\n")
    assert "no errors" in shown(capsys, run)


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: node02: task 3: Killed",
        "node02:920:931 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got completion with error 12",
        "[E1121 04:37:23.12 ProcessGroupGloo.cpp:145] Gloo connectFullMesh failed",
        "E1121 04:37:23.12 295 torch/distributed/elastic/api.py:984] failed",
        "[rank3]: RuntimeError: Expected all tensors on one device",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0",
        "  traceback : Signal 9 (SIGKILL) received by PID 16042",
        "Fatal Python error: Segmentation fault",
        "rank 3: fatal: no room",
    ],
)
def test_lines_that_tell_an_error_are_found(line):
    assert len(list(find(["before", line, "after"], "rank 0", written=NOON))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1   a hang becomes an error",
        "warning: training without torch.compile: RuntimeError: no compiler",
        "[W1121 04:37:23.12 socket.cpp:755] error while binding, will try again",
        "checked 12 files, 0 errors",
        "step 3: validation loss 5.6",
    ],
)
def test_lines_that_tell_no_error_are_not(line):
    assert list(find([line], "rank 0", written=NOON)) == []


def test_a_chained_traceback_is_one_error_named_by_its_last_exception():
    first = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n\n"
    chain = "The above exception was the direct cause of the following exception:\n\n"
    second = "Traceback (most recent call last):\n  File 'b'\nValueError: no x\n  fix:   give x\n"
    lines = (first + chain + second + "step 4\n").splitlines()
    (one,) = find([f"[rank3]: {line}" for line in lines], "rank 3", written=NOON)
    assert one.headline == "ValueError: no x"
    assert one.lines[0].startswith("Traceback") and one.lines[-1] == "  fix:   give x"


@pytest.mark.parametrize("cut", range(1, len(TRACEBACK.splitlines()) + 1))
def test_a_traceback_that_is_being_written_is_an_error_already(cut):
    lines = TRACEBACK.splitlines()[:cut]
    (one,) = find(lines, "rank 3", written=NOON)
    assert len(one.lines) == cut and one.headline


def test_different_errors_are_not_thrown_together():
    lines = ["KeyError: 'a'", "KeyError: 'b'", "KeyError: 'a'"]
    groups = group(find(lines, "rank 0", written=NOON))
    assert [len(one.all) for one in groups] == [2, 1]


def test_a_long_traceback_keeps_its_end(run, capsys):
    frames = "".join(f'  File "deep.py", line {n}\n' for n in range(300))
    text = f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n"
    write(run, "12.0.node01.0.log", text)
    entry = shown(capsys, run, lines=1).partition("rank 0 on node01, last")[0]
    assert "RecursionError: too deep" in entry and len(entry.splitlines()) < 25


# --- the time of an error ---------------------------------------------------------------------------


def stamped(text, at):
    """The text as Forge writes it into a log."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
    return "".join(f"{stamp} {line}\n" for line in text.splitlines())


def test_block_of_stamped_lines_is_one_error_with_its_own_time(run, capsys):
    text = (
        stamped("banner", NOON) + stamped(TRACEBACK.format(3), NOON + 7) + stamped("on", NOON + 9)
    )
    (error,) = find(text.splitlines(), "rank 3", written=NOON + 99)
    assert error.time == NOON + 7
    assert error.lines == tuple(TRACEBACK.format(3).splitlines())
    (bare,) = find(TRACEBACK.format(5).splitlines(), "rank 5", written=NOON + 99)
    assert bare.kind == error.kind


def test_time_that_a_message_of_forge_mentions_is_not_its_own():
    line = stamped("forge train: error: nothing since 2020-01-01 00:00:00", NOON)
    (error,) = find(line.splitlines(), "train.log", written=NOON + 99)
    assert error.time == NOON


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{library}", NOON + 99),
        ("{begin}{library}", NOON + 99),  # the end of a rank that said nothing for hours
        ("{begin}{library}{end}", NOON + 60),
        ("{begin}W1 2026\n{timed}{end}", NOON + 30),
    ],
)
def test_error_of_a_library_has_its_own_time_or_the_next_one(text, expected):
    glog = time.strftime("[E%m%d %H:%M:%S.0 a.cpp:1] timeout\n", time.localtime(NOON + 30))
    begin, end = stamped("banner", NOON), stamped("step 9", NOON + 60)
    lines = text.format(begin=begin, end=end, library="KeyError: 'x'\n", timed=glog).splitlines()
    (error,) = find(lines, "rank 0", written=NOON + 99)
    assert error.time == expected


def test_errors_and_starts_are_ordered_by_their_lines_where_files_were_copied(run, capsys):
    write(run, "12.1.node01.0.log", stamped("came last", NOON + 60), NOON)
    write(run, "12.0.node01.0.log", stamped("KeyError: 'second'", NOON + 2), NOON + 99)
    write(run, "12.0.node01.1.log", stamped("KeyError: 'first'", NOON + 1), NOON + 99)
    assert "came last" in shown(capsys, run)
    text = shown(capsys, run, restart="0")
    assert text.index("'first'") < text.index("'second'")
    assert f"rank 1 on node01, {logs.clock(NOON + 1)}" in text


def test_error_of_a_subcommand_is_dated_by_its_line(run, capsys):
    write(run, "stage.log", stamped("forge stage: no space on node02\n  fix:   x", NOON - 60))
    write(run, "12.0.node01.0.log", stamped("banner", NOON))
    assert "no errors" in shown(capsys, run)
    write(run, "stage.log", stamped("forge stage: no space on node02\n  fix:   x", NOON + 1))
    assert "1 error\n" in shown(capsys, run)


def test_times_of_another_zone_are_shown_in_that_of_the_reader(run, capsys):
    east = NOON + 5 * 3600 + 1800
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(east))
    text = f"{stamp} times are local, +05:30 (IST)\n{stamp} ValueError: no x\n"
    write(run, "12.0.node01.0.log", text, NOON + 9)
    lines = shown(capsys, run).splitlines()
    assert f"  rank 0 on node01, {logs.clock(NOON)}" in lines
    assert f"  {logs.clock(NOON)} ValueError: no x" in lines


# --- which logs -----------------------------------------------------------------------------------


@pytest.fixture
def three_starts(run):
    for number, name in enumerate(("local.20261121T043952-809", "12.0", "12.1")):
        write(run, f"{name}.node01.0.log", f"rank 0 of start {number}\n", NOON + number)
        write(run, f"{name}.node01.1.log", f"rank 1 of start {number}\n", NOON + number)
        write(run, f"{name}.srun.log", f"srun of start {number}\n", NOON + number)
    return run


@pytest.mark.parametrize(
    ("restart", "starts"),
    [
        (None, [2]),
        ("1", [2]),
        ("0", [1]),
        ("12.0", [1]),
        ("local.20261121T043952-809", [0]),
        ("all", [0, 1, 2]),
    ],
)
def test_the_last_start_is_shown_and_others_on_request(three_starts, capsys, restart, starts):
    text = shown(capsys, three_starts, restart=restart)
    for number in range(3):
        assert (f"rank 0 of start {number}" in text) == (number in starts)
        assert (f"srun of start {number}" in text) == (number in starts)
    assert "rank 1 of" not in text
    assert "3), 2 ranks on node01" in text


def test_local_launches_are_counted_from_the_first(run, capsys):
    for number in range(2):
        name = f"local.20261121T04395{number}-809.laptop.0.log"
        write(run, name, f"start {number} speaks\n", NOON + number)
    assert "start 0 speaks" in shown(capsys, run, restart="0")


def test_a_start_that_is_not_there_is_refused_with_those_that_are(three_starts):
    with pytest.raises(ConfigError, match="no start 7 of this run") as caught:
        logs.logs(three_starts, restart="7")
    assert "12.0, 12.1" in caught.value.fix


def test_one_rank_is_shown_alone(three_starts, capsys):
    text = shown(capsys, three_starts, rank=1)
    assert "rank 1 of start 2" in text and "rank 0 of" not in text and "srun of" not in text


def test_a_rank_without_a_log_is_refused_with_those_that_have_one(three_starts):
    with pytest.raises(ConfigError, match="no log of rank 9") as caught:
        logs.logs(three_starts, rank=9)
    assert "0, 1" in caught.value.fix


def test_for_a_run_without_logs_the_message_says_where_to_look(run):
    with pytest.raises(ConfigError, match="holds no logs yet") as caught:
        logs.logs(run)
    assert "forge status" in caught.value.fix


def test_a_run_is_found_by_its_name_and_its_folder(tmp_path, monkeypatch, capsys):
    run = RunPaths(tmp_path / "results/base")
    run.logs.mkdir(parents=True)
    run.config.write_text("{}")
    write(run, "12.0.node01.0.log", "here\n")
    monkeypatch.chdir(tmp_path)
    for name in ("base", "results/base", str(run.root)):
        assert cli.main(["logs", name]) == 0
        assert "here" in capsys.readouterr().out
    assert cli.main(["logs", "bsae"]) == 78
    assert "there is no run bsae\n  fix:   there are: base" in capsys.readouterr().err


# --- the last lines -------------------------------------------------------------------------------


def test_only_the_last_lines_are_shown(run, capsys):
    write(run, "12.0.node01.0.log", "".join(f"line {n}\n" for n in range(100)))
    text = shown(capsys, run, lines=3)
    assert "line 97\n" in text and "line 99\n" in text and "line 96\n" not in text


def test_no_lines_are_shown_where_none_are_wanted(run, capsys):
    write(run, "12.0.node01.0.log", "banner\n")
    text = shown(capsys, run, lines=0)
    assert "the last 0 lines of" in text and "banner" not in text


def test_number_of_lines_below_0_is_refused(run, capsys):
    write(run, "12.0.node01.0.log", "banner\n")
    assert cli.main(["logs", str(run.root), "--lines", "-5"]) == 78
    assert "--lines is -5, but must be 0 or more" in capsys.readouterr().err


def test_a_huge_log_is_read_from_its_end(run, capsys):
    path = write(run, "12.0.node01.0.log", "")
    with open(path, "ab") as file:
        file.truncate(4 * 2**30)
        file.write(b"\nValueError: at the very end\n")
    tracemalloc.start()
    text = shown(capsys, run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "ValueError: at the very end" in text
    assert "searched: the last 1024 KiB of each log" in text
    assert peak < 64 * 2**20


@pytest.mark.parametrize(
    ("content", "num_bytes", "expected"),
    [
        (b"", 10, ([], False)),
        (b"ab\ncd\n", 10, (["ab", "cd"], False)),
        (b"ab\ncd", 10, (["ab", "cd"], False)),
        (b"ab\n\n", 10, (["ab", ""], False)),
        (b"ab\ncd\nef\n", 5, (["ef"], True)),
        ("é\ncd\n".encode(), 5, (["cd"], True)),
    ],
)
def test_the_end_of_a_file_is_complete_lines(tmp_path, content, num_bytes, expected):
    (tmp_path / "log").write_bytes(content)
    assert last_lines(tmp_path / "log", num_bytes) == expected


def test_the_end_of_no_file_is_nothing(tmp_path):
    assert last_lines(tmp_path / "log", 10) == ([], False)


def test_a_log_cannot_drive_the_terminal(run, capsys):
    write(
        run,
        "12.0.node01.0.log",
        "a\x1b[31mred\x1b[0m\x07 1%\r100%\n\x9b2J\nlast \x1b]0;title\x07\n",
    )
    text = shown(capsys, run)
    assert "  100%\n" in text
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(text)


# --- on a terminal, and as it is written ------------------------------------------------------------


class Command:
    """`forge logs` in a process of its own, on a pseudo terminal or a pipe."""

    def __init__(self, arguments, *, terminal, **environ):
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        self.mine, theirs = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forge", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env={**kept, "TERM": "xterm-256color", "COLUMNS": "200", **environ},
            # In the background of a script, the shell has SIGINT ignored for all.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, wanted, seconds=30):
        end = time.monotonic() + seconds
        while wanted not in self.text:
            assert time.monotonic() < end, f"{wanted!r} did not come: {self.text!r}"
            try:
                block = os.read(self.mine, 2**16)
            except OSError:  # a pseudo terminal whose other end is closed
                block = b""
            assert block, f"it ended without {wanted!r}: {self.text!r}"
            self.text += block.decode()

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self.mine)


@pytest.fixture
def command():
    started = []

    def start(*arguments, terminal=True, **environ):
        started.append(Command(arguments, terminal=terminal, **environ))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.mark.parametrize(
    ("terminal", "environ", "red"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (False, {}, False)],
)
def test_errors_are_red_on_a_terminal_that_wants_colours(run, command, terminal, environ, red):
    write(run, "12.0.node01.0.log", "ValueError: 3 is not 4\n")
    told = command("logs", str(run.root), terminal=terminal, **environ)
    told.read_until("more: forge logs")
    assert ("31m" in told.text) == red
    assert ("\x1b" in told.text) == terminal


def test_follow_shows_what_is_written_and_the_next_start_until_interrupted(run, command):
    path = write(run, "12.0.node01.0.log", "old words\n")
    told = command("logs", str(run.root), "--follow")
    told.read_until("old words")
    with open(path, "a") as file:
        file.write("new words\nhalf a")
    told.read_until("rank 0 | new words")
    write(run, "12.1.node01.0.log", "born again\n", time.time())
    told.read_until("start 12.1")
    told.read_until("rank 0 | born again")
    assert "half a" not in told.text
    told.process.send_signal(signal.SIGINT)
    assert told.process.wait(20) == 0


def test_following_starts_before_the_first_rank(run, command):
    write(run, "stage.log", "staging\n")
    told = command("logs", str(run.root), "--follow")
    told.read_until("no rank has started yet")
    write(run, "12.0.node01.0.log", "here I am\n", time.time())
    told.read_until("rank 0 | here I am")


def test_logs_are_read_without_torch_and_pandas(run):
    write(run, "12.0.node01.0.log", "words\n")
    code = (
        "import sys; from forge.cli import main; assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'pandas', 'numpy', 'rich'} & set(sys.modules)"
    )
    line = [sys.executable, "-c", code, "logs", str(run.root)]
    subprocess.run(line, check=True, capture_output=True, cwd=REPOSITORY)
