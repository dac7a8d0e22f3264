"""Activation checkpointing. Against gradients that differ from those of a run without it, and against a
setting that saves no memory."""

import ctypes

import pytest
import torch
from support import architectures
from support.architectures import changed

from forge.trainer import transforms
from forge.trainer.initialize import initialized

SMALL = {name: changed(settings, dropout=0.1) for name, settings in architectures.SMALL.items()}
each_architecture = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
VOCAB = 97
HOW = ("none", "selective", "full")


def made(how, settings):
    model = initialized(settings, VOCAB)
    transforms.recompute_activations(model, how)
    return model


def trained(model, forward=None):
    """Loss and gradients of a batch, with the dropout masks of one seed."""
    torch.manual_seed(5)
    tokens = torch.randint(VOCAB, (2, 33))
    loss = (model if forward is None else forward)(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@each_architecture
@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_bitwise_those_without_recomputation(how, bf16, small):
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected, found = trained(made("none", small)), trained(made(how, small))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


@each_architecture
@pytest.mark.parametrize("how", HOW[1:])
def test_the_compiler_sees_one_graph(how, small):
    # aot_eager runs torch.compile's whole front end and needs no C++ compiler
    model = made(how, changed(small, dropout=0.0))
    plain = trained(made("none", changed(small, dropout=0.0)))
    found = trained(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, plain)


@each_architecture
def test_each_level_keeps_less_for_the_backward_pass(small):
    kept = {how: kept_bytes(how, small) for how in HOW}
    assert kept["selective"] < 0.65 * kept["none"]
    assert kept["full"] < 0.3 * kept["selective"]


def kept_bytes(how, settings):
    """What a block keeps in memory between the forward and the backward pass."""
    model, given = made(how, settings), []
    block = model.blocks[0]
    hook = block.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
    with torch.no_grad():
        model(torch.zeros(32, 64, dtype=torch.int64))
    hook.remove()
    x_BTD, *others = given[0]
    x_BTD.requires_grad_()
    before = allocated_bytes()
    y_BTD = block(x_BTD, *others)
    return allocated_bytes() - before - y_BTD.nbytes


def allocated_bytes():
    """Of malloc, from which torch has the memory of all tensors on a CPU: the caches of selective
    checkpointing are out of reach for hooks of autograd."""
    found = Mallinfo2.of_this_process()
    return found.uordblks + found.hblkhd


class Mallinfo2(ctypes.Structure):
    """man 3 mallinfo2"""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]

    @classmethod
    def of_this_process(cls):
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = cls
        return mallinfo2()
