# Pages for people: a report of each run, and one that compares all of them.
from forge.plugins.pages.flow import comparison


localrules:
    report,
    report_run,
    compare,
    compare_runs,


rule report:
    input:
        FORGE.files_of(FORGE.runs, "report.html"),


rule compare:
    input:
        comparison(FORGE.results),


rule report_run:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        trained=f"{FORGE.results}/{{run}}/trained.json",
        validated=f"{FORGE.results}/{{run}}/validated.json",
    output:
        report(
            f"{FORGE.results}/{{run}}/report.html",
            caption="captions/report.rst",
            category="{run}",
            labels={"result": "report"},
        ),
    log:
        f"{FORGE.results}/{{run}}/logs/report.log",
    conda:
        FORGE.environment
    shell:
        "exec forge report {input.config:q} --log={log:q}"


rule compare_runs:
    input:
        FORGE.files_of(FORGE.runs.keys() - FORGE.failed.keys(), "validated.json"),
        FORGE.wanted_files("compare", FORGE.runs.keys() - FORGE.failed.keys()),
        FORGE.settings["compare_runs"][comparison(FORGE.results)],
    output:
        report(
            comparison(FORGE.results),
            caption="captions/compare.rst",
            category="comparison",
            labels={"result": "comparison of the runs"},
        ),
    log:
        f"{FORGE.results}/compare.log",
    conda:
        FORGE.environment
    params:
        runs=[f"{FORGE.results}/{run}" for run in FORGE.runs],
    shell:
        "exec forge compare {params.runs:q} --html={output:q} --log={log:q}"
