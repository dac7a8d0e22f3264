"""People and Snakemake go by the exit code; a mistake of the user must not look like a bug."""

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge import cli
from forge.cli import main
from forge.commands import of_options, run_steps
from forge.core import terminal
from forge.core.errors import ConfigError, DataError, Exit, ForgeError, TrainingError, UnfitError
from forge.launch.launcher import RankFailure
from forge.launch.rank_records import RankRecord

HEAVY = {"torch", "pandas", "numpy", "tokenizers", "pyarrow", "matplotlib", "rich"}


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.delenv("FORGE_IN_WORKFLOW", raising=False)
    monkeypatch.setattr(terminal, "_copies", [])


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("run: small\n")
    return str(file)


def failing(monkeypatch, error):
    def action(_options):
        raise error

    monkeypatch.setattr(run_steps, "_config", action)


@pytest.mark.parametrize("command", ["train", "preflight"])
@pytest.mark.parametrize("left", [{"RANK": "3", "WORLD_SIZE": "8"}, {"LOCAL_RANK": "0"}])
def test_rank_left_over_in_the_shell_is_refused_before_anything_starts(
    monkeypatch, config, capsys, command, left
):
    results = Path(config).parent / "results"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, left.get(name, ""))
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"):  # as in any batch job
        monkeypatch.setenv(name, "0")
    assert main([command, config, f"--results={results}"]) == Exit.CONFIG
    said = capsys.readouterr().err
    assert f"the environment has {', '.join(f'{n}={v}' for n, v in left.items())}, which" in said
    assert f"unset {' '.join(left)}, then rerun" in said
    assert not results.exists()


def test_timeout_on_the_command_line_wins_over_the_exported_one(monkeypatch, config):
    monkeypatch.setenv("NCCL_TIMEOUT", "7")
    parser = cli._parser()
    options = parser.parse_args(["preflight", config])
    for given, seconds in (({}, 7), ({"fabric.timeout_sec": 9}, 9)):
        options.machine_overrides = given
        assert of_options.machine_of(options).fabric.timeout_sec == seconds


# --- exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ESHUTDOWN, errno.EIO, errno.ETIMEDOUT])
def test_network_file_system_that_fails_is_unfit_and_named(monkeypatch, config, capsys, number):
    # Python makes a BrokenPipeError of ESHUTDOWN, which an evicted Lustre client gets.
    failing(monkeypatch, OSError(number, os.strerror(number), "/results/base/events.jsonl"))
    assert main(["config", config]) == Exit.UNFIT
    said = capsys.readouterr().err
    assert "cannot read or write /results/base/events.jsonl" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "you may not read or write there"),
        (errno.EISDIR, "a directory is where a file is expected"),
        (errno.ENAMETOOLONG, "at most 255 bytes"),
        (errno.ELOOP, "links lead back to themselves"),
    ],
)
def test_file_that_cannot_be_used_is_named_with_what_is_wrong(
    monkeypatch, config, capsys, number, fix
):
    failing(monkeypatch, OSError(number, os.strerror(number), "results/base/trained.json"))
    assert main(["config", config]) == Exit.UNFIT
    said = capsys.readouterr().err
    assert "cannot read or write results/base/trained.json" in said
    assert fix in said
    assert "Traceback" not in said


@pytest.mark.parametrize("log", [".", "x" * 300, "/dev/null/x"])
def test_log_that_cannot_be_written_is_no_bug(config, capsys, log):
    assert main(["config", config, f"--log={log}"]) == Exit.UNFIT
    assert "cannot read or write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 78),
        (DataError, 65),
        (UnfitError, 69),
        (TrainingError, 70),
        (ForgeError, 70),
    ],
)
def test_each_mistake_has_its_code_and_three_parts_and_no_traceback(
    config, monkeypatch, capsys, error, code
):
    failing(monkeypatch, error("it is 3, not 4", cause="a cut", fix="do it again"))
    assert main(["config", config]) == code
    said = capsys.readouterr().err
    assert said == "forge config: it is 3, not 4\n  cause: a cut\n  fix:   do it again\n"


def test_failure_of_a_rank_gives_the_ranks_code(config, monkeypatch, tmp_path):
    record = RankRecord("failed", 1, Exit.STOPPED, message="stopped")
    failing(monkeypatch, RankFailure(record, tmp_path))
    assert main(["config", config]) == 75


def test_bug_gives_70_with_its_traceback(config, monkeypatch, capsys):
    failing(monkeypatch, ZeroDivisionError("a bug of ours"))
    assert main(["config", config]) == 70
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: a bug of ours" in said
    assert "this is a bug of Forge, please report it" in said


def test_interrupted_subcommand_says_how_to_resume(config, monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["config", config]) == 75
    assert "rerun the same command" in capsys.readouterr().err


def test_ctrl_c_while_packages_are_imported_is_no_traceback():
    """Python is still reading the packages of a command that began just now."""
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'pydantic': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from forge.cli import main\n"
        "sys.exit(main(['config', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert done.stderr == "forge: interrupted; rerun the same command to resume\n"


