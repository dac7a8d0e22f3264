"""Snakefiles of users who have Forge as a module."""

from support.clone import REPOSITORY

# As `snakedeploy deploy-workflow` writes it (its templates/use_module.smk.jinja).
DEPLOYED = f"""\
from snakemake.utils import min_version


min_version("6.10.0")


configfile: "config/config.yaml"


# declare forge as a module
module forge:
    snakefile:
        "{REPOSITORY}/workflow/Snakefile"
    config:
        config


# use all rules from forge
use rule * from forge
"""

# One before Forge's rules, one after them.
OWN_RULES = """\
rule all:
    input:
        "plots/base.txt",


rule clean:
    input:
        expand("raw/{name}.txt", name=["abc", "argparse", "ast", "cmd", "codecs", "copy"]),
    output:
        "corpus/clean.txt",
    shell:
        "grep -hv '^import' {input} > {output}"


rule plot:
    input:
        "results/{run}/trained.json",
    output:
        "plots/{run}.txt",
    params:
        metrics="results/{run}/metrics.jsonl",
    shell:
        "grep loss {params.metrics} > {output}"


"""
