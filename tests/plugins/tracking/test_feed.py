"""Against a tracker that fails or hangs: what it lacks is sent later, and training never waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from forge import cli
from forge.core.config import ResolvedConfig, load_config
from forge.core.errors import ConfigError, UnfitError
from forge.core.files import write_json
from forge.core.paths import RunPaths, settings_file
from forge.core.provenance import config_digest
from forge.flow import workflow_command
from forge.plugins.tracking import feed, feed_process, places, to_wandb, tracker
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.settings import Tracking, Wandb
from forge.run import train
from forge.trainer import metrics
from forge.trainer.metrics import EvalLine

pytestmark = pytest.mark.all


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(tmp_path / "run")
    write_json(made.config, {"run": "run", "results": str(tmp_path), "ids": IDS})
    return made


ON = Tracking(tensorboard=True)
IDS = {"tokenizer": "0" * 12, "tokens": "1" * 12}


def add(paths, *steps):
    for step in steps:
        metrics.write(paths.metrics, EvalLine(launch="a", step=step, loss=1.0))


class Memory:
    """A tracker that keeps what it takes, and fails while `broken`."""

    def __init__(self):
        self.steps, self.ids, self.ends, self.broken = [], [], [], False

    def open(self, run, sent):
        self.ids.append(sent.id)
        assert run.config["config_digest"] and run.config["ids"]["tokens"] == "1" * 12
        return sent

    def log(self, rows):
        if self.broken:
            raise TimeoutError("no answer")
        self.steps += [row.step for row in rows]

    def finish(self, state):
        self.ends.append(state)


def send(paths, tracker):
    one = feed.Feed("memory", tracker, paths)
    one.is_over.set()
    one.send()


def test_restart_sends_what_follows_the_last_step_sent_under_the_same_id(paths):
    memory = Memory()
    add(paths, *range(250))
    send(paths, memory)
    add(paths, 249, 250, 251)
    send(paths, memory)
    assert memory.steps == list(range(252))
    assert len(set(memory.ids)) == 1 and len(memory.ends) == 2
    assert Sent.read(feed.sent_file(paths, "memory")).step == 251


def test_what_a_failing_tracker_did_not_take_is_sent_later_and_the_failure_is_said_once(paths):
    memory, said = Memory(), []
    memory.broken = True
    add(paths, 1, 2)
    one = feed.Feed("memory", memory, paths)
    with mock.patch.object(feed, "RETRY_SEC", 0.01), mock.patch.object(feed, "POLL_SEC", 0.01):
        thread = threading.Thread(target=one.keep_sending, args=(said.append,))
        thread.start()
        end = time.monotonic() + 60
        while len(memory.ids) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        memory.broken = False
        one.is_over.set()
        thread.join(60)
    assert memory.steps == [1, 2]
    assert said == ["warning: tracking.memory: TimeoutError: no answer; training is not affected"]


def test_position_moves_only_when_the_tracker_has_taken_the_rows(paths):
    memory = Memory()
    memory.broken = True
    add(paths, 1)
    with pytest.raises(TimeoutError):
        send(paths, memory)
    left = Sent.read(feed.sent_file(paths, "memory"))
    assert left.step == -1 and not left.complete


def test_sync_of_a_server_that_cannot_be_reached_fails_with_its_name(paths):
    broken = Memory()
    broken.open = mock.Mock(side_effect=ConnectionError("api.wandb.ai: no route"))
    with (
        mock.patch.object(feed, "trackers_of", return_value={"wandb": broken}),
        pytest.raises(
            UnfitError, match=r"tracking\.wandb: ConnectionError: api\.wandb\.ai: no route"
        ),
    ):
        feed.sync([(paths, Tracking(wandb=Wandb()))])


def test_sync_tries_every_tracker_of_every_run_and_names_each_that_failed(paths, tmp_path, capsys):
    second = RunPaths(tmp_path / "second")
    shutil.copytree(paths.root, second.root)
    add(second, 1, 2)
    broken, works = Memory(), Memory()
    broken.broken = True
    add(paths, 1)
    both = Tracking(wandb=Wandb(), tensorboard=True)
    made = {"wandb": broken, "tensorboard": works}
    with (
        mock.patch.object(feed, "trackers_of", return_value=made),
        pytest.raises(UnfitError, match=r"second: tracking\.wandb: TimeoutError: no answer"),
    ):
        feed.sync([(paths, both), (second, both)])
    assert works.steps == [1, 1, 2]
    assert "run: tracking.wandb: TimeoutError: no answer" in capsys.readouterr().err


def test_sync_refuses_a_run_without_trackers_before_anything_is_sent(paths, tmp_path):
    bare = RunPaths(tmp_path / "bare")
    with pytest.raises(ConfigError, match="bare has no trackers"):
        feed.sync([(paths, ON), (bare, Tracking())])
    assert not feed.sent_file(paths, "tensorboard").exists()


@pytest.fixture
def sync(paths, tmp_path):
    """`forge sync` of the run with a config that has TensorBoard."""
    (tmp_path / "mine.yaml").write_text("tracking: {tensorboard: true}")
    command = [sys.executable, "-m", "forge", "sync", str(paths.root)]
    command.append(f"--config={tmp_path}/mine.yaml")
    return lambda: subprocess.run(command, capture_output=True, text=True, check=False)


def test_sync_says_why_tensorboard_cannot_write(paths, sync):
    add(paths, 1)
    places.tensorboard_folder(paths).write_text("a file where the directory should be")
    done = sync()
    assert done.returncode == 69
    assert f"tracking.tensorboard: cannot write {places.tensorboard_folder(paths)}" in done.stderr
    assert "Traceback" not in done.stderr and "internet" not in done.stderr


def test_sync_while_another_process_sends_names_it(paths, sync):
    with feed.lock(places.sent_folder(paths), "tracking"):
        done = sync()
    assert done.returncode == 69 and str(os.getpid()) in done.stderr, done.stderr


# --- the process during training ------------------------------------------------------------------

HANGS = """
import sys, time
from forge.plugins.tracking import feed
class Hangs:
    def open(self, run, sent): time.sleep(3600)