def test_subcommand_that_succeeds_gives_0(config, monkeypatch):
    monkeypatch.setattr(run_steps, "_config", lambda _options: None)
    assert main(["config", config]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "x"], r"no subcommand 'trian' \(did you mean train\?\)"),
        (["train"], "required: CONFIG"),
        (["train", "x", "--nodes=two"], "invalid int value: 'two'"),
        (["status", "--bogus=1"], "unrecognized arguments: --bogus=1"),
        (["logs", "x", "--train.seed=1"], "unrecognized arguments: --train.seed=1"),
        (["show", "--rnak=1"], "unrecognized arguments: --rnak=1"),
        (["stauts"], r"no subcommand 'stauts' \(did you mean status\?\); forge --help lists all"),
        ([], "status +show the current state of each run"),
    ],
)
def test_bad_command_line_is_refused_with_the_choices(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 78
    said = capsys.readouterr().err
    assert said.startswith("usage: forge ")
    assert re.search(message, said)


def test_first_page_of_help_names_what_only_rules_call_without_its_text(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert re.search(r"^    train +train up to the goal", said, re.MULTILINE)
    assert "stage, tokenize, tokenizer." in said and "tokenize the corpus" not in said
    with pytest.raises(SystemExit):
        main(["tokenize", "--help"])
    assert "tokenize the corpus into shards" in capsys.readouterr().out


def test_config_that_does_not_exist_is_a_bad_config(tmp_path, capsys):
    assert main(["config", str(tmp_path / "nowhere.yaml")]) == 78
    assert "nowhere.yaml does not exist" in capsys.readouterr().err


def test_folder_that_is_not_a_run_is_refused_by_show(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 78
    assert f"{tmp_path} is not a run's directory" in capsys.readouterr().err


# --- overrides ------------------------------------------------------------------------------------


def options_of(monkeypatch, *arguments):
    seen = []
    monkeypatch.setattr(run_steps, "_train", seen.append)
    assert main(["train", *arguments]) == 0
    return seen[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--train.lr=1e-3", "--machine.stage.mode=never", "--train.seed=-3", "--run=a=b"],
        ["--train.lr", "1e-3", "--machine.stage.mode", "never", "--train.seed", "-3", "--run=a=b"],
        ["--train.lr", "1e-3", "--machine.stage.mode=never", "--train.seed=-3", "--run", "a=b"],
    ],
)
def test_overrides_are_read_with_and_without_equals_sign(config, monkeypatch, arguments):
    options = options_of(monkeypatch, config, *arguments)
    assert options.overrides == {"train.lr": 0.001, "train.seed": -3, "run": "a=b"}
    assert options.machine_overrides == {"stage.mode": "never"}


def test_overrides_reach_config_and_machine(config, monkeypatch):
    options = options_of(monkeypatch, config, "--train.lr=0.5", "--machine.fabric.gid_index=3")
    assert (of_options.config_of(options).run, of_options.config_of(options).train.lr) == (
        "small",
        0.5,
    )
    assert of_options.machine_of(options).fabric.gid_index == 3


def test_key_that_is_true_or_false_may_stand_alone(config, monkeypatch):
    machine = ("--machine.fabric.debug", "--machine.stage.project")
    options = options_of(monkeypatch, config, "--train.compile", *machine)
    assert options.overrides == {"train.compile": True}
    assert options.machine_overrides == {"fabric.debug": True, "stage.project": True}
    assert options_of(monkeypatch, "--train.compile", config).overrides == {"train.compile": True}
    off = options_of(monkeypatch, config, "--train.compile", "off", "--train.seed=1")
    assert off.overrides == {"train.compile": "off", "train.seed": 1}
    assert of_options.config_of(off).train.compile is False


@pytest.mark.parametrize(("command", "reads"), [("validate", False), ("plan", True)])
def test_machine_key_is_refused_and_not_promised_where_no_machine_is_read(
    config, capsys, monkeypatch, command, reads
):
    monkeypatch.setattr(run_steps, f"_{command}", lambda _options: None)
    assert main([command, config, "--machine.gpu=H100"]) == (0 if reads else 78)
    refusal = f"--machine.gpu: forge {command} reads no machine.yaml"
    assert (refusal in capsys.readouterr().err) is not reads
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert ("machine.KEY" in capsys.readouterr().out) is reads


@pytest.mark.parametrize("key", ["train.lr", "train", "nope", "train.compile.x", "machine.stage"])
def test_other_key_without_a_value_is_refused(config, capsys, key):
    assert main(["train", config, f"--{key}", "--train.seed=1"]) == 78
    assert f"cannot read '--{key}': it has no value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--train.max_stepz=5", "did you mean max_steps?"),
        ("--train", "cannot read '--train'"),
        ("more", "cannot read 'more'"),
        ("--run.x=1", "run is not a section"),
    ],
)
def test_override_that_fits_nothing_is_a_bad_config(config, capsys, argument, message):
    assert main(["config", config, argument]) == 78
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--config", "train.max_steps=300"],
            "forge train config/config.yaml --train.max_steps=300",
        ),
        (["mine.yaml", "--config=train.lr=1e-3"], "forge train mine.yaml --train.lr=1e-3"),
        (
            ["mine.yaml", "--config", "train.lr=1e-3", "train.max_steps=3"],
            """train --config 'train={"lr": 0.001, "max_steps": 3}'""",
        ),
        (["--profile", "profiles/local"], "snakemake --profile profiles/local train"),
        (["mine.yaml", "--cores=2"], "snakemake --profile profiles/local train"),
    ],
)
def test_option_of_snakemake_is_refused_with_the_line_that_works(capsys, arguments, line):
    assert main(["train", *arguments]) == 78
    said = capsys.readouterr().err
    assert " is an option of snakemake\n" in said
    assert line in said


