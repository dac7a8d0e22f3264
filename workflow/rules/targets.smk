# What to ask for. Targets have no wildcards and work over all runs of the sample sheet.
localrules:
    train,
    resume,
    preflight,
    validate,
    report,


rule train:
    default_target: True
    input:
        expand(f"{RESULTS}/{{run}}/validated.json", run=RUNS),
        expand(f"{RESULTS}/{{run}}/report.html", run=RUNS),


rule resume:
    input:
        resumed_files,


rule preflight:
    input:
        expand(f"{RESULTS}/{{run}}/.allocation/preflight.json", run=RUNS),


rule validate:
    input:
        expand(f"{RESULTS}/{{run}}/validated.json", run=RUNS),


rule report:
    input:
        expand(f"{RESULTS}/{{run}}/report.html", run=RUNS),
