# Results of a trained run: an independent validation, an export.


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
