"""Subcommand `forge evaluate`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from forge.attestation.verify import path_option
from forge.commands.of_options import config_of, use_settings
from forge.commands.subcommands import Subcommands, its_config_option, settings_option
from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.plugins.evaluation.settings import Evaluate


def add_evaluate(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.with_config(
        "evaluate",
        _evaluate,
        "score checkpoints of a run by tasks of the lm-evaluation-harness",
        "config.yaml, directory or name of a run, or directory of one of its checkpoints",
    )
    its_config_option(parser)
    settings_option(parser)
    parser.add_argument(
        "--download",
        action="store_true",
        help="only put the data of the tasks into the cache, on a node with internet",
    )
    parser.add_argument(
        "--verify",
        metavar="STATEMENT",
        type=path_option,
        help="only search --texts again for the tasks of CONFIG, and compare: step-….contamination.json",
    )
    parser.add_argument(
        "--texts",
        metavar="DIR",
        type=os.path.expanduser,
        help="with the text files of the statement",
    )


def _evaluate(options: argparse.Namespace) -> None:
    from forge.plugins.evaluation import tasks

    use_settings(options)
    paths, checkpoint, config, is_ours = _to_evaluate(options)
    evaluate = config.of(Evaluate)
    tasks.refuse_missing_package(evaluate, options.config)
    if options.download:
        tasks.download(paths, evaluate)
        return
    tasks.go_offline()
    from forge.plugins.evaluation import contamination_statement as statement
    from forge.plugins.evaluation import evaluate as scores

    scores.refuse_no_tasks(paths, evaluate)
    if options.verify or options.texts:
        if not (options.verify and options.texts):
            raise ConfigError("--verify STATEMENT and --texts DIR belong together", fix="give both")
        loaded = tasks.load(tasks.find_tasks(evaluate), evaluate, paths)
        statement.verify_statement(options.verify, options.texts, loaded)
    elif checkpoint:
        scores.evaluate_checkpoint(checkpoint, evaluate, config.data, is_ours=is_ours)
    elif (share := evaluate.contamination) is None:
        scores.evaluate_run(paths, evaluate, config.data, is_ours=is_ours)
    else:  # the texts first: what is gone is told before anything is scored
        searched = statement.search_run(paths, config, share, is_ours=is_ours)
        scores.evaluate_run(paths, evaluate, config.data, is_ours=is_ours)
        statement.write_statements(paths, searched)


def _to_evaluate(options: argparse.Namespace) -> tuple[Any, Path | None, Config, bool]:
    """Paths of the run, the checkpoint if one is named, the config, and whether the run is the user's."""
    from forge.core.paths import RunPaths
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import directory_of, run_of, trusted

    is_file = Path(options.config).is_file()
    place = directory_of(options.config) if is_file else find_runs([options.config])[0]
    if place is None:
        config = config_of(options)
        return RunPaths.of(config), None, config, True
    run = run_of(place)
    accepted = trusted(run, options.its_config, options.overrides, "evaluate", "data")
    checkpoint = place.root.resolve() if run is not place else None
    return run, checkpoint, accepted.config, accepted.is_ours
