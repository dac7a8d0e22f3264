# Tokenizers, tokens and pretrained weights: shared by every run with the same settings and inputs, named by content id.
# The config of an artefact is a param, written when the workflow starts, and no input: equal ids mean
# equal artefacts, so no other key of a run, and no other spelling of its inputs, makes one again.
localrules:
    tokenizer,
    sources,
    inputs,
    model,


rule tokenizer:
    input:
        inputs=FORGE.corpus_of_tokenizer,
    output:
        f"{FORGE.data}/tokenizers/{{tokenizer}}/manifest.json",
    log:
        f"{FORGE.data}/logs/tokenizer-{{tokenizer}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{FORGE.data}/tokenizers/{{tokenizer}}/config.json",
    shell:
        "exec forge tokenizer {params.config:q} --log={log:q}"


# A corpus, or one of tokenize.sources.
rule tokenize:
    input:
        tokenizer=lambda w: FORGE.tokenizer_manifest(FORGE.tokens[w.tokens]),
        inputs=lambda w: FORGE.corpus_of(FORGE.tokens[w.tokens]),
    output:
        f"{FORGE.data}/tokens/{{tokens}}/manifest.json",
    log:
        f"{FORGE.data}/logs/tokenize-{{tokens}}.log",
    wildcard_constraints:
        tokens=FORGE.one_of(FORGE.tokens),
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{FORGE.data}/tokens/{{tokens}}/config.json",
    shell:
        "exec forge tokenize {params.config:q} --workers={threads} --log={log:q}"


# The list of the tokens of a run's sources.
rule sources:
    input:
        lambda w: FORGE.source_manifests(FORGE.sources[w.tokens]),
    output:
        f"{FORGE.data}/tokens/{{tokens}}/manifest.json",
    log:
        f"{FORGE.data}/logs/sources-{{tokens}}.log",
    wildcard_constraints:
        tokens=FORGE.one_of(FORGE.sources),
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{FORGE.data}/tokens/{{tokens}}/config.json",
    shell:
        "exec forge sources {params.config:q} --log={log:q}"


# The weights that runs start from stay where they are: this checks them, and makes their digests.
rule model:
    output:
        f"{FORGE.data}/models/{{model}}/manifest.json",
    log:
        f"{FORGE.data}/logs/model-{{model}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{FORGE.data}/models/{{model}}/config.json",
    shell:
        "exec forge model {params.config:q} --log={log:q}"


# The input files of another training program, which stay where they are; or the files of a corpus on a hub.
rule inputs:
    output:
        f"{FORGE.data}/inputs/{{inputs}}/manifest.json",
    log:
        f"{FORGE.data}/logs/inputs-{{inputs}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{FORGE.data}/inputs/{{inputs}}/config.json",
    shell:
        "exec forge inputs {params.config:q} --log={log:q}"
