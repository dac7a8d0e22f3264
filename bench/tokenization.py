"""How fast is text turned into ids, on one core, against tiktoken and tokenizers? Medians, ratios.

python -m bench.tokenization [--quick]    one or two minutes
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path

from forge.core.config import Config
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus
from forge.data.content_ids import resolve
from forge.data.encoders import NoFastEncoder, fast_encoder
from forge.data.shards import ShardSet
from forge.data.tokenize import tokenize
from forge.data.tokenizer import LoadedTokenizer, build_tokenizer, load_tokenizer

# OpenAI's spelling of GPT-2's pattern (tiktoken_ext/openai_public.py).
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
GOALS = {"tiktoken, one by one": None, "tokenizers, encode_batch_fast": None, "forge": 20.0}
TIKTOKEN, TOKENIZERS, FORGE = GOALS
# Of the subcommand's rate, as a share of encoding alone: 40 and 60 of 87 Mtok/s on one core.
SMALL_FILES, JSONL = "small files", "JSONL"
SHARES = {SMALL_FILES: 0.46, JSONL: 0.69}
MOST_ROUNDS, WARM_UP = 9, 2
# Real text that is there wherever Forge is: the sources of all installed packages.
TEXTS = f"{sysconfig.get_path('purelib')}/**/*.py"
MOST_BYTES = 2**26

Count = Callable[[list[str]], int]


# --- the contenders: number of ids of documents -------------------------------------------------


def tiktoken_count(tokenizer: LoadedTokenizer) -> Count:
    import tiktoken

    added = tokenizer.tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.tokenizer.get_vocab(with_added_tokens=False)
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {
        bytes(byte_of[character] for character in token): number
        for token, number in vocab.items()
        if number not in added
    }
    special = {token.content: number for number, token in added.items()}
    encoding = tiktoken.Encoding(
        "forge", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return lambda documents: sum(len(encoding.encode_ordinary(text)) for text in documents)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizers_count(tokenizer: LoadedTokenizer) -> Count:
    encode = tokenizer.tokenizer.encode_batch_fast
    return lambda documents: sum(
        len(encoding.ids) for encoding in encode(documents, add_special_tokens=False)
    )


def forge_count(tokenizer: LoadedTokenizer) -> Count:
    encode = fast_encoder(tokenizer)
    return lambda documents: sum(len(ids) for ids in encode(documents))


MAKERS = {TIKTOKEN: tiktoken_count, TOKENIZERS: tokenizers_count, FORGE: forge_count}


# --- measuring ----------------------------------------------------------------------------------


def read_corpus() -> list[str]:
    settings = Tokenize(inputs=[TEXTS], invalid_utf8="replace")
    documents: list[str] = []
    num_bytes = 0
    for file in corpus.list_files(settings):
        if num_bytes < MOST_BYTES:
            documents += corpus.read_documents(file, settings)
            num_bytes += file.size
    return documents


def contend(name: str, folder: Path, pipe: Connection) -> None:
    """One contender in a process of its own: encodes two slices of the corpus on request."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    documents = read_corpus()
    try:
        count = MAKERS[name](load_tokenizer(folder))
    except (ImportError, NoFastEncoder) as err:
        pipe.send(f"{name}: not measured ({err})")
        return
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        count(documents[2 * number :: 2 * MOST_ROUNDS])  # takes back the core's own caches
        texts = documents[2 * number + 1 :: 2 * MOST_ROUNDS]
        # Of this process, which has one thread at work: others on the machine do not count.
        start = time.process_time()
        num_tokens = count(texts)
        pipe.send((time.process_time() - start, num_tokens))


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of each contender in each round, taking turns; the first rounds are to warm up.

    No text comes twice, so that a cache of words helps as much as it does in real work.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in MAKERS:
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=contend, args=(name, folder, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        trouble = pipe.recv()
        if trouble:
            print(trouble)
        else:
            pipes[name] = pipe
    rates: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(rounds):
        counts: set[int] = set()
        for name, pipe in pipes.items():
            pipe.send(number)
            seconds, num_tokens = pipe.recv()
            counts.add(num_tokens)
            if number >= WARM_UP:
                rates[name].append(num_tokens / seconds)
        assert len(counts) == 1, f"the contenders count differently: {counts}"
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return rates


def print_table(rates: dict[str, list[float]]) -> None:
    import pandas as pd

    reference = rates.get(TIKTOKEN)
    rows = []
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, reference, strict=True)] if reference else []
        rows.append(
            {
                "encode": name,
                "Mtok/s": statistics.median(values) / 1e6,
                "ratio": statistics.median(ratios) if ratios else float("nan"),
                "goal": f">= {GOALS[name]}" if GOALS[name] else "",
            }
        )
    print("one core; forge compares a sample with tokenizers meanwhile")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))


