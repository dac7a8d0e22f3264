"""Snakefiles of users who have Forge as a module."""

from support import pages
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

# With a rule of the user's own before Forge's, and one after them.
[WITH_OWN_RULES] = [
    block.text
    for block in pages.blocks()
    if block.kind == "snakemake" and block.page != pages.OWN_PLUGINS
]
