"""`forge prompt`: continue a text with a checkpoint of a run, printed as it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import forge
from forge.core.terminal import print_plain, say

if TYPE_CHECKING:
    from forge.data.tokenizer import LoadedTokenizer

REPLACEMENT = "\ufffd"  # in place of bytes that are no character, or not yet


def prompt(
    run: str,
    text: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    step: int | None,
    device: str,
    data: str | None,
) -> None:
    """Print the text that continues a prompt, up to `max_tokens` tokens or the end of the text. Arguments
    and errors as of `forge.load` and `Decoder.continuation`."""
    model, tokenizer = forge.load(run, step=step, device=device, data=data)
    ids = tokenizer.encode(text)
    if model.context and len(ids) > model.context:
        say(
            f"note: the prompt has {len(ids)} tokens; the model reads the last {model.context} of them"
            " (train.seq_len)"
        )
    endless = model.continuation(ids, seed=seed, temperature=temperature)
    new_ids = takewhile(lambda token: token != tokenizer.eos_id, islice(endless, max_tokens))
    try:
        for part in parts(tokenizer, ids, new_ids):
            print_plain(part, end="")
    finally:
        print_plain("")


def parts(
    tokenizer: LoadedTokenizer, prompt_ids: Sequence[int], new_ids: Iterable[int]
) -> Iterator[str]:
    """The text of new ids, in parts: a token may end within the bytes of a character, which then waits
    for the others. Together they are what the whole text has after that of the prompt."""
    ids = [*prompt_ids]
    shown = len(tokenizer.decode(ids))
    for token in new_ids:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(REPLACEMENT):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]
