# Results of a trained run: an independent validation, evaluation, export and a report.
localrules:
    report_run,
    evaluate_data,
    compare_runs,


rule validate_run:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        trained=f"{RESULTS}/{{run}}/trained.json",
        settings=settings_of("validate_run"),
    output:
        report(
            f"{RESULTS}/{{run}}/validated.json",
            caption="../report/validated.rst",
            category="{run}",
            labels={"result": "record of the validation"},
        ),
    log:
        f"{RESULTS}/{{run}}/logs/validate.log",
    conda:
        "../envs/forge.yaml"
    resources:
        # On one node. set-resources of the profile wins.
        mem_mb=validation_mem_mb,
    params:
        # The config as it was when the workflow started, not the one beside the results.
        config=settings_of("config_run"),
    shell:
        "exec forge validate {params.config:q} --settings={input.settings:q} --log={log:q}"


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
        config=settings_of("config_run"),
        run=lambda w: f"{RESULTS}/{w.run}",
    shell:
        "exec forge export {params.run:q} --config={params.config:q} --log={log:q}"


# Not part of `train`: intervals of the run are trained again, by the target `reproduce`. The certificate,
# also a negative one, is beside the export, and no output.
rule reproduce_run:
    input:
        f"{RESULTS}/{{run}}/exported.json",
    output:
        f"{RESULTS}/{{run}}/reproduced.json",
    log:
        f"{RESULTS}/{{run}}/logs/reproduce.log",
    conda:
        "../envs/forge.yaml"
    threads: training_ranks
    resources:
        # Nodes like those that have trained, on which the last bits depend, and one that is none of these.
        # set-resources of the profile wins.
        **REPRODUCTION,
        mem_mb=reproduction_mem_mb,
        slurm_extra=reproduction_extra,
    params:
        config=settings_of("config_run"),
        run=lambda w: f"{RESULTS}/{w.run}",
        # That of the user's config, as training runs it.
        trust=lambda w: [] if RUNS[w.run].ids.tokens else ["--trust-program"],
    shell:
        "exec forge reproduce {params.run:q} --config={params.config:q} --log={log:q}"
        " {params.trust:q}"
        # A quarter of the time for each of the three intervals.
        " --minutes=$(({resources.runtime:q} / 4))"


# On this machine, since nodes of a cluster have no internet: the data of the tasks, into the cache of
# Hugging Face's `datasets`.
rule evaluate_data:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        settings=settings_of("evaluate_run"),
        tasks=task_files_of,
    output:
        f"{RESULTS}/{{run}}/evaluations/data.json",
    log:
        f"{RESULTS}/{{run}}/logs/evaluate_data.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=settings_of("config_run"),
    shell:
        "exec forge evaluate {params.config:q} --settings={input.settings:q} --download --log={log:q}"


# Not part of `train`: the last checkpoint, and what jobs during training have not evaluated.
rule evaluate_run:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        trained=f"{RESULTS}/{{run}}/trained.json",
        data=f"{RESULTS}/{{run}}/evaluations/data.json",
        settings=settings_of("evaluate_run"),
        tasks=task_files_of,
    output:
        f"{RESULTS}/{{run}}/evaluation.json",
    log:
        f"{RESULTS}/{{run}}/logs/evaluate.log",
    conda:
        "../envs/forge.yaml"
    resources:
        # As much as validation needs. set-resources of the profile wins.
        mem_mb=validation_mem_mb,
    params:
        config=settings_of("config_run"),
    shell:
        "exec forge evaluate {params.config:q} --settings={input.settings:q} --log={log:q}"


rule compare_runs:
    input:
        files_of([run for run in RUNS if run not in FAILED], "validated.json"),
        files_of([run for run in EVALUATED if run not in FAILED], "evaluation.json"),
        SETTINGS["compare_runs"][COMPARISON],
    output:
        report(
            COMPARISON,
            caption="../report/compare.rst",
            category="comparison",
            labels={"result": "comparison of the runs"},
        ),
    log:
        f"{RESULTS}/compare.log",
    conda:
        "../envs/forge.yaml"
    params:
        runs=[f"{RESULTS}/{run}" for run in RUNS],
    shell:
        "exec forge compare {params.runs:q} --html={output:q} --log={log:q}"


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
            labels={"result": "report"},
        ),
    log:
        f"{RESULTS}/{{run}}/logs/report.log",
    conda:
        "../envs/forge.yaml"
    shell:
        "exec forge report {input.config:q} --log={log:q}"
