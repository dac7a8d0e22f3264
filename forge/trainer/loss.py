"""Output layer and cross entropy fused, chunk by chunk: the full logits never exist in memory.

Shape suffixes: N tokens of a micro-batch, D model width, V vocabulary, R rows (tokens) of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Size of the fp32 logits of a chunk. CPU: 32 to 128 MiB are equally fast (vocabulary 50304), smaller
# chunks read the weights too often. GPU: enough rows to fill it (not measured).
LOGITS_BYTES_CPU = 2**26
LOGITS_BYTES_GPU = 2**29


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross entropy of hidden @ weight.T, a scalar in fp32.

    Gradients are computed in the forward pass, while the logits of a chunk are in memory. Under
    autocast the matrix products run in its dtype; the weight's gradient is still summed in fp32.
    """
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(device))
    with_grad = torch.is_grad_enabled()
    loss, *_ = _linear_cross_entropy(hidden_ND, weight_VD, targets_N, with_grad)
    return loss


# An opaque operator, so that torch.compile does not unroll the loop into its graph.
@torch.library.custom_op("forge::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, and its gradients by hidden and by weight (empty without `with_grad`).

    All chunks use the same buffers: on the CPU, new pages cost as much as a pass over them.
    """
    num_tokens, vocab_size = len(hidden_ND), len(weight_VD)
    logits_bytes = LOGITS_BYTES_CPU if hidden_ND.device.type == "cpu" else LOGITS_BYTES_GPU
    num_rows = -(-num_tokens // -(-4 * num_tokens * vocab_size // logits_bytes))
    weight = weight_VD.to(hidden_ND.dtype)
    logits_RV = hidden_ND.new_empty(num_rows, vocab_size)
    probs_RV = torch.empty_like(logits_RV, dtype=torch.float32)
    losses_N = probs_RV.new_empty(num_tokens)
    grad_hidden_ND = torch.empty_like(hidden_ND if with_grad else hidden_ND[:0])
    grad_weight_VD = torch.zeros_like(weight if with_grad else weight[:0], dtype=torch.float32)
    part_VD = torch.empty_like(weight) if with_grad and weight.dtype != torch.float32 else None

    for start in range(0, num_tokens, num_rows):
        rows = slice(start, start + num_rows)
        hidden, targets = hidden_ND[rows], targets_N[rows, None]
        logits, probs = logits_RV[: len(hidden)], probs_RV[: len(hidden)]
        torch.mm(hidden, weight.t(), out=logits)
        torch.softmax(probs.copy_(logits), 1, out=probs)  # dtype= would make a copy
        # log-sum-exp from the largest logit and its probability, which cannot underflow.
        log_sum_exp = logits.amax(1, keepdim=True) - probs.amax(1, keepdim=True).log()
        losses_N[rows] = (log_sum_exp - logits.gather(1, targets)).squeeze(1)
        if not with_grad:
            continue
        probs.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=torch.float32))
        grad_logits = logits.copy_(probs)
        torch.mm(grad_logits, weight, out=grad_hidden_ND[rows])
        if part_VD is None:
            grad_weight_VD.addmm_(grad_logits.t(), hidden)
        else:
            grad_weight_VD.add_(torch.mm(grad_logits.t(), hidden, out=part_VD))
    grad_hidden_ND /= num_tokens
    grad_weight_VD /= num_tokens
    return losses_N.mean(), grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype)


@_linear_cross_entropy.register_fake
def _(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_grad: bool) -> Any:
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
    return grad_hidden_ND * grad_loss, grad_weight_VD * grad_loss, None, None


_linear_cross_entropy.register_autograd(_scale_grads, setup_context=_keep_grads)
