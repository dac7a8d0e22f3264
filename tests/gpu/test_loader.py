"""Against a GPU that waits for its tokens: they are gathered and pinned in a thread while it computes."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from support.gpu import make_step

from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.data.loader import Loader, Prefetcher
from forge.data.sources import open_tokens
from forge.data.windows import joined_windows

STEPS, WARM_UP = 24, 4


class Timed:
    """A loader, with the seconds that each call of its `batch` took."""

    def __init__(self, loader):
        self.loader, self.seconds, self.first = loader, [], None

    def batch(self, step):
        began = time.perf_counter()
        batch = self.loader.batch(step)
        self.seconds.append(time.perf_counter() - began)
        self.first = self.first or batch
        return batch


def test_wait_of_a_step_for_its_batch_is_recorded(device, world, tiny_project, measured):
    [folder] = tiny_project.glob("data/tokens/*")
    tokens = open_tokens(folder)
    on_gpu = device.type == "cuda"
    seq_len, batch_size = (1024, 32) if on_gpu else (32, 4)
    windows = joined_windows(tokens, seq_len)
    plain = Loader(windows, seed=0, batch_size=batch_size, rank=0, world_size=1)
    timed = Timed(Prefetcher(plain, device))
    train = Train(seq_len=seq_len, batch_size=batch_size, compile=on_gpu)
    model = Llama(dim=768, layers=12, heads=12) if on_gpu else Llama(dim=32, layers=2, heads=2)
    step = make_step(world, model, train, tokens.vocab_size, "bf16")
    step = replace(step, loader=timed)
    began, read = 0.0, None
    for number in range(STEPS):
        if number == WARM_UP:
            began = time.perf_counter()
        launched = step(number)
        if read is not None:  # as training does: the results of a step while the next one runs
            read.read()
        read = launched
    read.read()
    total, waited = time.perf_counter() - began, sum(timed.seconds[WARM_UP:])
    measured("ms a step waits", 1e3 * waited / (STEPS - WARM_UP))
    measured("share of the time", waited / total)
    assert len(timed.seconds) == STEPS
    assert torch.equal(timed.first[0].cpu(), plain.batch(0)[0])