feed.trackers_of = lambda *_: {"tensorboard": Hangs()}
sys.exit(feed.main(sys.argv[1]))
"""


def test_hanging_tracker_delays_the_end_by_the_bound_and_is_named_then(paths, capsys):
    real = subprocess.Popen
    started = []

    def hanging(command, **settings):
        started.append(real([sys.executable, "-c", HANGS, command[-1]], **settings))
        return started[0]

    sent = feed.sent_file(paths, "tensorboard")
    with (
        mock.patch.object(feed_process.subprocess, "Popen", hanging),
        mock.patch.object(feed_process, "FINISH_SEC", 0.5),
    ):
        with feed_process.tracked(paths, ON):
            end = time.monotonic() + 60
            while not sent.exists() and time.monotonic() < end:
                time.sleep(0.01)
            begun = time.monotonic()
        took = time.monotonic() - begun
    assert sent.exists() and 0.5 <= took < 20  # of 3600
    assert started[0].returncode == -9
    assert "not everything was sent to tensorboard; the next" in capsys.readouterr().err


def test_process_that_crashes_leads_to_one_warning(paths, capsys):
    before = Sent(id="a" * 8, step=7, complete=True)  # of the launch before
    before.write(feed.sent_file(paths, "tensorboard"))
    with (
        mock.patch.object(feed_process.sys, "executable", "/bin/false"),
        feed_process.tracked(paths, ON),
    ):
        pass
    assert capsys.readouterr().err.count("warning") == 1


def test_package_that_a_node_lacks_is_reported_and_training_continues(paths, capsys):
    with (
        mock.patch.object(tracker, "find_spec", return_value=None),
        feed_process.tracked(paths, ON),
    ):
        pass
    assert "Python has no package tensorboard on this node" in capsys.readouterr().err


def test_run_without_trackers_starts_no_process(paths):
    no_start = mock.patch.object(feed_process.subprocess, "Popen", side_effect=AssertionError)
    with no_start, feed_process.tracked(paths, Tracking()):
        pass
    assert not places.sent_folder(paths).exists()


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{wandb: {mode: sometimes}}", r"tracking\.wandb\.mode is 'sometimes'"),
        (
            "{wandb: {projekt: x}}",
            r"unknown key tracking\.wandb\.projekt \(did you mean project\?\)",
        ),
        ("{tensorbord: true}", r"unknown key tracking\.tensorbord \(did you mean tensorboard\?\)"),
        ("{mlflow: {tracking_uri: ''}}", r"tracking\.mlflow\.tracking_uri is ''"),
    ],
)
def test_bad_settings_are_refused_by_key_and_value(tmp_path, text, problem):
    (tmp_path / "c.yaml").write_text(f"tracking: {text}")
    with pytest.raises(ConfigError, match=problem):
        load_config(tmp_path / "c.yaml")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`forge train CONFIG OPTIONS`, which trains nothing, in a project of one run; its trackers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("tracking: {tensorboard: true}")
    (tmp_path / "config/runs.tsv").write_text("run\nbase\n")
    given = []
    monkeypatch.setattr(train, "train", lambda *arguments, **_: given.append(arguments[3]))

    def made(*arguments):
        assert cli.main(["train", *arguments]) == 0
        return given[-1].of(Tracking).trackers

    return made


def test_config_json_trains_with_the_trackers_of_the_sample_sheet(trained, tmp_path):
    assert trained("config/config.yaml") == ("tensorboard",)
    assert trained("config/config.yaml", "--tracking.tensorboard=false") == ()
    values = ResolvedConfig(ids=IDS).training_json()
    write_json(tmp_path / "results/base/config.json", values)
    assert trained("results/base/config.json") == ("tensorboard",)
    # Of another config than the sheet's, and what stands beside the results.
    write_json(tmp_path / "results/base/config.json", {**values, "train": {"max_steps": 3}})
    planted = tmp_path / "results/base/tracking/settings.json"
    write_json(planted, {"format": 1, "tracking": {"mlflow": {"tracking_uri": "http://there"}}})
    assert trained("results/base/config.json") == ()


def test_workflow_gives_each_run_its_trackers_in_a_file_for_the_owner_alone(trained, tmp_path):
    address = "https://me:secret@there"
    tracking = {"mlflow": {"tracking_uri": address}}
    config = ResolvedConfig.model_validate({"run": "a", "ids": IDS, "tracking": tracking})
    resources = mock.Mock(overwrite_resources={}, overwrite_threads={}, default_resources=None)
    workflow_command.keep_settings({"a": config}, resources, lambda run: 1, submits=False)
    workflow_command.keep_for_jobs({"a": config}, {})
    holding = [path for path in tmp_path.rglob("*.json") if address in path.read_text()]
    assert len(holding) == 2 and {path.stat().st_mode & 0o777 for path in holding} == {0o600}
    config_json = tmp_path / "results/a/config.json"
    write_json(config_json, config.training_json())
    file = settings_file("a")
    assert trained(str(config_json), f"--settings={file}") == ("mlflow",)


def test_password_of_an_address_is_in_no_message_and_in_no_word_of_a_command(paths, capsys):
    broken = Memory()
    broken.open = mock.Mock(side_effect=ConnectionError("to https://me:secret@there/api failed"))
    one = feed.Feed("mlflow", broken, paths)
    one.is_over.set()
    said = []
    one.keep_sending(said.append)
    assert "https://me:…@there/api" in said[0] and "secret" not in said[0] + capsys.readouterr().err
    tracking = Tracking(mlflow={"tracking_uri": "https://me:secret@there"})
    real, commands = subprocess.Popen, []

    def keeps_its_input(command, **settings):
        commands.append(command)
        return real(["sh", "-c", 'cat > "$0"', paths.root / "given"], **settings)

    with (
        mock.patch.object(feed_process.subprocess, "Popen", keeps_its_input),
        feed_process.tracked(paths, tracking),
    ):
        pass
    assert "secret" in (paths.root / "given").read_text() and "secret" not in str(commands)
    assert places.log_file(paths).stat().st_mode & 0o777 == 0o600


def test_trackers_change_neither_the_digest_of_a_config_nor_what_trains(tmp_path):
    plain = ResolvedConfig.model_validate({"ids": IDS})
    tracked = ResolvedConfig.model_validate({"ids": IDS, "tracking": {"mlflow": {}}})
    assert tracked.of(Tracking).trackers == ("mlflow",)
    assert config_digest(plain) == config_digest(tracked)
    assert plain.of_training == tracked.of_training
    assert plain.training_json() == tracked.training_json()


def test_missing_package_is_refused_where_the_config_is_read():
    with (
        mock.patch.object(tracker, "find_spec", return_value=None),
        pytest.raises(
            ConfigError, match=r"run base: tracking\.wandb is set, .* no package wandb"
        ) as err,
    ):
        tracker.refuse_missing_packages(Tracking(wandb=Wandb()), "run base")
    assert "make setup EXTRAS=tracking" in err.value.fix


def test_wandb_is_offline_without_a_key_where_asked_and_where_nobody_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert "no API key" in to_wandb._why_offline("https://api.wandb.ai")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert "127.0.0.1:1 cannot be reached" in to_wandb._why_offline("http://127.0.0.1:1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert to_wandb._why_offline("http://127.0.0.1:1") == "WANDB_MODE is offline"


def test_a_sending_process_that_survives_kill_9_does_not_hold_training_up(monkeypatch):
    monkeypatch.setattr(feed_process, "FINISH_SEC", 0.1)
    monkeypatch.setattr(feed_process, "KILL_SEC", 0.1)
    line = [sys.executable, "-c", "import time; time.sleep(20)"]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as child:
        with monkeypatch.context() as stuck:
            stuck.setattr(feed_process.os, "killpg", lambda *_: None)
            feed_process._finish(child)
        assert child.poll() is None
        child.kill()
