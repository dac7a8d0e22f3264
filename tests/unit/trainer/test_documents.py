"""Against a document that sees, or is moved by, the documents packed beside it."""

import pytest
import torch
import torch.nn.functional as F
from support import architectures
from support.architectures import each_architecture

from forge.core.machine import Machine
from forge.core.train_settings import Train
from forge.launch.process_group import joined
from forge.launch.rank import Rank
from forge.trainer import transforms
from forge.trainer.documents import find_documents, has_varlen
from forge.trainer.initialize import initialized
from forge.trainer.parallel import ParallelModel

EOS, VOCAB, CPU = 0, 50, torch.device("cpu")
SMALL = architectures.SMALL["llama"]
LENGTHS = (5, 1, 9, 6)  # of the documents of a window, the last without its end

# fp32 sums in another order; the largest difference seen is 3e-7.
SAME = {"rtol": 1e-5, "atol": 1e-6}


def window(seed=0):
    """One window of documents, each but the last with its end-of-text token: [1, 22]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (1, sum(LENGTHS) + 1), generator=generator)
    tokens[0, torch.tensor(LENGTHS[:-1]).cumsum(0) - 1] = EOS
    return tokens


def parts(tokens):
    """Inputs and targets of each document alone; the token after its last one is a target, too."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    return [(tokens[:, a:b], tokens[:, a + 1 : b + 1]) for a, b in bounds]


def documents_of(inputs, *, varlen=False):
    return find_documents(inputs, EOS, CPU, varlen=varlen)


def loss_of(model, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return model(inputs, targets, documents_of(inputs))


def gradients(model):
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def assert_same(found, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **SAME, msg=name)


@each_architecture
def test_loss_and_gradients_of_a_window_are_those_of_its_documents_alone(small):
    model, tokens = initialized(small, VOCAB), window()
    packed = loss_of(model, tokens)
    packed.backward()
    found = gradients(model)
    total = sum(LENGTHS)
    alone = sum(model(one, wanted) * one.shape[1] / total for one, wanted in parts(tokens))
    alone.backward()
    torch.testing.assert_close(packed, alone, **SAME)
    assert_same(found, gradients(model))
    plain = model(tokens[:, :-1], tokens[:, 1:])
    assert abs(plain - packed) > 1e-4


@each_architecture
@torch.no_grad()
def test_change_in_one_document_changes_no_other_bit(small):
    model, tokens = initialized(small, VOCAB), window()[:, :-1]
    changed = tokens.clone()
    changed[0, 7] += 1  # in the third
    before, after = (model(t, None, documents_of(t)) for t in (tokens, changed))
    same = (before == after).all(-1)[0].tolist()
    assert same == [True] * 7 + [False] * 8 + [True] * 6


def test_positions_begin_with_each_window_and_after_each_end():
    tokens = torch.tensor([[7, EOS, 7, EOS, EOS, 7], [EOS, 7, 7, 7, 7, EOS]])
    documents = documents_of(tokens)
    assert documents.positions.tolist() == [[0, 1, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4]]


def test_bounds_are_cumulative_lengths_padded_with_empty_documents():
    tokens = torch.tensor([[7, EOS, 7, EOS, EOS, 7], [EOS, 7, 7, 7, 7, EOS]])
    documents = documents_of(tokens, varlen=True)
    assert documents.bounds.tolist() == [0, 2, 4, 5, 6, 7] + [12] * 11
    assert documents.bounds.dtype == torch.int32
    assert documents.mask is None
    one = documents_of(torch.full((2, 6), 7), varlen=True)
    assert one.bounds.tolist() == [0, 6, 12, 12, 12]


def varlen_of_torch_2_11(q, k, v, bounds, *others, window_size):
    """Without fewer heads of keys and values than of queries."""
    assert q.shape == k.shape == v.shape
    return plain_varlen(q, k, v, bounds, *others, window_size=window_size, enable_gqa=False)


def plain_varlen(q, k, v, bounds, *others, window_size, enable_gqa):
    """What varlen_attn computes on a GPU, document by document."""
    assert window_size == (-1, 0)
    other, longest, _ = others
    assert bounds is other
    lengths = bounds.diff().tolist()
    assert max(lengths) <= longest
    found = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads = [x.transpose(0, 1) for x in parts]
        if len(parts[0]):
            y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa)
            found.append(y.transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("varlen", [plain_varlen, varlen_of_torch_2_11])
def test_variable_length_attention_gives_what_the_mask_gives(monkeypatch, varlen):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    model = initialized(SMALL, VOCAB)
    tokens = torch.cat([window(0), window(1)])
    loss = loss_of(model, tokens)
    loss.backward()
    expected = gradients(model)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    other = model(inputs, targets, documents_of(inputs, varlen=True))
    other.backward()
    torch.testing.assert_close(other, loss, **SAME)
    assert_same(gradients(model), expected)


def test_a_cpu_uses_the_mask():
    assert not has_varlen(SMALL, CPU, "bf16")


@pytest.mark.parametrize(
    ("varlen", "has_it"), [(plain_varlen, True), (varlen_of_torch_2_11, True), (print, False)]
)
def test_a_gpu_uses_the_kernels_of_its_torch(monkeypatch, varlen, has_it):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert has_varlen(SMALL, torch.device("cuda"), "bf16") == has_it


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_blocks_have_the_same_gradients(how):
    kept, recomputed = initialized(SMALL, VOCAB), initialized(SMALL, VOCAB)
    transforms.recompute_activations(recomputed, how)
    for model in (kept, recomputed):
        loss_of(model, window()).backward()
    expected = gradients(kept)
    assert all(g.equal(expected[name]) for name, g in gradients(recomputed).items())


@each_architecture
def test_block_with_a_mask_is_one_graph(small):
    model, tokens = initialized(small, VOCAB), window()
    expected = loss_of(model, tokens)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="eager")
    torch.testing.assert_close(loss_of(model, tokens), expected, **SAME)


