# The loss of a larger run, forecast by a fit of small ones.
from forge.plugins.ladder.flow import outcomes, rungs


localrules:
    ladder,
    ladder_forecast,


rule ladder:
    input:
        f"{FORGE.results}/ladder.html",


# Forecasts are in the logs of the larger runs, which are no outputs. Their own results are read where they
# are there, for the page.
rule ladder_forecast:
    input:
        lambda w: rungs(FORGE),
        lambda w: outcomes(FORGE),
        rows=FORGE.settings["ladder_forecast"].values(),
    output:
        f"{FORGE.results}/ladder.json",
        f"{FORGE.results}/ladder.html",
    log:
        f"{FORGE.results}/ladder.log",
    conda:
        FORGE.environment
    shell:
        "exec forge forecast {input.rows:q} --log={log:q}"
