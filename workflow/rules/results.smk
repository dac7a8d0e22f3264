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
    resources:
        # Of one node. What set-resources of the profile says wins.
        mem_mb=validation_mem_mb,
    params:
        overrides=lambda w: as_overrides(RUNS[w.run], "validate", "report"),
    shell:
        "exec forge validate {input.config:q} --log={log:q} {params.overrides:q}"


# Not part of `train`: a directory that other software loads, by the target `export`.
rule export_run:
    input:
        f"{RESULTS}/{{run}}/validated.json",
    output:
        f"{RESULTS}/{{run}}/exported.json",
    log:
        f"{RESULTS}/{{run}}/logs/export.log",
    conda:
        "../envs/forge.yaml"
    params:
        run=lambda w: f"{RESULTS}/{w.run}",
    shell:
        "exec forge export {params.run:q} --log={log:q}"


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
