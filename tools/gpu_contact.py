"""Questions to a GPU that Forge has not run on before, and that no check of tests/gpu asks: which kernel
computes attention, what a mask of another type does, values of NVML, speed of a copy into pinned memory.

python tools/gpu_contact.py OUT.jsonl    A line of JSON for each answer, as it comes. On a CPU fewer.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
HEADS, WIDTH, LENGTH, DOCUMENT = 8, 64, 256, 64
COPIED_BYTES = 2**30 if ON_GPU else 2**24


def tell(what: str, ask: Callable[[], Any]) -> None:
    """Print the answer, or why there is none: the next question is asked all the same."""
    began = time.perf_counter()
    try:
        found = ask()
    except Exception as err:
        found = f"FAILED {type(err).__name__}: {(str(err).splitlines() or [''])[0][:200]}"
    seconds = round(time.perf_counter() - began, 2)
    line = json.dumps({"what": what, "found": found, "sec": seconds}, default=str)
    print(line, flush=True)
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def queries_keys_values(kv_heads: int) -> list[Tensor]:
    """[2, heads, LENGTH, WIDTH], bf16, the same in each call."""
    torch.manual_seed(0)
    sizes = [(2, heads, LENGTH, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    return [
        torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for size in sizes
    ]


def error(found: Tensor, expected: Tensor) -> float:
    """Distance relative to the size of what is expected, by the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def same_document() -> Tensor:
    """Pairs of tokens that see each other: of one document, causal. bool [2, 1, LENGTH, LENGTH]."""
    index = torch.arange(LENGTH, device=DEVICE)
    same = index[:, None] // DOCUMENT == index[None, :] // DOCUMENT
    return (same & (index[:, None] >= index[None, :]))[None, None].expand(2, 1, LENGTH, LENGTH)


def operators(kv_heads: int) -> list[str]:
    """Operators of PyTorch that compute causal attention, forward and backward."""
    q, k, v = queries_keys_values(kv_heads)

    def step() -> None:
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=kv_heads != HEADS
        )
        output.sum().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sorted({each.key for each in seen.key_averages() if "_scaled_dot_product" in each.key})


def error_of_mask(dtype: torch.dtype, kv_heads: int) -> float:
    """Error of bf16 attention with an additive mask of this type, to fp32 with a mask of bools. With bf16
    about 0.005 on every kernel; a kernel that reads the mask as another type gives 1, or NaN."""
    q, k, v = (each.detach() for each in queries_keys_values(kv_heads))
    keep, grouped = same_document(), kv_heads != HEADS
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=keep, enable_gqa=grouped
    )
    mask = torch.zeros(keep.shape, device=DEVICE, dtype=dtype).masked_fill_(~keep, -torch.inf)
    return error(
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped), expected
    )


def errors_of_varlen(kv_heads: int) -> list[float]:
    """Errors of varlen_attn's output and its three gradients, compared with fp32 and a mask."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (each.detach().requires_grad_() for each in queries_keys_values(kv_heads))
    bounds = torch.arange(0, 2 * LENGTH + 1, DOCUMENT, device=DEVICE, dtype=torch.int32)
    flat_q, flat_k, flat_v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    grouped = kv_heads != HEADS
    takes = "enable_gqa" in inspect.signature(varlen_attn).parameters
    more: dict[str, Any] = {"enable_gqa": grouped} if takes else {}
    found = varlen_attn(
        flat_q, flat_k, flat_v, bounds, bounds, LENGTH, LENGTH, window_size=(-1, 0), **more
    )
    assert isinstance(found, Tensor)
    found.sum().backward()
    a, b, c = exact = [each.detach().float().requires_grad_() for each in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        a, b, c, attn_mask=same_document(), enable_gqa=grouped
    )
    expected.sum().backward()
    gradients = [(one.grad, other.grad) for one, other in zip((q, k, v), exact, strict=True)]
    return [
        error(found, expected.transpose(1, 2).flatten(0, 1)),
        *(error(one, other) for one, other in gradients if one is not None and other is not None),
    ]


def values_of_nvml() -> list[dict[str, Any]]:
    """Values that preflight and the monitor read, for each GPU."""
    from forge.hosts.gpus import visible_gpus

    names = (
        *("name", "uncorrected_errors", "remapping", "clock_reasons", "link_width", "used_mib"),
        *("percent", "watts", "celsius", "pids"),
    )
    with visible_gpus() as gpus:
        return [{name: getattr(gpu, name) for name in names} for gpu in gpus]


def weights_after_an_update_that_is_left_out() -> list[tuple[float, float]]:
    """Weight and step of fused AdamW after three updates, of which `found_inf` forbids the second."""
    weight = torch.nn.Parameter(torch.ones(1000, device=DEVICE))
    optimizer: Any = torch.optim.AdamW([weight], lr=0.1, fused=True)
    seen = []
    for is_bad in (0.0, 1.0, 0.0):
        weight.grad = torch.ones_like(weight)
        optimizer.grad_scale = torch.ones((), device=DEVICE)
        optimizer.found_inf = torch.full((), is_bad, device=DEVICE)
        optimizer.step()
        seen.append((round(float(weight.detach()[0]), 4), float(optimizer.state[weight]["step"])))
    return seen


def copied_gb_per_sec() -> list[float]:
    """Three copies of a state into memory of the host; the first also pins that memory."""
    from forge.launch.torch_private import StateDictStager

    state = {"weights": torch.empty(COPIED_BYTES // 4, device=DEVICE)}
    stager: Any = StateDictStager(pin_memory=ON_GPU)
    found = []
    for _ in range(3):
        began = time.perf_counter()
        stager.stage(state, non_blocking=ON_GPU)
        if ON_GPU:
            torch.cuda.synchronize()
        found.append(round(COPIED_BYTES / (time.perf_counter() - began) / 1e9, 2))
    return found


def main() -> None:
    tell("torch", lambda: [torch.__version__, torch.version.cuda, torch.backends.cudnn.version()])
    tell("backends of attention", lambda: sorted(SDPBackend.__members__))
    if ON_GPU:
        tell("gpu", lambda: torch.cuda.get_device_properties(0))
    tell("nvml", values_of_nvml)
    for kv_heads in (HEADS, 2):
        tell(f"attention, causal, {kv_heads} heads of keys", partial(operators, kv_heads))
        for dtype in (torch.float32, torch.bfloat16):
            what = f"mask {dtype}, {kv_heads} heads of keys: error"
            tell(what, partial(error_of_mask, dtype, kv_heads))
        if ON_GPU:
            tell(
                f"varlen_attn, {kv_heads} heads of keys: errors",
                partial(errors_of_varlen, kv_heads),
            )
    torch.use_deterministic_algorithms(True)
    tell("attention, causal, deterministic", lambda: operators(HEADS))
    tell("mask bfloat16, deterministic: error", lambda: error_of_mask(torch.bfloat16, HEADS))
    torch.use_deterministic_algorithms(False)
    tell("AdamW leaves an update out", weights_after_an_update_that_is_left_out)
    tell("copies to the host, GB/s", copied_gb_per_sec)


if __name__ == "__main__":
    main()
