"""Blocks are compiled once: a graph for each would take minutes at the start, and torch gives up after
eight."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import World, joined
from forge.launch.rank import Rank
from forge.trainer import transforms
from forge.trainer.initialize import initialize
from forge.trainer.models.decoder import make_decoder
from forge.trainer.parallel import ParallelModel

LAYERS, VOCABULARY = 12, 256
RECOMPUTE = ("none", "selective", "full")
COMBINATIONS = [
    *itertools.product([None, "tensorwise", "rowwise"], RECOMPUTE, [False]),
    *itertools.product([None], RECOMPUTE, [True]),
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:
        yield world


@pytest.fixture(autouse=True)
def _traced_only() -> Iterator[None]:
    """Graphs are traced and differentiated, not translated into C++."""
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kept", ["fsdp2", "ddp"])
@pytest.mark.parametrize("values", COMBINATIONS, ids=lambda values: "-".join(map(str, values)))
def test_twelve_blocks_share_one_graph(world, monkeypatch, caplog, kept, values):
    monkeypatch.setattr(transforms, "replicates", lambda *_: kept == "fsdp2")
    caplog.set_level(logging.WARNING, "torch._dynamo")
    keys = dict(zip(("fp8", "recompute", "document_mask"), values, strict=True))
    train = Train(seq_len=32, batch_size=2, micro_batch_size=2, compile=True, **keys)
    decoder = make_decoder(Llama(dim=64, layers=LAYERS, heads=4), VOCABULARY)
    parallel = ParallelModel(decoder, train, world, "bf16", eos_id=0)
    initialize(decoder, 0)
    parallel.wrap()
    tokens = torch.randint(VOCABULARY, (2, 33))
    parallel.backward(tokens[:, :-1], tokens[:, 1:])
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["graph_break"] == {}
    assert [record.message for record in caplog.records if "limit" in record.message] == []