@pytest.fixture
def parallel_of(monkeypatch):
    """parallel_of(**train): a model on this process alone."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:

        def make(precision="fp32", **train):
            model = initialized(SMALL, VOCAB)
            weights = model.state_dict()
            settings = Train(seq_len=21, batch_size=2, **train)
            parallel = ParallelModel(model, settings, world, precision, eos_id=EOS)
            model.load_state_dict(weights)
            return parallel

        yield make


def test_training_and_evaluation_use_the_mask_where_the_key_says_so(parallel_of):
    tokens = torch.cat([window(0), window(1)])
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = loss_of(initialized(SMALL, VOCAB), tokens).item()
    masked = parallel_of(document_mask=True, micro_batch_size=1)
    assert float(masked.backward(inputs, targets)) == pytest.approx(expected, abs=1e-6)
    with torch.no_grad():
        assert masked.loss(inputs, targets) == pytest.approx(expected, abs=1e-6)
    plain = parallel_of()
    without = initialized(SMALL, VOCAB)(inputs, targets).item()
    assert float(plain.backward(inputs, targets)) == without
    with torch.no_grad():
        assert plain.loss(inputs, targets) == without
    assert abs(without - expected) > 1e-4


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_mask_has_the_dtype_of_queries_where_attention_gets_it(monkeypatch, parallel_of, precision):
    """cuDNN on Hopper reads an fp32 mask beside bf16 queries as bf16: wrong, without an error."""
    seen = []
    attention = F.scaled_dot_product_attention

    def watched(q, k, v, **others):
        seen.append((q.dtype, k.dtype, v.dtype, others["attn_mask"].dtype))
        return attention(q, k, v, **others)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    parallel = parallel_of(document_mask=True, micro_batch_size=1, precision=precision)
    parallel.backward(window()[:, :-1], window()[:, 1:])
    wanted = torch.bfloat16 if precision == "bf16" else torch.float32
    assert seen and set(seen) == {(wanted,) * 4}
