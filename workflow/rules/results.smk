# What is said of a trained run: an independent validation, and a page to look at.
localrules:
    report_run,


rule validate_run:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        trained=f"{RESULTS}/{{run}}/trained.json",
    output:
        report(
            f"{RESULTS}/{{run}}/validated.json",
            caption="../report/validated.rst",
            category="{run}",
        ),
    log:
        f"{RESULTS}/{{run}}/logs/validate.log",
    conda:
        "../envs/forge.yaml"
    params:
        overrides=lambda w: as_overrides(RUNS[w.run], "validate", "report"),
    shell:
        "exec forge validate {input.config:q} --log={log:q} {params.overrides:q}"


rule report_run:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        trained=f"{RESULTS}/{{run}}/trained.json",
        validated=f"{RESULTS}/{{run}}/validated.json",
    output:
        report(
            f"{RESULTS}/{{run}}/report.html",
            caption="../report/report.rst",
            category="{run}",
        ),
    log:
        f"{RESULTS}/{{run}}/logs/report.log",
    conda:
        "../envs/forge.yaml"
    shell:
        "exec forge report {input.config:q} --log={log:q}"
