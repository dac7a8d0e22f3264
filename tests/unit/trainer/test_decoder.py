"""Against a loss or a model that is slightly wrong: training would run, with a worse result."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.architectures import changed, each_architecture
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import forge.trainer.loss
import forge.trainer.numerics
from forge.core.errors import ConfigError
from forge.core.models.base import Model
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import World
from forge.launch.rank import Rank
from forge.trainer import transforms
from forge.trainer.initialize import initialized
from forge.trainer.loss import linear_cross_entropy
from forge.trainer.models import llama_decoder
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.numerics import use_fast_fp32

SMALL = Llama(dim=32, layers=2, heads=4, kv_heads=2)
VOCAB = 101
MATMUL = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(0))


def plain_loss(model: Decoder, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss from whole logits, as torch computes it."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def one_rank() -> Iterator[World]:
    """A process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield World(Rank(0, 0, 1, 1), torch.device("cpu"), "gloo", dist.group.WORLD)
    dist.destroy_process_group()


# --- loss ---------------------------------------------------------------------------------------


@each_architecture
@pytest.mark.parametrize("rows", [1, 7, 30, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_and_gradients_equal_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, rows: int, tied: bool, small: Model
) -> None:
    monkeypatch.setattr(forge.trainer.loss, "LOGITS_BYTES_CPU", 4 * VOCAB * rows)
    tokens = tokens_of(3, 11)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = initialized(changed(small, tie_embeddings=tied), VOCAB)
    expected = plain_loss(model, inputs, targets)
    (3 * expected).backward()  # a factor as of gradient accumulation
    expected_grads = grads_of(model)
    model.zero_grad()
    loss = model(inputs, targets)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads_of(model), expected_grads, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(inputs, targets), loss)


