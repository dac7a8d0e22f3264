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
        f"{RESULTS}/{{run}}/.allocation/none",
    log:
        f"{RESULTS}/{{run}}/logs/known_failure.log",
    conda:
        "../envs/forge.yaml"
    params:
        message=lambda w: FAILED[w.run],
    shell:
        "echo {params.message:q} | tee {log:q} >&2; exit 70"


rule config_run:
    input:
        # When what training depends on changes, the run trains on. The sections of later rules are inputs
        # of those.
        settings_of("config_run"),
    output:
        f"{RESULTS}/{{run}}/config.json",
    log:
        f"{RESULTS}/{{run}}/logs/config.log",
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
        lambda w: files_of([WAITING[w.run]], "trained.json"),
    output:
        touch(f"{RESULTS}/{{run}}/.parent_trained"),
    wildcard_constraints:
        run=one_of(WAITING),


rule stage_run:
    input:
        parent=parent_of,
        config=f"{RESULTS}/{{run}}/config.json",
        data=lambda w: staged_data(RUNS[w.run]),
    output:
        temp(f"{RESULTS}/{{run}}/.allocation/stage.json"),
    log:
        f"{RESULTS}/{{run}}/logs/stage.log",
    group:
        allocation_of
    conda:
        "../envs/forge.yaml"
    resources:
        **ALLOCATION.whole,
        slurm_extra=allocation_extra,
    shell:
        "exec forge stage {input.config:q} --machine={resources.machine:q} --log={log:q}"
        " --nodes={resources.train_nodes:q} --ranks-per-node={resources.tasks_per_node:q}"


rule preflight_run:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        stage=f"{RESULTS}/{{run}}/.allocation/stage.json",
    output:
        temp(f"{RESULTS}/{{run}}/.allocation/preflight.json"),
    log:
        f"{RESULTS}/{{run}}/logs/preflight.log",
    group:
        allocation_of
    conda:
        "../envs/forge.yaml"
    resources:
        **ALLOCATION.whole,
        slurm_extra=allocation_extra,
    shell:
        "exec forge preflight {input.config:q} --machine={resources.machine:q} --log={log:q}"
        " --nodes={resources.train_nodes:q} --ranks-per-node={resources.tasks_per_node:q}"


rule train_run:
    input:
        config=f"{RESULTS}/{{run}}/config.json",
        data=lambda w: data_of(RUNS[w.run]),
        stage=f"{RESULTS}/{{run}}/.allocation/stage.json",
        preflight=f"{RESULTS}/{{run}}/.allocation/preflight.json",
    output:
        f"{RESULTS}/{{run}}/trained.json",
    log:
        f"{RESULTS}/{{run}}/logs/train.log",
    group:
        allocation_of
    conda:
        "../envs/forge.yaml"
    resources:
        **ALLOCATION.own,
        slurm_extra=allocation_extra,
    params:
        # Trackers and evaluations, which may change without training again: always the same name.
        settings=lambda w: helpers.settings_file(w.run),
    shell:
        "exec forge train {input.config:q} --machine={resources.machine:q} --log={log:q}"
        " --settings={params.settings:q}"
        " --nodes={resources.train_nodes:q} --ranks-per-node={resources.tasks_per_node:q}"
