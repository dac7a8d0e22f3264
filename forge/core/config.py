"""Training config of a run: typed sections with units, defaults and limits. The only source of defaults.

`python -m tools.config_docs` generates the JSON schema and the table in config/README.md from it.
"""

from __future__ import annotations

import difflib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from forge.core.errors import ConfigError
from forge.core.evaluation import Evaluate
from forge.core.mix import STEP, Mix, check_mix, require_sources
from forge.core.model import HUB_NAME, Init, RopeScaling
from forge.core.program import Program
from forge.core.section import FREE, FilePath, Section, section_of, section_of_entries
from forge.core.tracking import Tracking
from forge.core.values import as_cell, describe, read_cell, read_text, read_yaml, shown

# Safe as a path, an option and a word of a shell; also the wildcard constraint of the workflow.
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
# RUN@STEP. 18 digits fit into 64 bits.
PARENT = rf"({RUN_NAME})@([1-9][0-9]{{0,17}}|latest)"
HUB_PARENT = "hub:"
# Keys that do not change what is trained; the config digest leaves them out.
FOLDERS = ("run", "results", "data")
# Sections that training does not read; a checkpoint knows nothing of them.
OUTSIDE_TRAINING = ("validate", "report", "evaluate", "tracking")
# Sections that another program has no use for.
OF_FORGES_TRAINER = ("tokenizer", "tokenize", "model", "train")

# Part of names of metrics, too.
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]

MAX_MIB = 2**30  # a PiB
# Ids of a tokenizer that is not known yet: those of Gemma's, the largest in wide use.
LARGE_VOCABULARY = 2**18

# Of tokenize.format: files of ids in place of text.
TOKEN_FORMATS = ("nanogpt", "megatron", "dolma")
# Of train.shard.
Shard = Literal["none", "node", "all"] | Annotated[int, Field(ge=2)]
Recompute = Literal["none", "selective", "full"]
# Rows and columns of a matrix that GPUs multiply in float8 (torch._scaled_mm).
FP8_MULTIPLE = 16
# Of train.micro_batch_size.
MicroBatch = Literal["auto"] | Annotated[int, Field(ge=1)] | None

AnySection = TypeVar("AnySection", bound=Section)


class Tokenizer(Section):
    """The source of the tokenizer."""

    source: Literal["train", "path", "hub"] = "train"
    """`train` a byte-level BPE on the corpus, copy a file (`path`), or download it from a `hub`."""
    vocab_size: int = Field(4096, ge=257, le=2**24)
    """Number of ids of a trained tokenizer, its end-of-text token included."""
    sample_mib: float = Field(64, gt=0, le=MAX_MIB)
    """A trained tokenizer sees at most this many MiB of the corpus, spread evenly over the files."""
    path: FilePath | None = None
    """Path of the tokenizer.json for `source: path`."""
    hub: str | None = None
    """`owner/name@revision` for `source: hub`; downloaded on a login node."""
    eos_token: str | None = None
    """Token that ends each document; null: as the tokenizer's own files name it."""

    @model_validator(mode="after")
    def _source_has_its_key(self) -> Self:
        for source in ("path", "hub"):
            if self.source == source and not getattr(self, source):
                raise ValueError(f"source is {source!r}, so {source} must be given")
        if self.hub and not re.fullmatch(HUB_NAME, self.hub):
            raise ValueError(f"hub is {shown(self.hub)}; it must look like owner/name@revision")
        return self

    @property
    def expected_vocab_size(self) -> int:
        """Number of ids, for estimates before the tokenizer exists: an upper bound for nearly every
        tokenizer that is not trained here."""
        return self.vocab_size if self.source == "train" else LARGE_VOCABULARY


class Source(Section):
    """A corpus: its files, and how their text is read."""

    inputs: list[FilePath] = Field(min_length=1)
    """Files, directories and globs; `python:stdlib` is the source code of Python's standard library.
    Files of the Hugging Face hub as `hf://datasets/owner/name@revision/*.parquet` are downloaded on the
    login node."""
    format: Literal["auto", "text", "jsonl", "parquet", "nanogpt", "megatron", "dolma"] = "auto"
    """`auto` decides by the file name (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, else text). Files of
    nanoGPT (.bin), Megatron-LM (.bin, .idx) and dolma (.npy) hold ids, made with the tokenizer that is
    given."""
    token_dtype: Literal["uint16", "uint32", "int32"] = "uint16"
    """Of the ids in files of nanoGPT and dolma, which do not say; Megatron-LM's index does."""
    text_field: str = "text"
    """The field (JSONL) or column (parquet) that holds the text."""
    document_separator: str | None = None
    """Cuts text files into documents at this string; null makes each text file one document."""
    invalid_utf8: Literal["error", "replace"] = "error"
    """Bytes that are not UTF-8: stop and name file and offset, or replace them by U+FFFD."""


