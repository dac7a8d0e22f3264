# Intervals of a run trained again, and a certificate of how they ended.
from forge.plugins.attestation import flow as again


localrules:
    reproduce,


rule reproduce:
    input:
        FORGE.files_of(FORGE.runs, "reproduced.json"),


# Not part of `train`: intervals of the run are trained again, by the target `reproduce`. The certificate,
# also a negative one, is beside the export, and no output.
rule reproduce_run:
    input:
        f"{FORGE.results}/{{run}}/exported.json",
    output:
        f"{FORGE.results}/{{run}}/reproduced.json",
    log:
        f"{FORGE.results}/{{run}}/logs/reproduce.log",
    conda:
        FORGE.environment
    # A core for each rank is enough.
    threads: lambda w: FORGE.allocation.layout(w.run).world_size
    resources:
        # Nodes like those that have trained, on which the last bits depend, and one that is none of these.
        # set-resources of the profile wins.
        **again.resources(FORGE),
        mem_mb=lambda w: again.mem_mb(FORGE, w.run),
        slurm_extra=lambda w, threads: again.slurm_extra(FORGE, w.run, threads),
    params:
        config=FORGE.settings_of("config_run"),
        run=lambda w: f"{FORGE.results}/{w.run}",
        # That of the user's config, as training runs it.
        trust=lambda w: [] if FORGE.runs[w.run].ids.tokens else ["--trust-program"],
    shell:
        "exec forge reproduce {params.run:q} --config={params.config:q} --log={log:q}"
        " {params.trust:q}"
        # A quarter of the time for each of the three intervals.
        " --minutes=$(({resources.runtime:q} / 4))"
