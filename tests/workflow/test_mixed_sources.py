"""The plan of runs with several sources: each is tokenized once, and never again for other weights."""

from __future__ import annotations

import re

import yaml

TWO = {
    "text": {"inputs": ["corpus/[a-b]*.txt"], "document_separator": "\n\n\n"},
    "code": {"inputs": ["corpus/[c-z]*.txt"], "document_separator": "\n\n\n"},
}


def jobs(output):
    """Rule -> number of jobs, from Snakemake's table."""
    table = output.partition("Job stats:")[2]
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}


def test_other_weights_tokenize_nothing(project):
    config = yaml.safe_load((project.root / "config/config.yaml").read_text())
    config["tokenize"] = {"sources": TWO, "val_fraction": 0.1}
    (project.root / "config/config.yaml").write_text(yaml.safe_dump(config))
    project.write_runs("run\ttrain.mix\nbase\t{text: 1, code: 1}\n")
    code, output = project.snakemake("-n", "train")
    assert code == 0, output
    planned = jobs(output)
    assert (planned["tokenizer"], planned["tokenize"], planned["sources"]) == (1, 2, 1)

    for verb in ("tokenizer", "tokenize"):
        done = project.forge(verb, "config/config.yaml")
        assert done.returncode == 0, done.stderr
    stages = "[{step: 0, text: 1, code: 0}, {step: 6, text: 0.5, code: 0.5}]"
    project.write_runs(f"run\ttrain.mix\nbase\t{{text: 1, code: 1}}\nannealed\t{stages}\n")
    code, output = project.snakemake("-n", "train")
    assert code == 0, output
    planned = jobs(output)
    assert planned["train_run"] == 2
    assert not {"tokenizer", "tokenize", "sources"} & planned.keys()