class Tokenize(Source):
    """The corpus, and how it becomes shards of token ids."""

    inputs: list[FilePath] = Field(default=["python:stdlib"], min_length=1)
    """Files, directories and globs; `python:stdlib` is the source code of Python's standard library.
    Files of the Hugging Face hub as `hf://datasets/owner/name@revision/*.parquet` are downloaded on the
    login node."""
    sources: dict[SourceName, Source] | None = Field(None, min_length=1)
    """Several corpora by name, each tokenized by itself, in place of `inputs` and of the keys on how text
    is read; train.mix has their weights. null: one corpus."""
    val_fraction: float = Field(0.05, gt=0, lt=1)
    """Fraction of the documents in the validation split, chosen by the digest of the document."""
    shard_tokens: int = Field(2**26, ge=1024)
    """A shard ends with the document that brings it to this many tokens."""
    part_mib: float = Field(4, gt=0, le=MAX_MIB)
    """Input files are grouped into parts of about this many MiB; parts are tokenized in parallel."""

    @model_validator(mode="after")
    def _inputs_or_sources(self) -> Self:
        if self.sources is None:
            return self
        if STEP in self.sources:
            raise ValueError(
                f"a source cannot have the name {STEP}, a key of the stages of train.mix"
            )
        if given := [key for key in Source.model_fields if key in self.model_fields_set]:
            raise ValueError(
                f"sources takes the place of {', '.join(given)}, which each source has of its own: remove"
                " one or the other"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With sources, the keys that each source has of its own; else `sources`."""
        unused = Source.model_fields if self.sources else ("sources",)
        return {key: value for key, value in dump(self).items() if key not in unused}

    @property
    def corpora(self) -> dict[str, Tokenize]:
        """The settings of each source as those of a single corpus, sorted by name; without sources those
        of the only corpus, whose name is empty."""
        if self.sources is None:
            return {"": self}
        common = {"val_fraction", "shard_tokens", "part_mib"}
        return {
            name: Tokenize(**self.sources[name].model_dump(), **self.model_dump(include=common))
            for name in sorted(self.sources)
        }


class Model(Section):
    """Shape of the Llama-style decoder."""

    dim: int = Field(256, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Number of decoder blocks."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention); null means the same as heads."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head, an even number; null means dim / heads."""
    ffn_dim: int | None = Field(None, ge=8)
    """Hidden width of SwiGLU; null means 8/3 dim, rounded up to a multiple of 64."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of RMSNorm."""
    norm: Literal["pre", "post"] = "pre"
    """RMSNorm of what attention and feed-forward read (`pre`), or of what they give (`post`, OLMo 2)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: of each `head` (Qwen3), or of all heads together (`full`, OLMo 2)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability after attention and feed-forward, in training only."""
    tie_embeddings: bool = True
    """Share one matrix between input and output embeddings."""
    vocab_size: int | None = Field(None, ge=1, le=2**24)
    """Rows of the embedding, at least as many as the tokenizer has ids; null: as many."""
    init: Init | None = Field(None, json_schema_extra=FREE)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.init and self.vocab_size is None:
            return self  # the shape is that of the weights, which data/model.py fills in
        if (self.head_dim is None and self.dim % self.heads) or self.head_width % 2:
            got = f"{self.dim} / {self.heads}" if self.head_dim is None else self.head_dim
            raise ValueError(f"dim / heads, or head_dim, must be an even integer, got {got}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_width

    @property
    def inner_dim(self) -> int:
        return self.ffn_dim or -(-(8 * self.dim // 3) // 64) * 64

    def num_rows(self, num_ids: int) -> int:
        """Rows of the embedding for a tokenizer with so many ids."""
        return self.vocab_size or num_ids

    def num_parameters(self, num_ids: int) -> int:
        """Number of weights of the decoder; a tied matrix counts once. num_ids: of the tokenizer."""
        attention = 2 * self.dim * (self.query_dim + self.kv_dim)
        feed_forward = 3 * self.dim * self.inner_dim
        of_queries = {
            "none": 0,
            "head": 2 * self.head_width,
            "full": self.query_dim + self.kv_dim,
        }
        norms = 2 * self.dim + of_queries[self.qk_norm]
        embeddings = (1 if self.tie_embeddings else 2) * self.num_rows(num_ids) * self.dim
        return self.layers * (attention + feed_forward + norms) + self.dim + embeddings

    def flops_per_token(self, num_ids: int, seq_len: int) -> float:
        """FLOPs of forward and backward per trained token: 6 N + 12 L H K T.

        PaLM (arXiv:2204.02311), appendix B. N does not count an untied input embedding, which is a
        lookup. As in the paper, attention counts as if it were not causal.
        """
        looked_up = 0 if self.tie_embeddings else self.num_rows(num_ids) * self.dim
        attention = 12 * self.layers * self.query_dim * seq_len
        return 6 * (self.num_parameters(num_ids) - looked_up) + attention


class Train(Section):
    """Optimization, evaluation and checkpoints."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights, the order of the samples and dropout."""
    mix: Mix | None = None
    """Weight of each of tokenize.sources in the samples: `{web: 0.7, code: 0.3}`, in any unit, or a list
    of stages by step: `[{step: 0, web: 0.7, code: 0.3}, {step: 8000, web: 0.3, code: 0.7}]`. null: in
    proportion to their tokens."""
    seq_len: int = Field(256, ge=8)
    """Tokens per sample."""
    document_mask: bool = False
    """Attention and positions stay inside the documents of a sample, as if each were trained alone; also
    in evaluation and validation."""
    batch_size: int = Field(16, ge=1)
    """Global batch size: samples per step, over all ranks."""
    micro_batch_size: MicroBatch = Field("auto", json_schema_extra=FREE)
    """Samples per forward pass of a rank; less than its share of the batch accumulates gradients. `auto`:
    on GPUs the most that fit by the estimate of `forge plan`, on CPUs the whole share; null: the whole
    share."""
    max_steps: int = Field(200, ge=1, json_schema_extra=FREE)
    """Train up to this step; may be raised later, which leaves the learning rate schedule as it is."""
    decay_steps: int | None = Field(None, ge=1)
    """Step at which the schedule reaches its minimum; null: the max_steps of the run's first start, but
    at least warmup_steps."""
    warmup_steps: int = Field(20, ge=0)
    """Steps of linear learning rate warm-up."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: `cosine` decay, or constant, then linear decay (`wsd`)."""
    wsd_decay_fraction: float = Field(0.2, gt=0, le=1)
    """Fraction of decay_steps in which `wsd` decays."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate, as a fraction of the peak."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` updates the matrices of the blocks, with updates as large as AdamW's, so that lr and
    weight_decay keep their meaning; embeddings, output layer and norms stay with AdamW. It multiplies in
    bf16, which is slow on CPUs without instructions for it."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Nesterov momentum of Muon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta1."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW beta2."""
    grad_clip: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm over all parameters."""
    on_nonfinite: Literal["stop", "skip"] = Field("stop", json_schema_extra=FREE)
    """When the loss or the gradient norm of a step is NaN or infinite on any rank: `stop` ends the run
    (exit 70); `skip` continues with the next batch, without an update of weights and optimizer state."""
    max_skipped_steps: int = Field(10, ge=1, json_schema_extra=FREE)
    """With `skip`, here or of spikes, the run ends (exit 70) after this many skipped steps in a row."""
    spike: Literal["stop", "skip", "rewind"] | None = Field(None, json_schema_extra=FREE)
    """A step is a spike if its loss or gradient norm is more than spike_factor standard deviations above
    the mean of the steps before: `stop` ends the run (exit 70); `skip` continues with the next batch,
    without an update of weights and optimizer state; `rewind` resumes from the newest checkpoint and
    leaves out the batches from there to the spike, three times at most from one checkpoint; null: no
    rule."""
    spike_factor: float = Field(6.0, gt=0, json_schema_extra=FREE)
    """Standard deviations above the mean from which on a step is a spike."""
    spike_window: int = Field(128, ge=8, le=10_000, json_schema_extra=FREE)
    """Number of steps that mean and deviation are of: the last ones that updated the weights. The rule
    begins when half as many are known."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of forward and backward (weights are stored in fp32); null: fp32 on CPU, bf16 on GPU."""
    fp8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Matrix products of the blocks in float8, in training steps only, by this recipe of torchao:
    `tensorwise` is the fastest, `rowwise_with_gw_hp` the most accurate. For H100 and newer; CPUs emulate
    them, slowly. Needs `forge[fp8]`. null: none."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which FSDP2 averages gradients over ranks: with `shard`, and on GPUs in bf16. `bf16`
    halves the traffic and rounds to 8 bits what is sent; with several copies of the model also their
    sums over micro-batches."""
    deterministic: bool = Field(False, json_schema_extra=FREE)
    """On GPUs, only algorithms that give the same bits each time, so that a resumed run is bitwise equal
    to an uninterrupted one; slower. On CPUs it always is."""
    shard: Shard = Field("none", json_schema_extra=FREE)
    """Ranks that hold one copy of weights and optimizer state together (FSDP2): `none`: each rank has a
    copy of its own; `node`: the ranks of a node; `all`; or a number of ranks. Copies are kept alike."""
    recompute: Recompute = Field("none", json_schema_extra=FREE)
    """Activation checkpointing, block by block: the backward pass recomputes norms, rotary positions and
    the wide half of the feed-forward (`selective`), or the whole block (`full`), for less memory."""
    compile: bool = Field(False, json_schema_extra=FREE)
    """Use torch.compile; without a compiler, warn and train uncompiled."""
    log_every: int = Field(5, ge=1, json_schema_extra=FREE)
    """Steps between two lines of metrics."""
    eval_every: int = Field(50, ge=1, json_schema_extra=FREE)
    """Steps between two evaluations; there is also one before the first step and after the last."""
    eval_samples: int = Field(64, ge=1, json_schema_extra=FREE)
    """Samples of the validation split in an evaluation, the same ones each time; of each source."""
    checkpoint_every: int = Field(50, ge=1, json_schema_extra=FREE)
    """Steps between two checkpoints."""
    checkpoint_minutes: float | None = Field(None, gt=0, json_schema_extra=FREE)
    """Also write a checkpoint when this many minutes have passed since the last; null: by steps only."""
    keep_last: int = Field(2, ge=1, json_schema_extra=FREE)
    """Number of newest committed checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1, json_schema_extra=FREE)
    """Also keep every checkpoint whose step is a multiple of this; null: none."""

    @field_validator("mix", mode="before")
    @classmethod
    def _is_mix(cls, value: Any) -> Any:
        return check_mix(value)

    @field_validator("shard", mode="before")
    @classmethod
    def _is_shard(cls, value: Any) -> Any:
        is_number = str(value).isdecimal() and int(value) >= 2
        if value not in ("none", "node", "all") and not is_number:
            raise ValueError("must be none, node, all, or a number of ranks, 2 or more")
        return value

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _is_micro_batch(cls, value: Any) -> Any:
        is_number = str(value).isdecimal() and int(value) >= 1
        if value not in ("auto", None) and not is_number:
            raise ValueError("must be auto, null, or a number of samples, 1 or more")
        return value

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.decay_steps is not None and self.warmup_steps > self.decay_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is larger than decay_steps {self.decay_steps}"
            )
        return self


class Validate(Section):
    """Which checks validation makes of the final checkpoint."""

    depth: Literal["digests", "load", "probe"] = "probe"
    """`digests`: of all files; `load`: also load every tensor; `probe`: also recompute losses, of
    8 ranks at most."""


class Report(Section):
    """Samples in the report."""

    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=["def ", "class ", "import "], max_length=16
    )
    """The model completes each prompt; report and `forge show` have the samples."""
    sample_tokens: int = Field(40, ge=1, le=1024)
    """Tokens to generate per prompt. The model sees the last train.seq_len tokens only."""


class Ids(Section):
    """Content ids of what a run reads; filled in when its config is resolved."""

    tokenizer: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/tokenizers/`; empty with `program`."""
    tokens: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/tokens/`, with sources of their list; empty with `program`."""
    sources: dict[SourceName, Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]] = Field(default={})
    """Name of the directory in `data/tokens/` of each source; `{}` without sources."""
    inputs: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/inputs/`, of `program.inputs` or of the files of a hub in
    `tokenize.inputs`; empty without them."""
    model: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/models/`, of `model.init`; empty without it."""


class Config(Section):
    """What a run trains: data, model and hyperparameters, or a program. Nothing about machines."""

    run: str = Field("base", pattern=rf"^{RUN_NAME}$")
    """Name of the run and of its directory in `results`."""
    results: FilePath = Field("results", min_length=1)
    """Directory with one directory per run."""
    data: FilePath = Field("data", min_length=1)
    """Directory of tokenizers and tokens, shared between runs."""
    parent: str | None = None
    """`RUN@STEP`, or `RUN@latest`: start from this checkpoint of another run in `results`, which may be
    on the same sample sheet. `hub:OWNER/NAME@REVISION`: as model.init.hub. null: start at step 0."""
    tokenizer: Tokenizer = Tokenizer()
    tokenize: Tokenize = Tokenize()
    model: Model = Model()
    train: Train = Train()
    program: Program | None = None
    # The key in the file is `validate`; a field of that name would hide a method of pydantic.
    validation: Validate = Field(Validate(), alias="validate")
    report: Report = Report()
    evaluate: Evaluate = Evaluate()
    tracking: Tracking = Tracking()
    ids: Ids | None = None

    @field_validator("results", "data")
    @classmethod
    def _plain_folder(cls, folder: str) -> str:
        # In Snakemake, braces in a path are wildcards.
        if re.search(r"[{}\n]", folder):
            raise ValueError(
                f"{shown(folder)} has braces or line breaks, which Snakemake cannot have in a path"
            )
        return folder.rstrip("/") or "/"

    @model_validator(mode="before")
    @classmethod
    def _parent_on_a_hub(cls, values: Any) -> Any:
        """In the column `parent` a family may begin with pretrained weights, which are no run."""
        name = values.get("parent") if isinstance(values, dict) else None
        if not isinstance(name, str) or not name.startswith(HUB_PARENT):
            return values
        model = values.get("model") or {}
        if not isinstance(model, dict) or model.get("init"):
            raise ValueError(
                f"parent is {name!r}, and model.init is set, too: leave one of them out"
            )
        init = {"hub": name.removeprefix(HUB_PARENT)}
        return {**values, "parent": None, "model": {**model, "init": init}}

    @field_validator("parent")
    @classmethod
    def _parent_has_a_step(cls, parent: str | None) -> str | None:
        if parent is not None and not re.fullmatch(PARENT, parent):
            raise ValueError(
                "must be RUN@STEP, such as base@5000: the name of a run and the step of one of its"
                " checkpoints (ls results/RUN/checkpoints); or RUN@latest, or hub:OWNER/NAME@REVISION"
            )
        return parent

    @model_validator(mode="after")
    def _parent_is_another_run(self) -> Self:
        if self.parent and self.parent.partition("@")[0] == self.run:
            raise ValueError(
                f"parent is {self.parent!r}, a checkpoint of this run itself: a run resumes from its"
                " own checkpoints without it; give a new run a name of its own"
            )
        return self

    @model_validator(mode="after")
    def _ids_have_a_tokenizer(self) -> Self:
        formats = [one.format for one in self.tokenize.corpora.values()]
        of_ids = next((one for one in formats if one in TOKEN_FORMATS), None)
        if of_ids and self.tokenizer.source == "train":
            raise ValueError(
                f"tokenize.format is {of_ids}, whose files hold ids and no text, and"
                " tokenizer.source is train: set tokenizer.source to path or hub, to the tokenizer"
                " that made the ids"
            )
        return self

    @model_validator(mode="after")
    def _one_trainer(self) -> Self:
        given = [name for name in (*OF_FORGES_TRAINER, "parent") if name in self.model_fields_set]
        given = [name for name in given if getattr(self, name) is not None]
        if self.program and given:
            raise ValueError(
                f"program takes the place of Forge's own trainer, and {', '.join(given)} would have no"
                " effect: remove one or the other"
            )
        return self

    @model_validator(mode="after")
    def _evaluated_checkpoints_are_kept(self) -> Self:
        evaluate, kept = self.evaluate, self.train.keep_every
        if evaluate.tasks and self.program:
            raise ValueError(
                f"evaluate.tasks is {shown(evaluate.tasks)}, and only checkpoints of Forge's own trainer"
                " can be evaluated: remove evaluate, or program"
            )
        if evaluate.tasks and evaluate.every and (not kept or evaluate.every % kept):
            raise ValueError(
                f"evaluate.every is {evaluate.every}, and such checkpoints are not kept: train.keep_every"
                f" is {shown(kept)}; set it to {evaluate.every} or a divisor of it"
            )
        return self

    @model_validator(mode="after")
    def _mix_fits_the_sources(self) -> Self:
        if self.train.mix is not None:
            step = self.parent.partition("@")[2] if self.parent else "0"
            if step.isdecimal():  # else checked when the step is known
                require_sources(self.train.mix, self.tokenize.sources or (), int(step))
        return self

    @property
    def starts_from(self) -> str | None:
        """What a run without a checkpoint starts from, for people; None for weights that are drawn."""
        init = self.model.init
        return self.parent or (init.name if init else None)

    @property
    def goal(self) -> int:
        """The step at which the run is complete; 0 for a program without checkpoints."""
        return self.program.goal_step if self.program else self.train.max_steps

    def to_json(self) -> dict[str, Any]:
        """All keys as plain JSON values, defaults filled in; without those that have no effect."""
        values = self.model_dump(mode="json", by_alias=True)
        unused = OF_FORGES_TRAINER if self.program else ("program",)
        if values["ids"]:
            values["ids"] = {name: found for name, found in values["ids"].items() if found}
        return {key: value for key, value in values.items() if key not in unused}


class ResolvedConfig(Config):
    """A config with its ids, as every step of a run takes it and config.json holds it.

    The command line and the workflow make it of a Config once, with `content_ids.resolve`.
    """

    ids: Ids

    @property
    def of_training(self) -> ResolvedConfig:
        """The same with the defaults of the sections that training does not read: equal for two configs
        that train the same."""
        return ResolvedConfig(**self.training_json())

    def training_json(self) -> dict[str, Any]:
        """What config.json holds: all but the sections that training does not read."""
        return {key: value for key, value in self.to_json().items() if key not in OUTSIDE_TRAINING}


# --- reading ------------------------------------------------------------------------------------


def parse_override(argument: str) -> tuple[str, Any]:
    """`--train.max_steps=1000` to ("train.max_steps", 1000); the value is read as YAML."""
    match = re.fullmatch(r"--([A-Za-z_][\w.]*)=(.*)", argument, re.DOTALL)
    if not match:
        raise ConfigError(
            f"cannot read {shown(argument)}",
            fix="overrides look like --train.max_steps=1000; `forge SUBCOMMAND --help` lists the options",
        )
    return match[1], read_cell(match[2])


def as_overrides(config: Config, *sections: str) -> list[str]:
    """Sections of a config as the arguments that set them, such as `--validate.depth=load`."""
    values = config.to_json()
    return [
        f"--{section}.{key}={as_cell(value)}"
        for section in sections
        for key, value in values[section].items()
    ]


def apply_overrides(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy of the nested `values` with each dotted key set."""
    merged = json.loads(json.dumps(values))
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        parent = merged
        for section in sections:
            if parent.get(section) is None:
                parent[section] = {}
            parent = parent[section]
            if not isinstance(parent, dict):
                raise ConfigError(f"cannot set {dotted}: {section} is not a section")
        parent[key] = value
    return merged


def read_values(path: str | Path) -> dict[str, Any]:
    """The plain values in a YAML or JSON config file. Raises ConfigError."""
    text = read_text(path, "config file")
    try:
        values = read_yaml(text)
    except yaml.YAMLError as err:
        raise ConfigError(
            f"cannot read config file {path}: {describe(err)}",
            fix="config/README.md explains how values are written",
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must hold keys and values, not {shown(values)}")
    return values


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """The config in a file, with overrides applied. Raises ConfigError that names every bad key.

    The file may be the workflow's: its key `runs` names the sample sheet, which no single run reads.
    """
    values = read_values(path)
    values.pop("runs", None)
    return checked(Config, apply_overrides(values, overrides or {}), str(path))


def checked(model: type[AnySection], values: dict[str, Any], where: str) -> AnySection:
    """`values` as a section of type `model`. Raises ConfigError that names every bad key and value."""
    try:
        return model.model_validate(values)
    except ValidationError as err:
        problems = [_problem(model, detail) for detail in err.errors()]
        raise ConfigError(
            f"{where}: " + "\n  ".join(problems),
            fix="config/README.md and profiles/README.md list every key with its meaning",
        ) from None


def _problem(model: type[Section], detail: Any) -> str:
    loc = [str(part) for part in detail["loc"]]
    dotted = ".".join(loc)[:200]
    if detail["type"] == "extra_forbidden":
        section, names = model, loc[:-1]
        for name in names:
            below = section_of_entries(section) or _fields(section).get(name)
            section = below or section
        valid = sorted(_fields(section))
        close = difflib.get_close_matches(loc[-1], valid, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        where = ".".join(names) or "the top level"
        return f"unknown key {dotted}{hint}; valid keys of {where}: {', '.join(valid)}"
    message = detail["msg"].removeprefix("Value error, ")
    if not loc or isinstance(detail["input"], dict):
        return f"{dotted}: {message}" if dotted else message
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        message += f'; put it in quotes: "{shown(detail["input"])}"'
    return f"{dotted} is {shown(detail['input'])}: {message}"


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    """Type of each field by its key in files; a Section class for a section."""
    return {
        field.alias or name: section_of(field.annotation) or field.annotation
        for name, field in getattr(section, "model_fields", {}).items()
    }


def samples_per_rank(batch_size: int, world_size: int) -> int:
    """Samples of a global batch on each rank. ConfigError where the ranks cannot share it evenly."""
    if batch_size % world_size == 0:
        return batch_size // world_size
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    below = batch_size - batch_size % world_size
    raise ConfigError(
        f"train.batch_size {batch_size} cannot be shared by a world of {world_size} ranks",
        cause="every rank must have the same number of samples",
        fix=f"use {', '.join(map(str, divisors))} ranks, or set train.batch_size to "
        f"{' or '.join(str(n) for n in (below, below + world_size) if n)}",
    )


def ranks_per_copy(shard: Shard, world_size: int, ranks_per_node: int) -> int:
    """Ranks that hold one copy of the model together (train.shard); 1 where each has its own. ConfigError
    where the ranks are not a multiple of it."""
    named = {"none": 1, "node": ranks_per_node, "all": world_size}
    ranks = shard if isinstance(shard, int) else named[shard]
    if world_size % ranks == 0:
        return ranks
    divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
    raise ConfigError(
        f"train.shard {shard} does not divide a world of {world_size} ranks into copies of the model",
        cause="every copy must be held by the same number of ranks",
        fix=f"set train.shard to none, all{''.join(f', {n}' for n in divisors)}",
    )


def refuse_bf16_of_ddp(train: Train) -> None:
    """ConfigError for a run whose copies of the model DDP keeps alike, if it is to reduce in bf16."""
    if train.reduce_dtype == "bf16":
        raise ConfigError(
            "train.reduce_dtype is bf16, and the gradients of this run are averaged by DDP, in fp32 only",
            cause="train.shard is none, and the ranks have no GPUs, or train.precision is fp32",
            fix="remove train.reduce_dtype, or set train.shard",
        )


def refuse_fp8(config: Config) -> None:
    """ConfigError where train.fp8 is set and cannot be used, whatever the GPU."""
    train, model = config.train, config.model
    if train.fp8 is None:
        return
    if find_spec("torchao") is None:
        raise ConfigError(
            f"train.fp8 is {train.fp8}, but Python has no package torchao here",
            fix="pip install 'forge[fp8]', or remove the key",
        )
    if train.precision == "fp32":
        raise ConfigError(
            f"train.fp8 is {train.fp8} and train.precision is fp32",
            cause="float8 is for training steps that are otherwise in bf16",
            fix="remove one of the two",
        )
    sizes = {
        "model.dim": model.dim,
        "the width of all query heads": model.query_dim,
        "the width of all key heads": model.kv_dim,
        "the width of the feed-forward": model.inner_dim,
        "train.seq_len": train.seq_len,
    }
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            raise ConfigError(
                f"train.fp8 is {train.fp8}, and {name} is {size}, which is not a multiple of"
                f" {FP8_MULTIPLE}",
                cause="GPUs multiply matrices in float8 only in such sizes",
                fix=f"use {size // FP8_MULTIPLE * FP8_MULTIPLE + FP8_MULTIPLE}, or remove train.fp8",
            )


def is_boolean(section: type[Section], dotted: str) -> bool:
    """Whether the key with this dotted name takes true or false."""
    first, _, rest = dotted.partition(".")
    below = _fields(section).get(first)
    return is_boolean(below, rest) if rest and below else bool in (below, *get_args(below))


def is_free(section: type[Section], key: str) -> bool:
    """Whether this key may change when a run resumes."""
    if section.BOUND is not None:
        return key not in section.BOUND
    return section.model_fields[key].json_schema_extra == FREE
