# Scores of checkpoints by tasks of the lm-evaluation-harness.
from forge.plugins.evaluation.flow import evaluated
from forge.plugins.evaluation.settings import Evaluate
from forge.plugins.evaluation.tasks import task_files


localrules:
    evaluate,
    evaluate_data,


rule evaluate:
    input:
        lambda w: FORGE.files_of(evaluated(FORGE.runs), "evaluation.json"),


# On this machine, since nodes of a cluster have no internet: the data of the tasks, into the cache of
# Hugging Face's `datasets`.
rule evaluate_data:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        settings=FORGE.settings_of("evaluate_data"),
        tasks=lambda w: task_files(FORGE.runs[w.run].of(Evaluate)),
    output:
        f"{FORGE.results}/{{run}}/evaluations/data.json",
    log:
        f"{FORGE.results}/{{run}}/logs/evaluate_data.log",
    conda:
        FORGE.environment
    params:
        config=FORGE.settings_of("config_run"),
    shell:
        "exec forge evaluate {params.config:q} --settings={input.settings:q} --download --log={log:q}"


# Not part of `train`: the last checkpoint, and what jobs during training have not evaluated.
rule evaluate_run:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        trained=f"{FORGE.results}/{{run}}/trained.json",
        data=f"{FORGE.results}/{{run}}/evaluations/data.json",
        settings=FORGE.settings_of("evaluate_run"),
        tasks=lambda w: task_files(FORGE.runs[w.run].of(Evaluate)),
    output:
        f"{FORGE.results}/{{run}}/evaluation.json",
    log:
        f"{FORGE.results}/{{run}}/logs/evaluate.log",
    conda:
        FORGE.environment
    resources:
        # As much as validation needs. set-resources of the profile wins.
        mem_mb=FORGE.validation_mem_mb,
    params:
        config=FORGE.settings_of("config_run"),
    shell:
        "exec forge evaluate {params.config:q} --settings={input.settings:q} --log={log:q}"