def test_abbreviated_option_is_not_guessed(config, monkeypatch, capsys):
    monkeypatch.setattr(run_steps, "_train", of_options.config_of)
    assert main(["train", config, "--node=2"]) == 78
    assert "unknown key node" in capsys.readouterr().err


def test_lines_for_people_go_to_the_log_too(config, monkeypatch, tmp_path):
    failing(monkeypatch, DataError("no shards"))
    log = tmp_path / "logs" / "config.log"
    assert main(["config", config, f"--log={log}"]) == 65
    lines = [terminal.unstamped(line) for line in log.read_text().splitlines()]
    assert [text for _, text in lines][1:] == ["forge config: no shards"]
    assert all(abs(time - log.stat().st_mtime) < 2 for time, _ in lines)
    terminal._copies.pop().close()


def test_home_is_found_in_every_option_that_names_a_file_or_a_directory(monkeypatch):
    """A shell leaves the `~` of --to=~/model as it is, and a directory of that name was made."""
    monkeypatch.setenv("HOME", "/home/ada")
    [every] = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    named = ("FILE", "DIR", "TEXTS", "KEY", "CHECKOUT", "STATEMENT")
    options = [
        (f"{name} {action.option_strings[0]}", action.type or str)
        for name, parser in every.choices.items()
        for action in parser._actions
        if action.option_strings and action.metavar in named
    ]
    assert len(options) > 40
    assert [name for name, read in options if str(read("~/x")) != "/home/ada/x"] == []


# --- start-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["--help", "train --help", "--version"])
def test_help_answers_without_heavy_imports(arguments):
    code = (
        "import sys; from forge.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('modules:', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    text, _, modules = done.stdout.rpartition("modules: ")
    assert ("75 stopped early" in text) == (arguments == "--help")
    assert "forge.cli" in modules.split()
    assert set(modules.split()) & HEAVY == set()


def test_reader_that_has_left_is_no_failure():
    # As in `forge show | head`: the reading end is closed before the first word.
    read, write = os.pipe()
    os.close(read)
    code = (
        "from forge import cli\n"
        "from forge.commands import run_steps\n"
        "run_steps._config = lambda _options: print('word', flush=True)\n"
        "raise SystemExit(cli.main(['config', 'x']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


ASCII = (
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
)


@pytest.mark.parametrize("variables", ASCII)
@pytest.mark.parametrize("arguments", ["--help", "train --help", "config nowhere·", "train"])
def test_terminal_without_unicode_ends_nothing(variables, arguments):
    """The help has characters beyond ASCII; it ended with UnicodeEncodeError."""
    done = subprocess.run(
        [sys.executable, "-m", "forge", *arguments.split()],
        capture_output=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == (0 if "--help" in arguments else 78)
    assert b"Traceback" not in done.stderr
    assert b"usage: forge" in done.stdout + done.stderr or b"does not exist" in done.stderr


@pytest.mark.parametrize("variables", ASCII)
def test_locale_changes_no_file(tmp_path, variables):
    """In an old locale é was read as two characters, or ended in a traceback."""
    text = "tokenizer: {eos_token: é😀}\ntokenize: {inputs: [config.yaml]}\nresults: ü\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    for subcommand, code in (("config", 0), ("stage", 65)):
        done = subprocess.run(
            [sys.executable, "-m", "forge", subcommand, "config.yaml", "--log=log", "--data=é"],
            cwd=tmp_path,
            capture_output=True,
            env={**os.environ, **variables},
            check=False,
        )
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr
    assert "é/tokens" in (tmp_path / "log").read_text(encoding="utf-8")
    written = json.loads((tmp_path / "ü/base/config.json").read_text(encoding="utf-8"))
    assert written["tokenizer"]["eos_token"] == "é😀"


@pytest.mark.parametrize(
    "option", ["--results=/proc/x", "--data=/proc/x", "--log=/proc/x", "--log=/proc/x/log"]
)
def test_directory_of_the_kernel_is_no_bug(config, tmp_path, capsys, option):
    command = "tokenizer" if "data" in option else "config"
    places = [f"--results={tmp_path}/results", f"--data={tmp_path}/data"]
    kept = [place for place in places if place.split("=")[0] != option.split("=")[0]]
    assert main([command, config, *kept, option]) == Exit.UNFIT
    said = capsys.readouterr().err
    assert "/proc/x" in said and "these files are the kernel's" in said and "Traceback" not in said