def test_loss_is_finite_and_right_where_a_probability_underflows() -> None:
    hidden = torch.tensor([[200.0, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([2]))
    loss.backward()
    assert loss.item() == 400
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([[200.0, 0], [0, 0], [-200, 0]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_activations_make_a_non_finite_loss(bad: float) -> None:
    hidden = torch.ones(4, 8)
    hidden[2, 3] = bad
    assert not linear_cross_entropy(hidden, torch.ones(5, 8), torch.zeros(4).long()).isfinite()


@each_architecture
def test_bf16_keeps_an_fp32_loss_and_fp32_gradients_close_to_the_true_ones(small: Model) -> None:
    tokens = tokens_of(4, 33)
    model = initialized(small, VOCAB)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    true_grads = grads_of(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32
    for name, grad in grads_of(model).items():
        assert grad.dtype == torch.float32
        assert (grad - true_grads[name]).norm() < 0.03 * true_grads[name].norm(), name


def test_loss_operator_obeys_the_rules_of_torch_compile() -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    operator = torch.ops.forge.linear_cross_entropy.default
    torch.library.opcheck(operator, (hidden, weight, torch.arange(6) % 5, True, False))


# --- model --------------------------------------------------------------------------------------


@each_architecture
def test_no_token_sees_a_later_one(small: Model) -> None:
    model = initialized(small, VOCAB)
    tokens = tokens_of(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any()


def test_attention_depends_on_the_distance_of_tokens_and_not_on_their_position() -> None:
    cos_TK, sin_TK = llama_decoder.rotary(40, 16, 10_000.0, "cpu")
    query, key = torch.randn(16), torch.randn(16)
    q_TK, k_TK = (llama_decoder.rotate(x.expand(40, 16), cos_TK, sin_TK) for x in (query, key))
    scores = q_TK @ k_TK.T
    torch.testing.assert_close(scores[10, 3], scores[37, 30])
    assert abs(scores[10, 3] - scores[10, 9]) > 1e-3
    torch.testing.assert_close(scores[5, 5], query @ key)


def test_grouped_heads_equal_repeated_key_and_value_heads() -> None:
    full = SMALL.model_copy(update={"kv_heads": None})
    grouped, repeated = initialized(SMALL, VOCAB), initialized(full, VOCAB)
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens_of(2, 9)), repeated(tokens_of(2, 9)))


def test_weights_are_named_and_shaped_as_in_hugging_face_llama() -> None:
    shapes = {name: tuple(p.shape) for name, p in initialized(SMALL, VOCAB).state_dict().items()}
    assert {name: shape for name, shape in shapes.items() if ".layers.1." not in name} == {
        "model.embed_tokens.weight": (101, 32),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.post_attention_layernorm.weight": (32,),
        "model.layers.0.mlp.gate_proj.weight": (128, 32),
        "model.layers.0.mlp.up_proj.weight": (128, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 128),
        "model.norm.weight": (32,),
    }
    untied = initialized(SMALL.model_copy(update={"tie_embeddings": False}), VOCAB)
    assert untied.state_dict().keys() - shapes.keys() == {"lm_head.weight"}


@each_architecture
def test_dropout_acts_in_training_only(small: Model) -> None:
    model = initialized(changed(small, dropout=0.5), VOCAB)
    tokens = tokens_of(2, 9)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), initialized(small, VOCAB)(tokens))


@each_architecture
@pytest.mark.parametrize("keys", [{}, {"tie_embeddings": False}, {"ffn_dim": 40}])
def test_number_of_parameters_of_each_architecture_is_known_without_a_decoder(
    small: Model, keys: dict
) -> None:
    settings = changed(small, **keys)
    decoder = make_decoder(settings, VOCAB)
    assert settings.num_parameters(VOCAB) == sum(p.numel() for p in decoder.parameters())
    of_blocks = {
        name: p.numel() for name, p in decoder.named_parameters() if decoder.is_in_block(name)
    }
    assert sum(of_blocks.values()) == settings.layers * settings.block_parameters
    assert any(decoder.adds_to_residual(name) for name in of_blocks)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("ffn_dim", [None, 40])
def test_number_of_parameters_is_known_without_a_decoder(
    tied: bool, kv_heads: int | None, ffn_dim: int | None
) -> None:
    shape = {"tie_embeddings": tied, "kv_heads": kv_heads, "ffn_dim": ffn_dim}
    settings = SMALL.model_copy(update=shape)
    counted = sum(parameter.numel() for parameter in make_decoder(settings, VOCAB).parameters())
    assert settings.num_parameters(VOCAB) == counted


@each_architecture
def test_flops_count_every_product_of_the_forward_pass_three_times(small: Model) -> None:
    tokens = tokens_of(2, 16)
    for tied in (True, False):
        model = initialized(changed(small, tie_embeddings=tied), VOCAB)
        # the plain kernel of attention, because torch counts no products of the CPU's fused one
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            model(tokens)
        norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
        estimated = model.flops_per_token(16) - 6 * norms
        assert 3 * counter.get_total_flops() / tokens.numel() == pytest.approx(estimated)


# --- under torch's wrappers ---------------------------------------------------------------------


@each_architecture
def test_compiled_model_has_no_graph_break_and_the_same_gradients(small: Model) -> None:
    model = initialized(small, VOCAB)
    tokens = tokens_of(2, 17)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    expected = grads_of(model)
    model.zero_grad()
    # aot_eager runs torch.compile's whole front end and needs no C++ compiler
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled_loss = compiled(tokens[:, :-1], tokens[:, 1:])
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(grads_of(model), expected)


@each_architecture
@pytest.mark.parametrize("tied", [True, False])
def test_ddp_and_fsdp2_have_the_gradients_of_the_bare_model(
    one_rank: World, tied: bool, small: Model
) -> None:
    settings = changed(small, tie_embeddings=tied)
    tokens = tokens_of(2, 17)

    def train(model: torch.nn.Module) -> torch.Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss

    bare, copied, sharded = (initialized(settings, VOCAB) for _ in range(3))
    loss = train(bare)
    assert torch.equal(train(DistributedDataParallel(copied)), loss)
    torch.testing.assert_close(grads_of(copied), grads_of(bare))

    transforms.shard_decoder(sharded, one_rank, Train(), 1, "fp32")
    assert torch.equal(train(sharded), loss)
    gathered = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads_of(sharded).items()
    }
    torch.testing.assert_close(gathered, grads_of(bare))


@each_architecture
def test_fsdp2_in_bf16_keeps_master_weights_and_gradients_in_fp32(
    one_rank: World, small: Model
) -> None:
    model = initialized(small, VOCAB)
    tokens = tokens_of(2, 17)
    true_loss = model(tokens[:, :-1], tokens[:, 1:])
    transforms.shard_decoder(model, one_rank, Train(), 1, "bf16")
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32
    assert 0 < abs(loss.item() - true_loss.item()) < 0.01
    assert {grad.dtype for grad in grads_of(model).values()} == {torch.float32}


# --- arithmetic and samples ---------------------------------------------------------------------


@pytest.fixture
def default_fp32() -> Iterator[None]:
    """Restore the setting for fp32 products."""
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


def test_fast_fp32_is_true_fp32(default_fp32: None) -> None:
    use_fast_fp32()
    left, right = torch.randn(700, 300), torch.randn(300, 500)
    exact = left.double() @ right.double()
    assert ((left @ right).double() - exact).norm() / exact.norm() < 1e-6
    rounded = (left.bfloat16() @ right.bfloat16()).double()
    assert (rounded - exact).norm() / exact.norm() > 1e-3  # the measure can tell


def test_arithmetic_as_inexact_as_bf16_is_undone(
    monkeypatch: pytest.MonkeyPatch, default_fp32: None
) -> None:
    before = MATMUL.fp32_precision
    monkeypatch.setattr(forge.trainer.numerics, "product_error", lambda: 3e-3)
    assert not use_fast_fp32()
    assert MATMUL.fp32_precision == before


def test_freed_memory_is_reused_without_page_faults() -> None:
    # a process of its own: the setting cannot be undone
    program = """
import resource, torch
from forge.trainer.numerics import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24)  # 64 MiB, 16384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, kept = faults(), keep_freed_memory()
for _ in range(3):
    faults()  # the heap finds its size
print(before, kept, faults())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, kept, after = done.stdout.split()
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert int(after) < 200 < int(before)


@each_architecture
def test_samples_repeat_with_their_seed_and_leave_the_model_in_training(small: Model) -> None:
    model = initialized(changed(small, dropout=0.5), VOCAB)
    first = model.generate([1, 2, 3], 12, seed=0)
    assert len(first) == 12
    assert all(0 <= token < VOCAB for token in first)
    assert model.generate([1, 2, 3], 12, seed=0) == first
    assert model.generate([1, 2, 3], 12, seed=1) != first
    assert model.training


def test_samples_at_temperature_0_take_the_most_likely_token() -> None:
    model = initialized(SMALL, VOCAB).eval()
    ids = [5]
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert model.generate([5], 4, temperature=0) == ids[1:]
    assert model.generate([5], 4, top_k=1) == ids[1:]


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        initialized(SMALL, VOCAB).generate([], 4)


def test_samples_beyond_the_context_use_the_last_tokens():
    """At positions beyond train.seq_len the model was never trained."""
    model = initialized(SMALL, VOCAB)
    seen = []
    model.register_forward_pre_hook(lambda _model, inputs: seen.append(inputs[0].tolist()[0]))
    model.context = 4
    made = model.generate([1, 2, 3], 6)
    ids = [1, 2, 3, *made]
    assert seen == [ids[max(0, end - 4) : end] for end in range(3, 9)]
