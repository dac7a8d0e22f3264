"""What rules are given: configs in files, each named so that a rule runs again for a reason only."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.cli import parse_config
from snakemake.settings.types import ConfigSettings
from support.repository import REPOSITORY

from forge.core.config import Config, ResolvedConfig, checked, load_config
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import Slurm
from forge.core.paths import (
    RunPaths,
    inputs_folder,
    model_folder,
    settings_file,
    tokenizer_folder,
    tokens_folder,
)
from forge.core.process import Process
from forge.core.records import Lock, RunSettings
from forge.data.content_ids import resolve
from forge.flow import resources, rule_inputs, runs, workflow_command
from forge.hosts.lock import WORKFLOW_LOCK


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    values = {"tokenize": {"inputs": ["text.txt"]}, "report": {"sample_tokens": 3}}
    return resolve(checked(Config, values, "the test"))


def changed(config, section, **values):
    new = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: new})


def settings(config, rule):
    found = rule_inputs.rule_settings({"base": config}, main=True)
    return Path(found[rule]["base"])


def test_settings_of_a_rule_change_with_what_it_depends_on_and_nothing_else(run):
    sections = {
        "config_run": changed(run, "train", max_steps=7),
        "validate_run": changed(run, "report", sample_tokens=4),
    }
    for rule in sections:
        differs = {
            of for of, config in sections.items() if settings(config, rule) != settings(run, rule)
        }
        assert differs == {rule}
    assert settings(changed(run, "validation", depth="load"), "validate_run") != settings(
        run, "validate_run"
    )
    config = load_config(str(settings(run, "config_run")))
    assert config.to_json() == run.of_training.to_json()


def test_jobs_read_their_sections_from_the_settings_of_their_rule(run):
    run = changed(run, "validation", depth="load")
    run = changed(run, "report", prompts=["5", "a b", "{", "'"])
    config = settings(run, "config_run")
    sections = RunSettings.read(settings(run, "validate_run")).sections
    assert sections.keys() == {"validate", "report"}
    assert load_config(str(config), sections).to_json() == run.to_json()


def made(path, values):
    """An output of an hour ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def is_due(settings, output):
    return settings.stat().st_mtime_ns > output.stat().st_mtime_ns


def test_only_settings_that_an_output_was_not_made_with_are_newer_than_the_output(run):
    """Also when Snakemake's record is gone, with a file of settings from before or without."""
    paths = RunPaths.of(run)
    outputs = {
        "config_run": (paths.config, paths.config, run.training_json()),
        "validate_run": (paths.validated, paths.validation, {"settings": run.validation_json()}),
    }
    for rule, (output, record, values) in outputs.items():
        made(output, {})
        made(record, values)
        for _ in range(2):
            assert not is_due(settings(run, rule), output)
        os.utime(settings(run, rule))
        assert not is_due(settings(run, rule), output)
        made(record, {key: {} for key in values})
        for when in (None, (0, 0)):
            os.utime(settings(run, rule), when)
            assert is_due(settings(run, rule), output)


def jobs(*paths):
    return [SimpleNamespace(params={"config": str(path)} if path else {}) for path in paths]


def test_only_configs_of_jobs_that_will_run_are_written(run):
    path = tokens_folder("data", run.ids.tokens) / "config.json"
    other = changed(run, "train", seed=7)
    rule_inputs.write_configs({"base": run, "other": other}, jobs(path, None))
    assert [str(p) for p in Path.cwd().rglob("*.json")] == [str(Path(path).absolute())]
    assert load_config(str(path)).ids == run.ids


def test_data_folder_may_be_spelled_as_in_a_shell(run):
    """As a rule spells it, by the config's `data`."""
    run = run.model_copy(update={"data": "./data"})
    path = f"./data/tokens/{run.ids.tokens}/config.json"
    rule_inputs.write_configs({"base": run}, jobs(path))
    assert load_config(path).ids == run.ids


def test_config_of_a_shared_artefact_has_its_inputs_and_ids_and_no_run(run):
    folders = [tokenizer_folder("data", run.ids.tokenizer), tokens_folder("data", run.ids.tokens)]
    paths = [folder / "config.json" for folder in folders]
    rule_inputs.write_configs({"base": run}, jobs(*paths))
    for path in paths:
        again = load_config(path)
        assert (again.tokenizer, again.tokenize, again.ids) == (
            run.tokenizer,
            run.tokenize,
            run.ids,
        )
        assert '"train": {' not in path.read_text()


def test_config_of_pretrained_weights_has_the_length_of_samples_that_fits_their_positions(run):
    values = run.to_json()
    values["model"] = {"architecture": "gpt2", "positions": 64, "vocab_size": 300}
    values["train"] |= {"seq_len": 64}
    small = checked(ResolvedConfig, values, "the test")
    small = small.model_copy(update={"ids": run.ids.model_copy(update={"model": "a" * 12})})
    path = model_folder("data", "a" * 12) / "config.json"
    rule_inputs.write_configs({"base": small}, jobs(path))
    assert load_config(path).model.positions == 64


