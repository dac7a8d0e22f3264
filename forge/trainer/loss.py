"""Output layer and cross entropy fused, chunk by chunk: the full logits never exist in memory.

Shape suffixes: N tokens of a micro-batch, D model width, V vocabulary, R rows (tokens) of a chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# Size of the fp32 logits of a chunk. CPU: 32 to 128 MiB are equally fast (vocabulary 50304), smaller
# chunks read the weights too often. GPU: enough rows to fill it (not measured).
LOGITS_BYTES_CPU = 2**26
LOGITS_BYTES_GPU = 2**29


def worth_compiling(device: torch.device) -> bool:
    """Return whether linear_cross_entropy should be compiled: on a GPU, where passes over the logits take
    as long as the products. A CPU spends its time in products."""
    return device.type == "cuda"


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, compiled: bool = False
) -> Tensor:
    """Mean cross entropy of hidden @ weight.T, a scalar in fp32. A negative target counts 0 in the sum,
    and 1 in the number of tokens.

    Gradients are computed in the forward pass, while the logits of a chunk are in memory. Under
    autocast the matrix products run in its dtype; the weight's gradient is still summed in fp32.
    compiled: where there are gradients, by torch.compile; raises what it raises.
    """
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(device))
    with_grad = torch.is_grad_enabled()
    compiled = compiled and with_grad
    loss, *_ = _linear_cross_entropy(hidden_ND, weight_VD, targets_N, with_grad, compiled)
    return loss


# An opaque operator, so that torch.compile does not unroll the loop into its graph.
@torch.library.custom_op("forge::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_grad: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, and its gradients by hidden and by weight (empty without `with_grad`).

    All chunks use the same buffers: on the CPU, new pages cost as much as a pass over them.
    """
    num_tokens, vocab_size = len(hidden_ND), len(weight_VD)
    ignored_N = targets_N < 0
    targets_N = targets_N.clamp(min=0)
    num_rows = _rows_of_chunk(num_tokens, vocab_size, hidden_ND.device.type)
    weight = weight_VD.to(hidden_ND.dtype)
    logits_RV = hidden_ND.new_empty(num_rows, vocab_size)
    probs_RV = torch.empty_like(logits_RV[: 0 if compiled else num_rows], dtype=torch.float32)
    losses_N = probs_RV.new_empty(num_tokens)
    grad_hidden_ND = torch.empty_like(hidden_ND if with_grad else hidden_ND[:0])
    grad_weight_VD = torch.zeros_like(weight if with_grad else weight[:0], dtype=torch.float32)
    part_VD = torch.empty_like(weight) if with_grad and weight.dtype != torch.float32 else None

    for start in range(0, num_tokens, num_rows):
        rows = slice(start, start + num_rows)
        hidden, targets = hidden_ND[rows], targets_N[rows, None]
        logits = logits_RV[: len(hidden)]
        torch.mm(hidden, weight.t(), out=logits)
        if compiled:
            losses_N[rows], grad_logits = _compiled_chunk()(logits, targets)
        else:
            losses_N[rows], grad_logits = _chunk(logits, targets, probs_RV, with_grad)
        if not with_grad:
            continue
        torch.mm(grad_logits, weight, out=grad_hidden_ND[rows])
        # A row of zeros adds nothing to the gradient by the weight.
        hidden = hidden.masked_fill(ignored_N[rows, None], 0)
        if part_VD is None:
            grad_weight_VD.addmm_(grad_logits.t(), hidden)
        else:
            grad_weight_VD.add_(torch.mm(grad_logits.t(), hidden, out=part_VD))
    losses_N.masked_fill_(ignored_N, 0)
    grad_hidden_ND.masked_fill_(ignored_N[: len(grad_hidden_ND), None], 0)
    grad_hidden_ND /= num_tokens
    grad_weight_VD /= num_tokens
    return losses_N.mean(), grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype)


def _rows_of_chunk(num_tokens: int, vocab_size: int, device: str) -> int:
    """On a GPU chunks of one size, if up to twice as many have that: each size is compiled apart."""
    logits_bytes = LOGITS_BYTES_CPU if device == "cpu" else LOGITS_BYTES_GPU
    least = -(-4 * num_tokens * vocab_size // logits_bytes)
    numbers = [least] if device == "cpu" else range(least, 2 * least + 1)
    number = next((number for number in numbers if num_tokens % number == 0), least)
    return -(-num_tokens // number)


def _chunk(
    logits_RV: Tensor, targets_R1: Tensor, probs_RV: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk, and with `with_grad` their gradients by the logits, in the place of these.

    probs_RV: fp32, a buffer of at least as many rows.
    """
    probs = probs_RV[: len(logits_RV)]
    torch.softmax(probs.copy_(logits_RV), 1, out=probs)  # dtype= would make a copy
    # log-sum-exp from the largest logit and its probability, which cannot underflow.
    log_sum_exp = logits_RV.amax(1, keepdim=True) - probs.amax(1, keepdim=True).log()
    losses_R = (log_sum_exp - logits_RV.gather(1, targets_R1)).squeeze(1)
    if with_grad:
        probs.scatter_add_(1, targets_R1, torch.full_like(targets_R1, -1, dtype=torch.float32))
        logits_RV.copy_(probs)
    return losses_R, logits_RV


@functools.cache
def _compiled_chunk() -> Any:
    # Not at import: torch.compile imports the compiler, which takes a second.
    return torch.compile(_fused_chunk, dynamic=False)


def _fused_chunk(logits_RV: Tensor, targets_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The same in two or three passes over the logits, once it is compiled: fp32 only in registers,
    nothing is scattered."""
    logits = logits_RV.float()
    log_sum_exp = logits.logsumexp(1, keepdim=True)
    losses_R1 = log_sum_exp - logits.gather(1, targets_R1)
    probs = (logits - log_sum_exp).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets_R1
    return losses_R1.squeeze(1), (probs - is_target.float()).to(logits_RV.dtype)


@_linear_cross_entropy.register_fake
def _(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_grad: bool, compiled: bool
) -> Any:
    return (
        hidden_ND.new_empty((), dtype=torch.float32),
        torch.empty_like(hidden_ND if with_grad else hidden_ND[:0]),
        torch.empty_like(weight_VD if with_grad else weight_VD[:0]),
    )


def _keep_grads(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(
        False
    )  # else backward gets zeros for these two, as large as the weight
    ctx.save_for_backward(*output[1:])


def _scale_grads(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
    grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
    return grad_hidden_ND * grad_loss, grad_weight_VD * grad_loss, None, None, None


_linear_cross_entropy.register_autograd(_scale_grads, setup_context=_keep_grads)
