"""Files that rules read beside data: configs, and the settings by which a rule is due again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core import hooks
from forge.core.config import (
    ResolvedConfig,
)
from forge.core.files import (
    canonical,
    digest_bytes,
    disk_trouble,
    read_object_or_empty,
    write_json,
)
from forge.core.paths import (
    WORKFLOW,
    RunPaths,
    inputs_folder,
    model_folder,
    tokenizer_folder,
    tokens_folder,
)
from forge.core.records import RunSettings
from forge.data.content_ids import single_corpora


@dataclass(frozen=True)
class RuleSettings:
    """A file with settings, an input of the rule that uses them, by which Snakemake sees them change.

    As params they would be compared with Snakemake's own record, which `make clean` removes and a copied
    project lacks: a changed config would then count as done. The output says what it was made with.
    """

    name: str
    """With the digest of the values: a waiting job keeps those that it was submitted with."""
    values: Any
    output: Path
    made_with: Any
    """The same settings as the output has them; None where it does not tell."""

    @classmethod
    def of(cls, name: str, values: Any, output: Path, made_with: Any) -> RuleSettings:
        digest = digest_bytes(canonical(values))
        return cls(f"{name}-{digest[:16]}.json", values, output, made_with)

    @classmethod
    def of_sections(cls, name: str, sections: Any, output: Path, made_with: Any) -> RuleSettings:
        """Sections of the config, in a file that the job of the rule reads (--settings)."""
        head = {"format": RunSettings.FORMAT}
        recorded = head | made_with if isinstance(made_with, dict) else made_with
        return cls.of(name, head | sections, output, recorded)

    @property
    def path(self) -> Path:
        return WORKFLOW / self.name

    def write(self) -> None:
        """Make the file newer than the output if that was made with other settings, and only then. Raises
        UnfitError when the disk does not let it."""
        is_new = not self.path.exists()
        if is_new:
            write_json(self.path, self.values)
        if not self.output.exists() or (self.made_with is None and not is_new):
            return
        made = self.output.stat().st_mtime_ns
        is_newer = self.path.stat().st_mtime_ns > made
        if is_newer != (self.made_with != self.values):
            # The disk may have another clock than this machine.
            when = made if is_newer else max(time.time_ns(), made + 10**9)
            with disk_trouble(self.path):
                os.utime(self.path, ns=(when, when))


def rule_settings(runs: Mapping[str, ResolvedConfig], *, main: bool) -> dict[str, dict[str, str]]:
    """Rule -> run -> path of its settings, an input; of a rule over all runs by its output.

    main: whether to write them, False for the Snakemake inside a job. Raises UnfitError where the disk
    does not let it.
    """
    by_rule: dict[str, dict[str, RuleSettings]] = {
        "config_run": {name: _of_training(config) for name, config in runs.items()},
        "validate_run": {name: _of_validation(config) for name, config in runs.items()},
        **hooks.rule_settings(runs),
    }
    for settings in (file for by_run in by_rule.values() for file in by_run.values() if main):
        settings.write()
    return {
        rule: {run: str(settings.path) for run, settings in by_run.items()}
        for rule, by_run in by_rule.items()
    }


def _of_training(config: ResolvedConfig) -> RuleSettings:
    """Inputs that a run's training depends on."""
    output = RunPaths.of(config).config
    return RuleSettings.of(config.run, config.training_json(), output, read_object_or_empty(output))


def _of_validation(config: ResolvedConfig) -> RuleSettings:
    paths = RunPaths.of(config)
    made_with = read_object_or_empty(paths.validation).get("settings")
    name, sections = f"{config.run}.validate", config.validation_json()
    return RuleSettings.of_sections(name, sections, paths.validated, made_with)


def write_configs(runs: dict[str, ResolvedConfig], due: Iterable[Any]) -> None:
    """Write the config files that rules of shared artefacts name in their param `config`. due: jobs that
    will run.

    Only theirs, so that the config of a shared artefact is the one that it was made by. Raises UnfitError
    where the disk does not let it.
    """
    # As paths: a rule says ./data/… where the config does.
    wanted = {Path(path) for job in due if (path := job.params.get("config"))}
    for config in runs.values():
        files = _data_configs(config)
        for path in wanted & files.keys():
            write_json(path, files[path])
        wanted -= files.keys()


def _data_configs(config: ResolvedConfig) -> dict[Path, dict[str, Any]]:
    """The config files of what a run reads, by path."""
    data, configs = config.data, {}
    if config.ids.tokens:
        configs[tokenizer_folder(data, config.ids.tokenizer)] = config
        configs[tokens_folder(data, config.ids.tokens)] = config
    for corpus in single_corpora(config):
        if corpus.ids.tokens:
            configs[tokens_folder(data, corpus.ids.tokens)] = corpus
        if corpus.ids.inputs:
            configs[inputs_folder(data, corpus.ids.inputs)] = corpus
    files = {folder / "config.json": _of_data(made_by) for folder, made_by in configs.items()}
    if config.ids.model:
        # The shape is checked against the length of a sample.
        train = {"seq_len": config.train.seq_len}
        of_model = {**_of_data(config), "model": config.to_json()["model"], "train": train}
        files[model_folder(data, config.ids.model) / "config.json"] = of_model
    return files


def _of_data(config: ResolvedConfig) -> dict[str, Any]:
    values = config.of_training.to_json()
    keys = ("data", "program", "tokenizer", "tokenize", "ids")
    return {key: values[key] for key in keys if key in values}


def tokenizing(runs: dict[str, ResolvedConfig]) -> dict[str, ResolvedConfig]:
    """Content id of tokens -> config that makes them, of a run's only corpus or of one of its sources:
    whichever run has them, since the id fixes the tokenizer."""
    configs: dict[str, ResolvedConfig] = {}
    for config in runs.values():
        if config.ids.tokens:
            configs |= {corpus.ids.tokens: corpus for corpus in single_corpora(config)}
    return configs


def listing_sources(runs: dict[str, ResolvedConfig]) -> dict[str, ResolvedConfig]:
    """Content id of a list of sources -> config of a run that has them."""
    return {config.ids.tokens: config for config in runs.values() if config.ids.sources}
