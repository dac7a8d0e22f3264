"""Document masks (train.document_mask): attention and positions stay inside the documents of a window.

A document ends with its end-of-text token, and the ids alone say where: the loader and its checkpoints
know nothing of documents. As in OLMo-core and, by default, Megatron-LM, the end-of-text token belongs to
the document that it ends, and the first token of the next document is its target (in torchtitan none).

Shape suffixes: B windows of a micro-batch, T tokens of a window, N of all windows, H heads, K head width.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.core.models.base import Model

# Numbers of documents to which `Documents.bounds` is padded: powers of this. torch.compile makes one
# graph for each, and stops after eight (torch._dynamo.config.recompile_limit).
PADDING = 4
# Limits of the FlashAttention kernels behind varlen_attn.
SMALLEST_CAPABILITY, WIDEST_HEAD, HEAD_MULTIPLE = (8, 0), 256, 8


class Documents(NamedTuple):
    """The documents of a micro-batch, made once for all layers. Either `mask` or `bounds` is given.

    positions: int64 [B, T], of each token in its document. mask: [B, 1, T, T] in the dtype of queries,
    added to the scores of attention: 0 or -inf; another dtype would be converted, and kept for the
    backward pass, in each layer.
    bounds: int32 [num_documents + 1], cumulative lengths over all N tokens; padded with N, which stands
    for empty documents.
    """

    positions: Tensor
    mask: Tensor | None
    bounds: Tensor | None


def find_documents(
    tokens_BT: Tensor,
    eos_id: int,
    device: torch.device,
    *,
    varlen: bool,
    dtype: torch.dtype = torch.float32,
) -> Documents:
    """The documents of a micro-batch, on a device. varlen: for varlen_attn; else a mask. dtype: of
    queries.

    tokens_BT: the inputs, on the CPU, where they can be counted without waiting for a GPU. A window
    begins with a document of its own, since it may begin anywhere in one.
    """
    begins_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    begins_BT[:, 1:] = tokens_BT[:, :-1] == eos_id
    index_T = torch.arange(tokens_BT.shape[1])
    start_BT = torch.where(begins_BT, index_T, 0).cummax(1).values
    bounds = _copied(_bounds(begins_BT), device) if varlen else None
    positions_BT = _copied(index_T - start_BT, device)
    mask = None if varlen else _mask(_copied(start_BT, device), dtype)
    return Documents(positions_BT, mask, bounds)


def _mask(start_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """start_BT: for each token the index of the first token of its document, in the window."""
    same_BTT = start_BT[:, :, None] == start_BT[:, None, :]
    mask_BTT = torch.zeros_like(same_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(~same_BTT.tril(), -torch.inf)[:, None]


def _bounds(begins_BT: Tensor) -> Tensor:
    starts = begins_BT.flatten().nonzero().flatten()
    length = PADDING
    while length < len(starts):
        length *= PADDING
    bounds = torch.full((length + 1,), begins_BT.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts
    return bounds


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from which a copy to a GPU does not stop the host
    return tensor.to(device, non_blocking=True)


def has_varlen(model: Model, device: torch.device, precision: str) -> bool:
    """Return whether varlen_attn computes the attention of a model: in bf16, on a GPU that FlashAttention
    has kernels for. Elsewhere a mask is used."""
    if device.type != "cuda" or precision != "bf16":
        return False
    from torch.nn.attention.varlen import varlen_attn  # takes a second

    head_dim = model.head_width
    return (
        torch.cuda.get_device_capability(device) >= SMALLEST_CAPABILITY
        and head_dim <= WIDEST_HEAD
        and head_dim % HEAD_MULTIPLE == 0
        # Earlier versions of this function have other arguments.
        and "window_size" in inspect.signature(varlen_attn).parameters
    )


@torch.compiler.assume_constant_result
def _shares_heads() -> bool:
    """Return whether varlen_attn takes fewer heads of keys and values than of queries; torch 2.11 does
    not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, documents: Documents, *, grouped: bool
) -> Tensor:
    """Causal attention inside of documents. grouped: there are fewer heads of keys and values."""
    if documents.bounds is None:
        assert documents.mask is not None
        # cuDNN reads a mask of another dtype as if it had that of the queries (pytorch #191612).
        mask = documents.mask.to(q_BHTK.dtype)
        return F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, enable_gqa=grouped
        )
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq_len, _ = q_BHTK.shape
    how: dict[str, Any] = {"enable_gqa": grouped} if _shares_heads() else {}
    if grouped and not how:
        shared = heads // k_BHTK.shape[1]
        k_BHTK, v_BHTK = (x.repeat_interleave(shared, dim=1) for x in (k_BHTK, v_BHTK))
    q_NHK, k_NHK, v_NHK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTK, k_BHTK, v_BHTK))
    y_NHK: Tensor = varlen_attn(  # type: ignore[assignment]
        q_NHK,
        k_NHK,
        v_NHK,
        documents.bounds,
        documents.bounds,
        seq_len,  # an upper bound: torch.compile makes a graph for every number
        seq_len,
        window_size=(-1, 0),  # causal
        **how,
    )
    return y_NHK.unflatten(0, (batch, seq_len)).transpose(1, 2)
