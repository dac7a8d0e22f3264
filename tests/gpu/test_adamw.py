"""Against an optimizer that differs from its formula: the fused kernel of a GPU is other code than that
of a CPU, which the unit tests compare.
"""

from __future__ import annotations

import torch

from forge.core.train_settings import Train
from forge.trainer.optim import make_optimizers

TRAIN = Train(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95)
EPS = 1e-8  # of torch's AdamW
# Of lr, which is the size of an update. Weights near 1 are rounded to 6e-8 in each of the three steps.
LIMIT = 1e-4


def in_fp64(weight, gradients):
    """The weight after a step for each gradient. Loshchilov and Hutter 2019 (arXiv:1711.05101)."""
    weight = weight.double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    decay = TRAIN.weight_decay if weight.dim() >= 2 else 0.0
    for step, gradient in enumerate(gradients, 1):
        weight = weight * (1 - TRAIN.lr * decay)
        mean = TRAIN.beta1 * mean + (1 - TRAIN.beta1) * gradient.double()
        square = TRAIN.beta2 * square + (1 - TRAIN.beta2) * gradient.double() ** 2
        corrected = (square / (1 - TRAIN.beta2**step)).sqrt() + EPS
        weight = weight - TRAIN.lr * mean / (1 - TRAIN.beta1**step) / corrected
    return weight


def test_adamw_moves_weights_as_computed_in_fp64(device, measured):
    """Three steps: the first one is the sign of the gradient, whatever the betas are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 384, bias=False), torch.nn.RMSNorm(384))
    parameters = list(model.to(device).parameters())
    gradients = [[torch.randn_like(parameter) for _ in range(3)] for parameter in parameters]
    expected = [in_fp64(p.detach(), g) for p, g in zip(parameters, gradients, strict=True)]
    (optimizer,) = make_optimizers(model, TRAIN)
    for step in range(3):
        for parameter, of_steps in zip(parameters, gradients, strict=True):
            parameter.grad = of_steps[step].clone()
        optimizer.step()
    errors = [
        float((p.detach() - e).abs().max()) for p, e in zip(parameters, expected, strict=True)
    ]
    measured("error / lr", max(errors) / TRAIN.lr)
    assert max(errors) <= LIMIT * TRAIN.lr
