"""Against a training step whose parts are right and whose whole is not: compiled, in bf16, with the
kernels that PyTorch chooses on this device, beside fp32 on the CPU and beside transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gpu import full, make_step, relative_error
from torch import nn

from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.trainer.initialize import initialized

MODEL = Llama(dim=256, layers=4, heads=4, kv_heads=2, tie_embeddings=False)
SMALL = Llama(dim=64, layers=2, heads=4, kv_heads=2, tie_embeddings=False)  # on a CPU
VOCAB, STEPS = 512, 20
ERROR = 3e-2  # bf16 has 8 bits; the norm of the errors of all gradients grows with the depth
LOSS_ERROR = 2e-2  # nats, after STEPS updates on both sides


def settings(world: Any, **changes: Any) -> tuple[Llama, Train]:
    """Compiled, and of some size, where a compiler of kernels for the device is sure to be there."""
    on_gpu = world.device.type == "cuda"
    train = Train(
        seq_len=256 if on_gpu else 64, batch_size=4, compile=on_gpu, warmup_steps=0, **changes
    )
    return (MODEL if on_gpu else SMALL), train


@pytest.mark.parametrize("shard", ["none", "all"])
def test_loss_and_gradients_in_bf16_are_those_of_fp32_on_the_cpu(world, measured, shard):
    model, train = settings(world, shard=shard)
    step = make_step(world, model, train, VOCAB, "bf16")
    batch = step.loader.batch(0)
    loss = float(step.parallel.backward(*batch))
    found = {name: full(p.grad).cpu() for name, p in step.parallel.decoder.named_parameters()}

    plain = initialized(model, VOCAB)
    expected_loss = plain(*(tokens.cpu() for tokens in batch), None)
    expected_loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in found}
    worst = max(errors, key=lambda name: errors[name])
    measured("error of loss", abs(loss - float(expected_loss.detach())))
    measured("worst error of a gradient", errors[worst])
    measured("of", worst)
    assert abs(loss - float(expected_loss.detach())) <= LOSS_ERROR
    assert errors[worst] <= ERROR


def test_twenty_losses_are_those_of_transformers_from_equal_weights(world, measured):
    pytest.importorskip("transformers")
    from bench.contenders.hf_llama import make_model
    from bench.contenders.sizes import Sizes

    model, train = settings(world, lr=1e-3, max_steps=STEPS, decay_steps=STEPS)
    step = make_step(world, model, train, VOCAB, "bf16")
    sizes = Sizes("whole", model, VOCAB, train.seq_len, train.batch_size)
    theirs = make_model(sizes, world.device).train()
    weights = initialized(model, VOCAB).state_dict()
    theirs.load_state_dict(weights)
    found = [step(number).read() for number in range(STEPS)]
    assert not [result.trouble for result in found if result.trouble]

    optimizer = torch.optim.AdamW(_groups(theirs, train), lr=train.lr, betas=(0.9, 0.95))
    expected = []
    for result, number in zip(found, range(STEPS), strict=True):
        tokens, targets = (part.to(world.device) for part in step.loader.batch(number))
        with torch.autocast(world.device.type, torch.bfloat16):
            logits = theirs(input_ids=tokens).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), train.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = result.lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        expected.append(float(loss.detach()))
    errors = [abs(one.loss - other) for one, other in zip(found, expected, strict=True)]
    measured("largest difference of a loss", max(errors))
    measured("first and last loss", f"{expected[0]:.3f}, {expected[-1]:.3f}")
    assert max(errors) <= LOSS_ERROR


def _groups(model: nn.Module, train: Train) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
