"""Samples that a step of a run has read, and the steps that have read a text; as values for JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge.checkpoint import directory, resume
from forge.core.errors import ConfigError
from forge.core.files import digest_file
from forge.core.paths import checkpoint_step, inputs_folder, tokenizer_folder
from forge.core.terminal import progress
from forge.data.content_ids import single_corpora
from forge.data.corpus import InputFile
from forge.data.inputs import HUB
from forge.data.shards import Shard, ShardSet
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer
from forge.plugins.samples.order import Stretch
from forge.plugins.samples.token_documents import Span, TokenDocuments

SAMPLES_AT_ONCE = 2**20  # whose windows are computed in one call
DOCUMENTS_AT_ONCE = 1000


class TextPlace(NamedTuple):
    """Tokens of a document that hold a text. character: of the document, at which the text begins.
    digest: of the input file that is asked for; "" for any."""

    source: str
    shards: ShardSet
    shard: Shard
    span: Span
    character: int
    digest: str = ""


class RunSamples:
    """Samples of a run and of its parents, oldest first. data: the directory with their tokens. texts:
    the text files by digest, where those that manifests name are not to be read."""

    def __init__(
        self, stretches: Sequence[Stretch], data: str, texts: Mapping[str, InputFile] | None = None
    ) -> None:
        self.stretches, self._texts = stretches, texts
        self.own = stretches[-1]
        folder = tokenizer_folder(data, self.own.config.ids.tokenizer)
        self.tokenizer: LoadedTokenizer = load_tokenizer(folder)
        self.sources = self.own.tokens.by_source

    @cached_property
    def _documents(self) -> dict[Path, TokenDocuments]:
        decode, data = self.tokenizer.decode, self.own.config.data
        names = [*self.own.config.ids.sources] or [""]
        inputs = zip(names, single_corpora(self.own.config), strict=True)
        downloads = {name: inputs_folder(data, one.ids.inputs) / HUB for name, one in inputs}
        return {
            one.folder: TokenDocuments(one, decode, self._texts, downloads[name])
            for name, one in self.sources.items()
        }

    # --- what a step has read -----------------------------------------------------------------------

    def of_step(self, step: int) -> list[dict[str, Any]]:
        """The samples of a step, in the order of its batch. ConfigError for a step that was not
        trained."""
        stretch = self._stretch(step)
        [windows], [epochs] = stretch.read(step, 1)
        ranks = stretch.ranks(step)
        per_rank = len(windows) // ranks if ranks else 0
        samples = []
        numbers = stretch.numbered_as(self.own, windows)
        rows = zip(windows.tolist(), numbers.tolist(), epochs.tolist(), strict=True)
        for row, (window, number, epoch) in enumerate(rows):
            source, shards, shard, first = stretch.place(window)
            spans = self._documents[shards.folder].spans(
                shard, first, first + stretch.config.train.seq_len + 1
            )
            samples.append(
                {
                    "row": row,
                    "rank": row // per_rank if per_rank else None,
                    "source": source,
                    "window": number,
                    "epoch": epoch,
                    "shard": shard.path.name,
                    "token": first,
                    "documents": [self._document(shards, shard, span) for span in spans],
                }
            )
        return samples

    def _stretch(self, step: int) -> Stretch:
        for stretch in self.stretches:
            if stretch.after < step <= stretch.last:
                return stretch
        raise ConfigError(
            f"--step is {step}, and {self.own.name} was trained from step"
            f" {self.stretches[0].after + 1} to {self.own.last}",
            fix="name one of these steps",
        )

    def _document(self, shards: ShardSet, shard: Shard, span: Span) -> dict[str, Any]:
        """Part of a document in a window, with where it begins there: by tokens, and by characters where
        the text is here."""
        origin, token = self._documents[shards.folder].origin(shard, span), None
        if origin.text:
            offsets = self.tokenizer.encoding(origin.text).offsets
            at = span.first - span.start
            token = offsets[at][0] if at < len(offsets) else len(origin.text)
        ids = shard.ids(span.first, span.end)
        return {
            **origin.keys,
            "token": span.first - span.start,
            "character": token,
            "text": self.tokenizer.decode(ids[ids != shards.eos_id].tolist()),
        }

    def losses(self, step: int) -> list[float | None]:
        """Loss of each sample of a step by the weights with which it began, as
        `validation.replay.window_losses`. ConfigError where no checkpoint is before it."""
        from forge.validation.replay import window_losses

        stretch = self._stretch(step)
        if stretch.paths is None:
            raise ConfigError(
                f"--losses: {stretch.name} is an export, without the checkpoint before step {step}",
                fix="ask the run",
            )
        there = [checkpoint_step(f.name) for f in directory.committed(stretch.paths.checkpoints)]
        before = [n for n in there if n is not None and stretch.after <= n < step]
        if not before:
            raise ConfigError(
                f"{stretch.paths.checkpoints} has no checkpoint before step {step}",
                cause="it was pruned, or the step is before the first one",
                fix="keep more (train.keep_every), or name a later step",
            )
        checkpoint = resume.at_step(stretch.paths, max(before))
        return window_losses(stretch.config, checkpoint, step)

    # --- which steps have read a text ---------------------------------------------------------------

    def of_text(self, phrase: str) -> list[dict[str, Any]]:
        """Places of a phrase in the training text as the tokenizer decodes it, with the steps that have
        read some of it."""
        return self._found(
            [
                TextPlace(
                    source, shards, shard, self._around(shard, span, at, at + len(phrase)), at
                )
                for source, shards in self.sources.items()
                for shard in shards.train
                for span, text in self._decoded(shards, shard)
                for at in _all(text, phrase)
            ]
        )

    def of_file(self, file: Path) -> list[dict[str, Any]]:
        """The training documents of an input file, which its digest names, with the steps that have read
        some of them. ConfigError where no input of the run has this digest, DataError where it is not
        known which documents they are."""
        digest = digest_file(file)
        if not any(d.parts_of(digest) for d in self._documents.values()):
            raise ConfigError(
                f"no input of {self.own.name} has the digest of {file}, {digest[:12]}",
                cause="the file was changed since, or it is not in tokenize.inputs",
                fix="name a phrase of the text: --text PHRASE",
            )
        for documents in self._documents.values():
            documents.take_file(digest, file)
        return self._found(
            [
                TextPlace(source, shards, shard, span, 0, digest)
                for source, shards in self.sources.items()
                for part in self._documents[shards.folder].parts_of(digest)
                for shard in self._documents[shards.folder].shards_of(part)
                for span in self._documents[shards.folder].spans(shard, 0, shard.num_tokens)
                if self._documents[shards.folder].origin(shard, span, digest).digest == digest
            ]
        )

    def _decoded(self, shards: ShardSet, shard: Shard) -> Iterator[tuple[Span, str]]:
        spans = list(self._documents[shards.folder].spans(shard, 0, shard.num_tokens))
        ids = shard.ids()
        for at in range(0, len(spans), DOCUMENTS_AT_ONCE):
            batch = spans[at : at + DOCUMENTS_AT_ONCE]
            texts = self.tokenizer.tokenizer.decode_batch(
                [ids[span.first : span.end - 1].tolist() for span in batch],
                skip_special_tokens=False,
            )
            yield from zip(batch, texts, strict=True)

    def _around(self, shard: Shard, span: Span, at: int, to: int) -> Span:
        """The tokens of a document that hold its characters [at, to)."""
        ids = shard.ids(span.start, span.end).tolist()

        def characters(count: int) -> int:
            return len(self.tokenizer.decode(ids[:count]).rstrip("\ufffd"))

        first = max(0, _least(len(ids), lambda count: characters(count) > at) - 1)
        end = _least(len(ids), lambda count: characters(count) >= to)
        return span._replace(first=span.start + first, end=span.start + end)

    def _found(self, places: list[TextPlace]) -> list[dict[str, Any]]:
        windows = [self._windows_of(place) for place in places]
        steps = self._steps_of({window for own in windows for window in own})
        return [
            {
                "source": place.source,
                **self._documents[place.shards.folder]
                .origin(place.shard, place.span, place.digest)
                .keys,
                "character": place.character,
                "windows": own,
                "steps": sorted(
                    (read for window in own for read in steps[window]),
                    key=lambda read: read["step"],
                ),
            }
            for place, own in zip(places, windows, strict=True)
        ]

    def _windows_of(self, place: TextPlace) -> list[int]:
        """The windows that have a token of a place, as input or as target."""
        windows, seq_len = self.own.windows, self.own.config.train.seq_len
        shard = next(n for n, one in enumerate(windows.shards) if one == place.shard)
        first = max(0, -(-place.span.first // seq_len) - 1)
        last = min((place.span.end - 1) // seq_len, place.shard.num_windows(seq_len) - 1)
        return [int(windows.starts[shard]) + number for number in range(first, last + 1)]

    def _steps_of(self, wanted: set[int]) -> dict[int, list[dict[str, Any]]]:
        """The steps that have read each of these windows."""
        found: dict[int, list[dict[str, Any]]] = defaultdict(list)
        numbers = np.array(sorted(wanted), np.int64)
        with progress("samples", self.own.last, "steps") as update:
            for stretch in self.stretches if wanted else ():
                at_once = max(1, SAMPLES_AT_ONCE // stretch.config.train.batch_size)
                for first in range(stretch.after + 1, stretch.last + 1, at_once):
                    count = min(at_once, stretch.last + 1 - first)
                    windows, epochs = stretch.read(first, count)
                    windows = stretch.numbered_as(self.own, windows)
                    for step, row in np.argwhere(np.isin(windows, numbers)).tolist():
                        window = int(windows[step, row])
                        found[window].append(
                            {
                                "step": first + step,
                                "run": stretch.config.run,
                                "row": row,
                                "window": window,
                                "epoch": int(epochs[step, row]),
                            }
                        )
                    update(first + count - 1, "")
        return found


def _all(text: str, phrase: str) -> Iterator[int]:
    at = text.find(phrase)
    while at >= 0:
        yield at
        at = text.find(phrase, at + 1)


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """The least count from 1 to `most` for which it holds; `most` where it holds for none."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
