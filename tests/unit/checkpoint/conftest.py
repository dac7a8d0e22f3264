"""Runs of a sample sheet, as the Snakefile reads them."""

from __future__ import annotations

import json

import pytest
from snakemake.settings.types import ConfigSettings

from forge.flow import runs


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def sheet(tmp_path, results, monkeypatch):
    """sheet(rows): the runs of these rows. Other keys than `results` and `tokenize` are the defaults."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("words")
    monkeypatch.chdir(tmp_path)

    def read(text):
        (tmp_path / "runs.tsv").write_text(text)
        values = {"results": str(results), "tokenize": {"inputs": [str(corpus)]}}
        (tmp_path / "config").mkdir(exist_ok=True)
        values["runs"] = "runs.tsv"
        (tmp_path / "config/config.yaml").write_text(json.dumps(values))
        return runs.read_runs(ConfigSettings(), main=True)

    return read