def write_jsonl(path: Path, most_bytes: int) -> None:
    """The texts of the corpus as lines of JSON, each once: the encoder caches words."""
    settings = Tokenize(inputs=[TEXTS], invalid_utf8="replace")
    with path.open("w") as lines:
        for file in corpus.list_files(settings):
            for text in corpus.read_documents(file, settings, warn=lambda _: None):
                lines.write(json.dumps({"text": text, "source": file.name}) + "\n")
            if lines.tell() > most_bytes:
                return


def measure_subcommand(
    name: str, tokenizer: Path, data: Path, inputs: str, *, encoding: float, rounds: int
) -> None:
    """The rate of all that `forge tokenize` does with one worker: list, read, encode, digest, write.

    encoding: tokens/s of encoding alone, in this run. Medians of some rounds, after one that reads the
    files into memory, each in a process of its own, as a user's command is.
    """
    spawn = multiprocessing.get_context("spawn")
    found = []
    for number in range(rounds + 1):
        pipe, theirs = spawn.Pipe()
        folder = data / f"{name} {number}"
        process = spawn.Process(target=run_subcommand, args=(tokenizer, folder, inputs, theirs))
        process.start()
        theirs.close()
        found.append(pipe.recv())
        process.join()
        shutil.rmtree(folder)
    _, _, (num_files, num_documents, num_tokens) = found[0]
    seconds, cpu = (statistics.median(one[i] for one in found[1:]) for i in (0, 1))
    print(
        f"forge tokenize, {name}, one worker: {num_files} files, {num_documents} documents, "
        f"{num_tokens / 1e6:.1f} Mtok: {num_tokens / cpu / 1e6:.2f} Mtok per CPU second, "
        f"{num_tokens / seconds / 1e6:.2f} Mtok/s; {num_tokens / cpu / encoding:.2f} of encoding alone, "
        f"goal >= {SHARES[name]}"
    )


def run_subcommand(tokenizer: Path, data: Path, inputs: str, pipe: Connection) -> None:
    """Sends seconds, CPU seconds of this process and its worker, and (files, documents, tokens)."""
    config = Config.model_validate(
        {
            "data": str(data),
            "tokenizer": {"source": "path", "path": str(tokenizer / "tokenizer.json")},
            "tokenize": {"inputs": [inputs], "invalid_utf8": "replace"},
        }
    )
    resolved = resolve(config)
    with redirect_stderr(io.StringIO()):  # the same lines in each round
        build_tokenizer(resolved)
        start, cpu_start = time.perf_counter(), sum(os.times()[:4])
        folder = tokenize(resolved, workers=1)
        seconds, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu_start
    manifest = ShardSet.open(folder).manifest
    totals = manifest.totals.values()
    counts = len(manifest.inputs), sum(t.documents for t in totals), sum(t.tokens for t in totals)
    pipe.send((seconds, cpu, counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round after the warm-up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        config = Config.model_validate({"data": data, "tokenizer": {"sample_mib": 1}})
        tokenizer = build_tokenizer(resolve(config))
        rates = measure(tokenizer, rounds=WARM_UP + 1 if options.quick else MOST_ROUNDS)
        print_table(rates)
        if FORGE not in rates:
            return
        encoding = statistics.median(rates[FORGE])
        rounds = 1 if options.quick else 5
        measure_subcommand(
            SMALL_FILES, tokenizer, Path(data), TEXTS, encoding=encoding, rounds=rounds
        )
        lines = Path(data) / "texts.jsonl"
        write_jsonl(lines, MOST_BYTES if options.quick else 2**30)
        measure_subcommand(
            JSONL, tokenizer, Path(data), str(lines), encoding=encoding, rounds=rounds
        )


if __name__ == "__main__":
    main()
