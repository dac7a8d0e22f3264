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
        inputs=corpus_of_tokenizer,
    output:
        f"{DATA}/tokenizers/{{tokenizer}}/manifest.json",
    log:
        f"{DATA}/logs/tokenizer-{{tokenizer}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{DATA}/tokenizers/{{tokenizer}}/config.json",
    shell:
        "exec forge tokenizer {params.config:q} --log={log:q}"


# A corpus, or one of tokenize.sources.
rule tokenize:
    input:
        tokenizer=lambda w: tokenizer_manifest(TOKENS[w.tokens]),
        inputs=lambda w: corpus_of(TOKENS[w.tokens]),
    output:
        f"{DATA}/tokens/{{tokens}}/manifest.json",
    log:
        f"{DATA}/logs/tokenize-{{tokens}}.log",
    wildcard_constraints:
        tokens=one_of(TOKENS),
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{DATA}/tokens/{{tokens}}/config.json",
    shell:
        "exec forge tokenize {params.config:q} --workers={threads} --log={log:q}"


# The list of the tokens of a run's sources.
rule sources:
    input:
        lambda w: source_manifests(SOURCES[w.tokens]),
    output:
        f"{DATA}/tokens/{{tokens}}/manifest.json",
    log:
        f"{DATA}/logs/sources-{{tokens}}.log",
    wildcard_constraints:
        tokens=one_of(SOURCES),
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{DATA}/tokens/{{tokens}}/config.json",
    shell:
        "exec forge sources {params.config:q} --log={log:q}"


# The weights that runs start from stay where they are: this checks them, and makes their digests.
rule model:
    output:
        f"{DATA}/models/{{model}}/manifest.json",
    log:
        f"{DATA}/logs/model-{{model}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{DATA}/models/{{model}}/config.json",
    shell:
        "exec forge model {params.config:q} --log={log:q}"


# The input files of another training program, which stay where they are; or the files of a corpus on a hub.
rule inputs:
    output:
        f"{DATA}/inputs/{{inputs}}/manifest.json",
    log:
        f"{DATA}/logs/inputs-{{inputs}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        config=f"{DATA}/inputs/{{inputs}}/config.json",
    shell:
        "exec forge inputs {params.config:q} --log={log:q}"