def test_corpus_files_of_a_hub_have_a_config_of_their_own(run):
    inputs = ["text.txt", "hf://datasets/team/texts@main/*.jsonl"]
    run = changed(run, "tokenize", inputs=inputs).model_copy(update={"ids": None})
    run = resolve(checked(Config, run.to_json(), "the test"))
    path = inputs_folder("data", run.ids.inputs) / "config.json"
    rule_inputs.write_configs({"base": run}, jobs(path))
    assert load_config(path).tokenize.inputs == inputs


# --- sources --------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A run with two sources, of a tokenizer that is a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "code.txt", "tokenizer.json"):
        Path(name).write_text(f"some {name}")
    sources = {name: {"inputs": [f"{name}.txt"]} for name in ("text", "code")}
    values = {
        "tokenizer": {"source": "path", "path": "tokenizer.json"},
        "tokenize": {"sources": sources},
        "train": {"mix": {"text": 3, "code": 1}},
    }
    return resolve(checked(Config, values, "the test"))


def test_runs_with_other_weights_and_a_run_of_one_corpus_share_the_tokens_of_a_source(mixed):
    other = changed(mixed, "train", mix={"text": 1, "code": 1})
    alone = resolve(
        checked(
            Config,
            {"tokenizer": mixed.tokenizer, "tokenize": {"inputs": ["text.txt"]}},
            "the test",
        )
    )
    runs = {"base": mixed, "other": other, "alone": alone}
    assert set(rule_inputs.tokenizing(runs)) == set(mixed.ids.sources.values())
    assert set(rule_inputs.listing_sources(runs)) == {mixed.ids.tokens}
    assert settings(other, "config_run") != settings(mixed, "config_run")


def test_config_of_a_sources_tokens_is_that_of_a_single_corpus(mixed):
    paths = {
        name: tokens_folder("data", tokens) / "config.json"
        for name, tokens in mixed.ids.sources.items()
    }
    listed = tokens_folder("data", mixed.ids.tokens) / "config.json"
    rule_inputs.write_configs({"base": mixed}, jobs(listed, *paths.values()))
    for name, path in paths.items():
        alone = load_config(path)
        assert alone.tokenize.inputs == [f"{name}.txt"] and alone.tokenize.sources is None
        assert alone.ids.tokens == mixed.ids.sources[name]
    assert load_config(listed).tokenize == mixed.tokenize


# --- memory of validate_run -----------------------------------------------------------------------


def test_memory_of_validation_grows_with_the_model_and_is_never_below_that_of_the_profile(run):
    small = resources.validation_mem_mb(run, 2, None)
    large = changed(run, "model", dim=2048, layers=16, heads=16)
    added = 4 * (large.model.num_parameters(4096) - run.model.num_parameters(4096)) / 10**6
    assert resources.validation_mem_mb(large, 2, None) > small + added
    assert resources.validation_mem_mb(large, 2, {"mem_mb": 9}) > small + added
    assert resources.validation_mem_mb(run, 2, {"mem_mb": 10**6}) == 10**6
    of_files = changed(large, "validation", depth="digests")
    assert resources.validation_mem_mb(of_files, 2, None) < small


def test_memory_of_validation_has_room_for_the_ranks_that_load_what_one_rank_has_trained(run):
    large = changed(run, "model", dim=2048, layers=16, heads=16)
    weights = 4 * large.model.num_parameters(4096) / 10**6
    more = resources.validation_mem_mb(large, 1, None) - resources.validation_mem_mb(large, 2, None)
    assert 4 * weights < more < 6 * weights


def test_memory_of_validation_of_another_program_is_that_of_the_profile():
    program = {"command": ["python"]}
    config = resolve(checked(Config, {"program": program}, "the test"))
    assert resources.validation_mem_mb(config, 2, {"mem_mb": 300}) == 300
    assert resources.validation_mem_mb(config, 2, {}) == resources.PROGRAM_MB


def test_settings_are_in_the_project_and_not_beside_the_results(run):
    workflow_command.keep_settings({run.run: run}, None, lambda name: 5000, submits=False)
    assert settings_file(run.run).exists() and not RunPaths.of(run).root.exists()


# --- --config for the allocation of one command ---------------------------------------------------


