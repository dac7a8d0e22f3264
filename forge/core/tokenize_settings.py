"""Sections `tokenizer` and `tokenize`: the corpus, and how it becomes token ids."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from forge.core import hooks, project_plugins
from forge.core.mix import STEP
from forge.core.models.base import HUB_NAME
from forge.core.section import FREE, FilePath, Section, later
from forge.core.text_formats import AUTO, FORMATS, OF_PLUGIN
from forge.core.values import shown

# Part of names of metrics, too.
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
MAX_MIB = 2**30  # a PiB
# Ids of a tokenizer that is not known yet: those of Gemma's, the largest in wide use.
LARGE_VOCABULARY = 2**18
# Keys that change no ids: content ids and manifests do not have them.
UNNAMED = ("fast", "max_lost")
MAX_LOST = 0.2
TokenDtype = Literal["uint16", "uint32", "int32", "int64"]
TOKEN_DTYPES = get_args(TokenDtype)


def _is_known(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Read a format. One of a plugin is read as the digest that is in use, and a recorded one stays:
    `data.corpus` imports its copy where text is read, and nothing else does."""
    if isinstance(value, str) and OF_PLUGIN.fullmatch(value):
        return value
    if value in [AUTO, *FORMATS]:  # a list: the value may be one that cannot be hashed
        return read(value)
    own, of_plugins = hooks.own_text_formats(), hooks.text_formats()
    if value in [*own]:
        return value
    if value in [*of_plugins]:
        plugin = of_plugins[value][0]
        return f"{value}@{plugin}:{project_plugins.used()[plugin]}"
    raise ValueError(f"must be one of {', '.join((AUTO, *FORMATS, *own, *of_plugins))}")


def _with_own(schema: dict[str, Any]) -> None:
    """Add the formats that plugins of Forge have to those that an editor knows."""
    schema["enum"] = [*schema["enum"], *hooks.own_text_formats()]


if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = SerializeAsAny[
        Annotated[
            Literal[(AUTO, *FORMATS)],
            WrapValidator(_is_known),
            Field(json_schema_extra=_with_own),
        ]
    ]


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
    login node. `rule:corpus/clean.txt` is a file that a rule of your own workflow makes
    (docs/workflow.md)."""
    format: FormatName = AUTO
    """`auto` decides by the file name (.jsonl, .json, .csv, .tsv, also with .gz or .zst, .parquet, else
    text). Files of nanoGPT (.bin), Megatron-LM (.bin, .idx) and dolma (.npy) hold ids, made with the
    tokenizer that is given."""
    token_dtype: TokenDtype = "uint16"
    """Type of the ids in files of nanoGPT and dolma, which do not record it; Megatron-LM's index and the
    header of `np.save` do."""
    text_field: str = "text"
    """The field (JSONL) or column (CSV, TSV, parquet) that holds the text."""
    document_separator: str | None = None
    """Cuts text files into documents at this string; null makes each text file one document."""
    invalid_utf8: Literal["error", "replace"] = "error"
    """Bytes that are not UTF-8: stop and name file and offset, or replace them by U+FFFD."""

    seq_len: int | None = later(None, ge=2)
    """Tokens of the windows into which conversations (`format: chat`) are packed whole: that of `train`.
    null for all other formats, whose windows begin anywhere in a document."""
    too_long: Literal["error", "cut"] = later("error")
    """A conversation that `seq_len` tokens do not hold: stop and name it, or cut its end off."""

    @model_validator(mode="after")
    def _windows_of_conversations(self) -> Self:
        if self.is_packed and self.seq_len is None:
            raise ValueError(f"the format {self.format} needs seq_len, that of train")
        of_packed = [key for key in ("seq_len", "too_long") if key in self.model_fields_set]
        if not self.is_packed and any(getattr(self, key) for key in of_packed):
            keys = " and ".join(of_packed)
            raise ValueError(
                f"{keys}: for formats of conversations, and the format is {self.format}"
            )
        return self

    @property
    def is_packed(self) -> bool:
        """Return whether documents are packed whole, and only some of their tokens are learned."""
        if self.format in [AUTO, *FORMATS] or OF_PLUGIN.fullmatch(self.format):
            return False
        return bool(hooks.own_text_formats()[self.format].special_tokens)

    @property
    def shown_inputs(self) -> str:
        """For errors of a whole corpus, which may be one of several sources."""
        return f"inputs {shown(self.inputs)}"


class Tokenize(Source):
    """The corpus, and how it becomes shards of token ids."""

    inputs: list[FilePath] = Field(default=["python:stdlib"], min_length=1)
    """Files, directories and globs; `python:stdlib` is the source code of Python's standard library.
    Files of the Hugging Face hub as `hf://datasets/owner/name@revision/*.parquet` are downloaded on the
    login node. `rule:corpus/clean.txt` is a file that a rule of your own workflow makes
    (docs/workflow.md)."""
    sources: dict[SourceName, Source] | None = Field(None, min_length=1)
    """Several corpora by name, each tokenized by itself, in place of `inputs` and of the keys on how text
    is read; train.mix has their weights. null: one corpus."""
    val_fraction: float = Field(0.05, gt=0, lt=1)
    """Fraction of the documents in the validation split, chosen by the digest of the document."""
    shard_tokens: int = Field(2**26, ge=1024)
    """A shard ends with the document that brings it to this many tokens."""
    part_mib: float = Field(4, gt=0, le=MAX_MIB)
    """Input files are grouped into parts of about this many MiB; parts are tokenized in parallel."""
    fast: bool = Field(True, json_schema_extra=FREE)
    """Encode with gigatoken where it can read the tokenizer, and compare samples with the tokenizers
    library; false: encode with that library alone. The ids are the same."""
    max_lost: float = later(MAX_LOST, ge=0, le=1, json_schema_extra=FREE)
    """Largest fraction of the characters that the tokenizer may lose, for want of ids or since it takes
    them away; a corpus that loses more is refused (docs/data.md). The ids are the same."""

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
        """Without `sources`, or with them without the keys that each source has of its own."""
        unused = [*Source.model_fields] if self.sources else ["sources"]
        return {key: value for key, value in dump(self).items() if key not in unused}

    @property
    def corpora(self) -> dict[str, Tokenize]:
        """The settings of each source as those of a single corpus, sorted by name; without sources those
        of the only corpus, whose name is empty."""
        if self.sources is None:
            return {"": self}
        common = {"val_fraction", "shard_tokens", "part_mib", *UNNAMED}
        return {
            name: Tokenize(**self.sources[name].model_dump(), **self.model_dump(include=common))
            for name in sorted(self.sources)
        }
