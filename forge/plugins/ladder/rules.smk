# The loss of a larger run, forecast by a fit of small ones.
from forge.plugins.ladder.flow import forecasts, outcomes, rungs


localrules:
    ladder,
    ladder_forecast,


rule ladder:
    input:
        f"{FORGE.results}/ladder.html",
        forecasts(FORGE),


# Forecasts are in the logs of the larger runs, which are no outputs. The own results of these are read for
# the page, where they are there.
rule ladder_forecast:
    input:
        lambda w: rungs(FORGE),
        lambda w: outcomes(FORGE),
        rows=FORGE.settings["ladder_forecast"].values(),
    output:
        f"{FORGE.results}/ladder.json",
        f"{FORGE.results}/ladder.html",
        touch(forecasts(FORGE)),
    log:
        f"{FORGE.results}/ladder.log",
    conda:
        FORGE.environment
    shell:
        "exec forge forecast {input.rows:q} --log={log:q}"
