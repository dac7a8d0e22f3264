# Tokenizers and tokens: shared by every run with the same settings and inputs, named by content id.
localrules:
    tokenizer,


rule tokenizer:
    output:
        f"{DATA}/tokenizers/{{tokenizer}}/manifest.json",
    log:
        f"{DATA}/logs/tokenizer-{{tokenizer}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        settings=lambda w: helpers.overrides(
            TOKENIZERS[w.tokenizer], "tokenizer", "tokenize", "ids"
        ),
        data=lambda w: DATA,
    shell:
        "exec forge tokenizer /dev/null --log={log} --data={params.data:q} {params.settings:q}"


rule tokenize:
    input:
        tokenizer_manifest,
    output:
        f"{DATA}/tokens/{{tokens}}/manifest.json",
    log:
        f"{DATA}/logs/tokenize-{{tokens}}.log",
    conda:
        "../envs/forge.yaml"
    params:
        settings=lambda w: helpers.overrides(
            TOKENS[w.tokens], "tokenizer", "tokenize", "ids"
        ),
        data=lambda w: DATA,
    shell:
        "exec forge tokenize /dev/null --workers={threads} --log={log}"
        " --data={params.data:q} {params.settings:q}"
