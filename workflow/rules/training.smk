# One allocation per run: what stage puts on a node is there for training, and preflight tests the very
# nodes that train. Never outputs, because Snakemake deletes those: checkpoints, metrics, events, logs.
localrules:
    config_run,
    parent_run,
    known_failure_run,


# Requested in place of the results of a run that failed with the same config. This rule fails at once
# with the message, so that nothing is submitted for the run; with keep-going the other runs continue.
rule known_failure_run:
    output:
        # Never made.
        f"{FORGE.results}/{{run}}/.allocation/none",
    log:
        f"{FORGE.results}/{{run}}/logs/known_failure.log",
    conda:
        "../envs/forge.yaml"
    params:
        message=lambda w: FORGE.failed[w.run],
    shell:
        "echo {params.message:q} | tee {log:q} >&2; exit 70"


rule config_run:
    input:
        # When what training depends on changes, the run trains on. The sections of later rules are inputs
        # of those.
        FORGE.settings_of("config_run"),
    output:
        f"{FORGE.results}/{{run}}/config.json",
    log:
        f"{FORGE.results}/{{run}}/logs/config.log",
    conda:
        "../envs/forge.yaml"
    shell:
        "exec forge config {input:q} --log={log:q}"


# A run waits until its parent has trained, if the parent is in the sample sheet. After its first launch a
# run no longer depends on its parent: this job is gone, and the parent may train further or leave the
# sheet. (ancient() would not do. Where a job has to run, Snakemake looks at no
# job downstream of it by itself, and ancient() stops it from reaching them: missing outputs and changed
# params, up to the target's, would be found by the next command only.)
rule parent_run:
    input:
        lambda w: FORGE.files_of([FORGE.waiting[w.run]], "trained.json"),
    output:
        touch(f"{FORGE.results}/{{run}}/.parent_trained"),
    wildcard_constraints:
        run=FORGE.one_of(FORGE.waiting),


rule stage_run:
    input:
        parent=FORGE.parent_of,
        config=f"{FORGE.results}/{{run}}/config.json",
        data=lambda w: FORGE.staged_data(FORGE.runs[w.run]),
    output:
        temp(f"{FORGE.results}/{{run}}/.allocation/stage.json"),
    log:
        f"{FORGE.results}/{{run}}/logs/stage.log",
    group:
        FORGE.allocation_of
    conda:
        "../envs/forge.yaml"
    resources:
        **FORGE.allocation.whole,
        slurm_extra=FORGE.allocation_extra,
    shell:
        "exec forge stage {input.config:q} --machine={resources.machine:q} --log={log:q}"
        " --nodes={resources.train_nodes:q} --ranks-per-node={resources.tasks_per_node:q}"


rule preflight_run:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        stage=f"{FORGE.results}/{{run}}/.allocation/stage.json",
    output:
        temp(f"{FORGE.results}/{{run}}/.allocation/preflight.json"),
    log:
        f"{FORGE.results}/{{run}}/logs/preflight.log",
    group:
        FORGE.allocation_of
    conda:
        "../envs/forge.yaml"
    resources:
        **FORGE.allocation.whole,
        slurm_extra=FORGE.allocation_extra,
    shell:
        "exec forge preflight {input.config:q} --machine={resources.machine:q} --log={log:q}"
        " --nodes={resources.train_nodes:q} --ranks-per-node={resources.tasks_per_node:q}"


rule train_run:
    input:
        config=f"{FORGE.results}/{{run}}/config.json",
        data=lambda w: FORGE.data_of(FORGE.runs[w.run]),
        stage=f"{FORGE.results}/{{run}}/.allocation/stage.json",
        preflight=f"{FORGE.results}/{{run}}/.allocation/preflight.json",
    output:
        f"{FORGE.results}/{{run}}/trained.json",
    log:
        f"{FORGE.results}/{{run}}/logs/train.log",
    group:
        FORGE.allocation_of
    conda:
        "../envs/forge.yaml"
    resources:
        **FORGE.allocation.own,
        slurm_extra=FORGE.allocation_extra,
    params:
        # Trackers and evaluations, which may change without training again: always the same name.
        settings=lambda w: FORGE.settings_file(w.run),
    shell:
        "exec forge train {input.config:q} --machine={resources.machine:q} --log={log:q}"
        " --settings={params.settings:q}"
        " --nodes={resources.train_nodes:q} --ranks-per-node={resources.tasks_per_node:q}"
