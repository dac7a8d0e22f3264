# Results of a trained run: an independent validation, export and a report.
localrules:
    report_run,
    compare_runs,


rule validate_run:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        trained=f"{FORGE.results}/{{run}}/trained.json",
        settings=FORGE.settings_of("validate_run"),
    output:
        report(
            f"{FORGE.results}/{{run}}/validated.json",
            caption="../report/validated.rst",
            category="{run}",
            labels={"result": "record of the validation"},
        ),
    log:
        f"{FORGE.results}/{{run}}/logs/validate.log",
    conda:
        "../envs/forge.yaml"
    resources:
        # On one node. set-resources of the profile wins.
        mem_mb=FORGE.validation_mem_mb,
    params:
        # The config as it was when the workflow started, not the one beside the results.
        config=FORGE.settings_of("config_run"),
    shell:
        "exec forge validate {params.config:q} --settings={input.settings:q} --log={log:q}"


# Not part of `train`: a directory that other software loads, by the target `export`.
rule export_run:
    input:
        f"{FORGE.results}/{{run}}/validated.json",
    output:
        f"{FORGE.results}/{{run}}/exported.json",
    log:
        f"{FORGE.results}/{{run}}/logs/export.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=FORGE.settings_of("config_run"),
        run=lambda w: f"{FORGE.results}/{w.run}",
    shell:
        "exec forge export {params.run:q} --config={params.config:q} --log={log:q}"


rule compare_runs:
    input:
        FORGE.files_of(FORGE.runs.keys() - FORGE.failed.keys(), "validated.json"),
        FORGE.wanted_files("compare", FORGE.runs.keys() - FORGE.failed.keys()),
        FORGE.settings["compare_runs"][FORGE.comparison],
    output:
        report(
            FORGE.comparison,
            caption="../report/compare.rst",
            category="comparison",
            labels={"result": "comparison of the runs"},
        ),
    log:
        f"{FORGE.results}/compare.log",
    conda:
        "../envs/forge.yaml"
    params:
        runs=[f"{FORGE.results}/{run}" for run in FORGE.runs],
    shell:
        "exec forge compare {params.runs:q} --html={output:q} --log={log:q}"


rule report_run:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        trained=f"{FORGE.results}/{{run}}/trained.json",
        validated=f"{FORGE.results}/{{run}}/validated.json",
    output:
        report(
            f"{FORGE.results}/{{run}}/report.html",
            caption="../report/report.rst",
            category="{run}",
            labels={"result": "report"},
        ),
    log:
        f"{FORGE.results}/{{run}}/logs/report.log",
    conda:
        "../envs/forge.yaml"
    shell:
        "exec forge report {input.config:q} --log={log:q}"
