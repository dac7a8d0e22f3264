# What is said of a trained run: an independent validation, and a page to look at.
localrules:
    report_run,


rule validate_run:
    input:
        config=ancient(f"{RESULTS}/{{run}}/config.json"),
        fit=f"{RESULTS}/{{run}}/fit.json",
    output:
        report(
            f"{RESULTS}/{{run}}/validated.json",
            caption="../report/validated.rst",
            category="{run}",
        ),
    params:
        settings=lambda w: sections(RUNS[w.run], "validate", "report"),
    log:
        f"{RESULTS}/{{run}}/logs/validate.log",
    shell:
        "exec forge validate {input.config:q} --log={log}"


rule report_run:
    input:
        config=ancient(f"{RESULTS}/{{run}}/config.json"),
        fit=f"{RESULTS}/{{run}}/fit.json",
        validated=f"{RESULTS}/{{run}}/validated.json",
    output:
        report(
            f"{RESULTS}/{{run}}/report.html",
            caption="../report/report.rst",
            category="{run}",
        ),
    log:
        f"{RESULTS}/{{run}}/logs/report.log",
    shell:
        "exec forge report {input.config:q} --log={log}"
