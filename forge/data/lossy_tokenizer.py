"""Message about a tokenizer that loses text, and its refusal above tokenize.max_lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError, DataError
from forge.core.files import grouped, utf8_bytes
from forge.core.paths import MANIFEST, tokenizer_folder, tokens_folder
from forge.core.terminal import say
from forge.core.text_formats import TOKEN_FORMATS
from forge.data import content_ids, corpus, model
from forge.data.corpus import InputFile
from forge.data.encoders import BATCH_BYTES, Unencodable, reference_encoder
from forge.data.inputs import corpus_files
from forge.data.lost_text import LossCounter, Spelling, keeps_all_text
from forge.data.statistics import WORTH_SAYING, TextCounts, read_statistics
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer

# Encoded before the first part, with the tokenizers library: half a second.
SAMPLE_BYTES = 2**20
SAMPLE_FILES = 64


def refuse(counts: TextCounts, of: str, config: ResolvedConfig) -> None:
    """DataError where the ids of a corpus have lost more of its text than tokenize.max_lost. of: the part
    of the corpus that was counted."""
    share = counts.lost_share
    if share <= config.tokenize.max_lost:
        return
    sources = config.tokenize.sources
    shown = f"sources {', '.join(sources)}" if sources else config.tokenize.shown_inputs
    least = min(1.0, math.ceil(share * 100) / 100)
    raise DataError(
        f"tokenizer {config.ids.tokenizer} loses text: {counts}, {of}of {shown}",
        cause="it has no ids for these characters, or takes them away before it encodes: made for text of"
        " another kind or language, or incomplete",
        fix="choose another tokenizer (tokenizer in the config); tokenize.max_lost: "
        f"{least:g} trains without these characters",
    )


def warnings(counts: TextCounts, tokens_id: str) -> list[str]:
    """Lines on characters that tokens do not give back, where they are more than one of a thousand."""
    lines = []
    if counts.lost_share > WORTH_SAYING:
        lines.append(
            f"warning: tokens {tokens_id}: {counts}: the tokenizer has no ids for them, so the model"
            " will not know them"
        )
    if (
        counts.changes
        and max(counts.changed, counts.white_space) > WORTH_SAYING * counts.characters
    ):
        lines.append(f"tokens {tokens_id}: {counts.changes}, as the tokenizer's own file says")
    return lines


def check_sample(
    config: ResolvedConfig, tokenizer: LoadedTokenizer, files: Sequence[InputFile]
) -> None:
    """`refuse` for a sample of the corpus, before anything is written."""
    if _may_lose(config, tokenizer):
        refuse(*_counts_of_sample(config, tokenizer, files), config)


def _may_lose(config: ResolvedConfig, tokenizer: LoadedTokenizer) -> bool:
    return config.tokenize.format not in TOKEN_FORMATS and not keeps_all_text(tokenizer)


def _counts_of_sample(
    config: ResolvedConfig, tokenizer: LoadedTokenizer, files: Sequence[InputFile]
) -> tuple[TextCounts, str]:
    """Counts of a sample, and its size in words."""
    counter, encode = LossCounter(Spelling(tokenizer)), reference_encoder(tokenizer)
    for batch in grouped(_sample(config, files), counter.num_bytes, BATCH_BYTES):
        try:
            counter.add(batch, encode(batch))
        except Unencodable:
            break  # the worker that comes to this document names it
    counts = counter.counts()
    return counts, f"in a sample of {counts.bytes / 2**10:,.0f} KiB "


def _sample(config: ResolvedConfig, files: Sequence[InputFile]) -> Iterator[str]:
    """The beginning of files that are spread over the corpus, in proportion to their sizes."""
    chosen = files[:: max(1, len(files) // SAMPLE_FILES)]
    total = sum(file.size for file in chosen)
    for file in chosen:
        left = math.ceil(SAMPLE_BYTES * min(1, file.size / max(1, total)))
        for document in corpus.read_documents(file, config.tokenize, warn=lambda _: None):
            yield document[:left]
            left -= utf8_bytes(document)
            if left <= 0:
                break


def check_existing(
    config: ResolvedConfig,
    tokenizer: LoadedTokenizer,
    files: Sequence[InputFile],
    counts: TextCounts | None,
) -> None:
    """`refuse` and `warnings` for tokens that were made before: by their statistics, or a sample where an
    earlier version made none."""
    if counts is None:
        check_sample(config, tokenizer, files)
        return
    refuse(counts, "", config)
    for line in warnings(counts, config.ids.tokens):
        say(line)


def check_tokenizer(config: ResolvedConfig) -> None:
    """Refuse the tokenizer of a run before it trains: ConfigError by `model.check_tokenizer`, DataError
    by `refuse`.

    The counts are those of the statistics, or of a sample of the text where an earlier version made none.
    Says what cannot be checked, since the text is gone.
    """
    model.check_tokenizer(config)
    for name, tokens in (config.ids.sources or {"": config.ids.tokens}).items():
        try:
            counts, of = _known_counts(config, name, tokens)
        except (ConfigError, DataError) as err:
            say(f"tokens {tokens}: cannot tell whether the tokenizer has lost text: {err.what}")
            continue
        if counts:
            refuse(counts, of, config)


def _known_counts(config: ResolvedConfig, name: str, tokens: str) -> tuple[TextCounts | None, str]:
    """Counts of tokens or of a sample of their text, and which; None where nothing can be lost."""
    folder = tokens_folder(config.data, tokens)
    if statistics := read_statistics(folder):
        return statistics.text, ""
    used = tokenizer_folder(config.data, config.ids.tokenizer)
    if not (used / MANIFEST).exists():  # where only tokens were copied
        return None, ""
    tokenizer = load_tokenizer(used)
    single = content_ids.corpus_config(config, name) if name else config
    if not _may_lose(single, tokenizer):
        return None, ""
    return _counts_of_sample(single, tokenizer, corpus_files(single))