@pytest.fixture
def given(tmp_path, monkeypatch):
    """given(config, sheet): Snakemake's settings for --config, in a project with this sample sheet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("train: {max_steps: 3}\n")

    def make(config, sheet="run\nbase\n"):
        (tmp_path / "config/runs.tsv").write_text(sheet)
        return ConfigSettings(config=config)

    return make


def test_nodes_of_one_command_are_no_config_and_hold_for_all_runs(given):
    settings = given({"nodes": 8, "partition": "big", "train": {"seed": 2}}, "run\na\nb\n")
    assert runs.read_config(settings) == {"train": {"max_steps": 3, "seed": 2}}
    found = runs.read_layouts(settings, {"nodes": 2, "tasks_per_node": 4}, main=True)
    assert found == {run: {"nodes": 8, "slurm_partition": "big"} for run in "ab"}


def test_values_in_a_section_of_the_command_line_are_those_of_a_file(given):
    given({})
    words = [
        'train={"decay_steps": null, "mix": {"web": 0.7, "code": 1}, "compile": true}',
        'tokenize={"document_separator": null, "eos_token": "null"}',
        "train={max_steps: 30, schedule: wsd}",
        "nodes=2",
    ]
    settings = ConfigSettings(config=parse_config(words), config_args=words)
    assert runs.read_config(settings) == {
        "train": {
            **{"decay_steps": None, "mix": {"web": 0.7, "code": 1}, "compile": True},
            **{"max_steps": 30, "schedule": "wsd"},
        },
        "tokenize": {"document_separator": None, "eos_token": "null"},
    }


def test_truth_and_nothing_on_the_command_line_are_those_of_a_file(given):
    given({})
    words = ["plugins_may_change=true", "parent=null", "runs=x.tsv", "deterministic=False"]
    settings = ConfigSettings(config=parse_config(words), config_args=words)
    found = runs.read_config(settings)
    assert (found["plugins_may_change"], found["parent"]) == (True, None)
    assert (found["runs"], found["deterministic"]) == ("x.tsv", False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("node", "nodes"), ("ranks_per_node", "tasks_per_node"), ("partitions", "partition")],
)
def test_misspelt_key_of_one_command_is_named(given, name, meant):
    with pytest.raises(ConfigError, match=rf"{name}=8, .*did you mean {meant}\?"):
        runs.read_config(given({name: 8}))
    runs.read_config(given({"result": 8, "runs": "x"}))  # others are refused with the config


def test_nodes_that_the_sheet_has_as_well_are_refused_by_the_cell(given):
    sheet = "run\tnodes\na\t\nb\t4\n"
    with pytest.raises(ConfigError, match=r"nodes=8, and config/runs.tsv, line 3 \(run b\).*: 4"):
        runs.read_layouts(given({"nodes": 8}, sheet), {}, main=True)


def test_every_word_of_a_rules_shell_line_is_quoted():
    """Blanks and shell characters in the path of a profile must be no words and no commands."""
    rules = sorted((REPOSITORY / "workflow").rglob("*.smk"))
    lines = [part for rule in rules for part in re.split(r"\n    shell:\n", rule.read_text())[1:]]
    words = [word for line in lines for word in re.findall(r"{[^{}]+}", line.split("\n\n")[0])]
    assert len(words) > 30
    assert {word for word in words if not word.endswith(":q}")} == {"{threads}"}


@pytest.fixture
def at_exit(monkeypatch):
    """What is called at the exit of this process."""
    called = []
    monkeypatch.setattr(workflow_command.atexit, "register", called.append)
    return called


def test_end_of_a_dry_run_is_looked_at_from_the_project(run, at_exit, monkeypatch):
    """With --directory, Snakemake has gone back before: it looked for results where it was called."""
    project, seen = Path.cwd(), []
    workflow = SimpleNamespace(dryrun=True)
    workflow_command.end_with_table(workflow, {"base": run}, lambda: seen.append(Path.cwd()))
    monkeypatch.chdir(project.parent)
    at_exit[0]()
    assert (seen, Path.cwd()) == ([project], project.parent)


def test_table_that_cannot_be_made_is_no_traceback(run, at_exit, monkeypatch):
    def print_end(_):
        raise UnfitError("cannot read a file of the run")

    monkeypatch.setattr(workflow_command, "print_end", print_end)
    workflow = SimpleNamespace(dryrun=False, executor_plugin="local", touch=False)
    workflow_command.end_with_table(workflow, {"base": run}, lambda: None)
    at_exit[0]()


def test_a_disk_that_cannot_be_written_is_not_waited_for(run, monkeypatch):
    Path(run.results).write_text("a file where the directory of results should be")
    monkeypatch.setattr(workflow_command.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(UnfitError, match="cannot write"):
        taken_over(run, print)


def taken_over(run, say):
    """take_over of a command that was given in the directory above the project's."""
    waits, above = Slurm(when_running="wait"), str(Path.cwd().parent)
    workflow_command.take_over({"base": run}, waits, say, submits=False, given_in=above)


def test_holder_that_cannot_be_judged_is_waited_for_and_what_to_do_if_it_is_dead_is_said_once(
    run, monkeypatch
):
    """A Snakemake on another login node; behind the wait the command is given again, where it was."""
    path, above = RunPaths.of(run).root.absolute() / WORKFLOW_LOCK, Path.cwd().parent
    holder = replace(Process.current(), host="login2", boot_id="of login2").to_json()
    Lock(**holder, cluster=None, command="snakemake", restart=0).write(path)
    pauses, said, begun = [], [], []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            path.unlink()

    def execv(*_):
        begun.append(Path.cwd())
        sys.exit()

    monkeypatch.setattr(workflow_command.time, "sleep", sleep)
    monkeypatch.setattr(workflow_command.os, "execv", execv)
    with pytest.raises(SystemExit):
        taken_over(run, said.append)
    [told] = said
    assert told.startswith("waiting: ") and "on login2" in told
    assert f"rm {Path(run.results) / 'base' / WORKFLOW_LOCK}" in told
    assert (len(pauses), begun) == (3, [above])
