"""Subcommands that make what runs read: tokenizer, tokens, weights, inputs."""

from __future__ import annotations

import argparse
from functools import partial

from forge.commands.of_options import resolved_config_of
from forge.commands.subcommands import Subcommands
from forge.core.errors import ConfigError


def add_data_steps(subcommands: Subcommands) -> None:
    """Add the subcommands for data that several runs may share."""
    add = partial(subcommands.with_config, of_rule=True)
    add("tokenizer", _tokenizer, "train, copy or download the tokenizer")
    tokenize = add("tokenize", _tokenize, "tokenize the corpus into shards of token ids")
    tokenize.add_argument(
        "--workers", type=int, metavar="N", help="processes (default and most: one per core)"
    )
    add("sources", _sources, "list the tokens of all sources, after tokenize")
    add("model", _model, "find or download the pretrained weights of model.init")
    add("inputs", _inputs, "download inputs from a hub, digest those of a program")


def _cores(options: argparse.Namespace) -> int:
    from forge.hosts.network import available_cores

    cores = available_cores()
    if options.workers is not None and options.workers < 1:
        raise ConfigError(
            f"--workers is {options.workers}, but must be 1 or more",
            fix=f"leave it out for one process per core ({cores} here)",
        )
    return min(options.workers or cores, cores)  # more would only compete for the cores


def _tokenizer(options: argparse.Namespace) -> None:
    from forge.core.paths import tokenizer_folder
    from forge.data.tokenizer import build_tokenizer
    from forge.hosts.lock import shared_lock

    config = resolved_config_of(options)
    with shared_lock(tokenizer_folder(config.data, config.ids.tokenizer), "tokenizer"):
        build_tokenizer(config)


def _tokenize(options: argparse.Namespace) -> None:
    from forge.core.paths import tokens_folder
    from forge.data.content_ids import single_corpora
    from forge.data.tokenize import tokenize
    from forge.hosts.lock import shared_lock

    config = resolved_config_of(options)
    for corpus in single_corpora(config):
        with shared_lock(tokens_folder(corpus.data, corpus.ids.tokens), "tokenize"):
            tokenize(corpus, workers=_cores(options))
    if config.ids.sources:
        _sources(options)


def _sources(options: argparse.Namespace) -> None:
    from forge.core.paths import tokens_folder
    from forge.data.sources import list_sources
    from forge.hosts.lock import shared_lock

    config = resolved_config_of(options)
    if not config.ids.sources:
        raise ConfigError(
            f"{options.config} has no tokenize.sources", fix="a single corpus needs no such step"
        )
    with shared_lock(tokens_folder(config.data, config.ids.tokens), "sources"):
        list_sources(config)


def _model(options: argparse.Namespace) -> None:
    from forge.core.paths import model_folder
    from forge.hosts.lock import shared_lock
    from forge.trainer.pretrained import make_model

    config = resolved_config_of(options)
    if not config.ids.model:
        raise ConfigError(
            f"{options.config} has no model.init", fix="a run from scratch needs no such step"
        )
    with shared_lock(model_folder(config.data, config.ids.model), "model"):
        make_model(config)


def _inputs(options: argparse.Namespace) -> None:
    from forge.core.paths import inputs_folder
    from forge.data.content_ids import single_corpora
    from forge.data.inputs import make_inputs
    from forge.hosts.lock import shared_lock

    named = [corpus for corpus in single_corpora(resolved_config_of(options)) if corpus.ids.inputs]
    if not named:
        raise ConfigError(
            f"{options.config} has no program.inputs, and no hf:// URL in tokenize.inputs",
            fix="a run without them needs no such step",
        )
    for config in named:
        with shared_lock(inputs_folder(config.data, config.ids.inputs), "inputs"):
            make_inputs(config)
