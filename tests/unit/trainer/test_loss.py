"""The compiled loss of GPUs, here as C++. Against a loss that is fast and slightly wrong, and against one
that is compiled in every step."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from support.gpu import relative_error
from torch._dynamo.utils import counters

import forge.trainer.loss
import forge.trainer.parallel
from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import joined
from forge.launch.rank import Rank
from forge.trainer.initialize import initialize
from forge.trainer.loss import _rows_of_chunk, linear_cross_entropy
from forge.trainer.models.decoder import make_decoder
from forge.trainer.parallel import ParallelModel

VOCAB = 301
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


def inputs_of(num_tokens: int) -> list[torch.Tensor]:
    """Hidden states and weight, which want gradients, and targets."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, weight = (
        torch.randn(rows, 32, generator=generator).bfloat16().requires_grad_()
        for rows in (num_tokens, VOCAB)
    )
    return [hidden, weight, torch.randint(VOCAB, (num_tokens,), generator=generator)]


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """How many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.parametrize(("num_tokens", "expected"), [(60, 1), (67, 2)], ids=["equal", "last"])
def test_compiled_loss_is_that_of_fp64_with_one_graph_for_each_size_of_a_chunk(
    monkeypatch, graphs, num_tokens, expected
):
    """60 tokens are three chunks of 20; 67, which nothing divides, are three of 17 and one of 16."""
    monkeypatch.setattr(forge.trainer.loss, "LOGITS_BYTES_CPU", 4 * VOCAB * 20)
    for _ in range(2):
        hidden, weight, targets = inputs_of(num_tokens)
        loss = linear_cross_entropy(hidden, weight, targets, compiled=True)
        loss.backward()
    assert graphs() == expected
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    true_loss = F.cross_entropy(exact[0] @ exact[1].T, targets)
    true_loss.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss.detach(), true_loss.detach()) < 1e-2
    for found, true in zip((hidden, weight), exact, strict=True):
        assert relative_error(found.grad, true.grad) < 1e-2


@needs_compiler
def test_compiled_loss_is_right_where_a_probability_underflows_and_shows_what_is_not_finite():
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
    hidden, target = torch.tensor([[200.0, 0.0]]), torch.tensor([2])
    loss = linear_cross_entropy(hidden, weight, target, compiled=True)
    loss.backward()
    assert loss.item() == 400
    assert torch.equal(weight.grad, torch.tensor([[200.0, 0], [0, 0], [-200, 0]]))
    for bad in (float("nan"), float("inf")):
        hidden = torch.tensor([[bad, 0.0]])
        assert not linear_cross_entropy(hidden, weight, target, compiled=True).isfinite()


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "expected"),
    [
        (8192, 50304, 2048),
        (8192, 32000, 4096),
        (8192, 65536, 2048),
        (24000, 50304, 2400),
        (64, 300, 64),
    ],
)
def test_chunks_on_a_gpu_have_one_size_and_at_most_512_mib_in_fp32(
    num_tokens, vocab_size, expected
):
    rows = _rows_of_chunk(num_tokens, vocab_size, "cuda")
    assert rows == expected
    assert num_tokens % rows == 0 and 4 * rows * vocab_size <= 2**29


# --- in training --------------------------------------------------------------------------------


@pytest.fixture
def make(monkeypatch) -> Iterator[Callable[[], ParallelModel]]:
    """A model that compiles its loss as on a GPU; its blocks stay as they are, which saves time."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(forge.trainer.parallel, "worth_compiling", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:

        def make() -> ParallelModel:
            model = make_decoder(Llama(dim=32, layers=1, heads=2, tie_embeddings=False), VOCAB)
            train = Train(seq_len=16, batch_size=4, compile=True)
            parallel = ParallelModel(model, train, world, "fp32")
            initialize(model, seed=0)
            parallel.wrap()
            return parallel

        yield make


def a_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (4, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


@needs_compiler
def test_training_compiles_its_loss_and_evaluation_does_not(monkeypatch, make):
    calls = []

    def chunk(*tensors):
        calls.append(1)
        return forge.trainer.loss._fused_chunk(*tensors)

    monkeypatch.setattr(forge.trainer.loss, "_compiled_chunk", lambda: chunk)
    parallel = make()
    calls.clear()
    with torch.no_grad():
        expected = parallel.loss(*a_batch())
    assert not calls
    assert float(parallel.backward(*a_batch())) == pytest.approx(expected, rel=1e-6)
    assert calls


@needs_compiler
def test_loss_that_cannot_be_compiled_warns_and_trains_eager(monkeypatch, make, capsys):
    def fail(*_):
        raise RuntimeError("no Triton")

    monkeypatch.setattr(forge.trainer.loss, "_compiled_chunk", lambda: fail)
    parallel = make()
    assert "training without torch.compile: RuntimeError: no Triton" in capsys.readouterr().err
    assert parallel.backward(*a_batch()) > 0


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_negative_target_adds_nothing_to_loss_and_gradients(monkeypatch, dtype, error):
    """Also in a chunk that has none, and where none is learned at all."""
    monkeypatch.setattr(forge.trainer.loss, "LOGITS_BYTES_CPU", 4 * VOCAB * 20)
    hidden, weight, targets = inputs_of(60)
    hidden, weight = (part.detach().to(dtype).requires_grad_() for part in (hidden, weight))
    for ignored in (slice(3, 50, 3), slice(15, 45), slice(None)):
        masked = targets.clone()
        masked[ignored] = ~masked[ignored]
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, masked)
        loss.backward()
        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        labels = masked.where(masked >= 0, -100)
        true_sum = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
        (true_sum / len(targets)).backward()
        close = {"rtol": error, "atol": error, "check_dtype": False}
        torch.testing.assert_close(loss.detach(), true_sum.detach() / 60, **close)
        for found, true in zip((hidden, weight), exact, strict=True):
            torch.testing.assert_close(found.grad, true.grad, **close)
        assert not hidden.grad[masked < 0].any()
