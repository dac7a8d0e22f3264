# One allocation per run: what stage puts on a node is there for fit, and preflight tests the very
# nodes that train. Never outputs, because Snakemake deletes those: checkpoints, metrics, events, logs.
localrules:
    config_run,


rule config_run:
    output:
        f"{RESULTS}/{{run}}/config.json",
    params:
        config=lambda w: json.dumps(RUNS[w.run].to_json(), sort_keys=True),
    log:
        f"{RESULTS}/{{run}}/logs/config.log",
    shell:
        "exec forge config /dev/stdin --log={log} <<< {params.config:q}"


rule stage_run:
    input:
        # ancient: params decide what a new config means, not the time it was written at.
        config=ancient(f"{RESULTS}/{{run}}/config.json"),
        tokens=tokens_manifest,
    output:
        temp(f"{RESULTS}/{{run}}/.allocation/stage.json"),
    log:
        f"{RESULTS}/{{run}}/logs/stage.log",
    group:
        "allocation"
    resources:
        machine="profiles/local/machine.yaml",
    shell:
        "exec forge stage {input.config:q} --machine={resources.machine} --log={log}"


rule preflight_run:
    input:
        config=ancient(f"{RESULTS}/{{run}}/config.json"),
        stage=f"{RESULTS}/{{run}}/.allocation/stage.json",
    output:
        temp(f"{RESULTS}/{{run}}/.allocation/preflight.json"),
    log:
        f"{RESULTS}/{{run}}/logs/preflight.log",
    group:
        "allocation"
    resources:
        machine="profiles/local/machine.yaml",
        nodes=1,
        tasks_per_node=1,
    shell:
        "exec forge preflight {input.config:q} --machine={resources.machine} --log={log}"
        " --nodes={resources.nodes} --ranks-per-node={resources.tasks_per_node}"


rule fit:
    input:
        config=ancient(f"{RESULTS}/{{run}}/config.json"),
        tokens=tokens_manifest,
        tokenizer=tokenizer_manifest,
        stage=f"{RESULTS}/{{run}}/.allocation/stage.json",
        preflight=f"{RESULTS}/{{run}}/.allocation/preflight.json",
    output:
        f"{RESULTS}/{{run}}/fit.json",
    params:
        # Science only: another machine, path or launcher never trains again.
        science=lambda w: sections(RUNS[w.run], "model", "train", "ids"),
    log:
        f"{RESULTS}/{{run}}/logs/fit.log",
    group:
        "allocation"
    resources:
        machine="profiles/local/machine.yaml",
        nodes=1,
        tasks_per_node=1,
    shell:
        "exec forge train {input.config:q} --machine={resources.machine} --log={log}"
        " --nodes={resources.nodes} --ranks-per-node={resources.tasks_per_node}"
