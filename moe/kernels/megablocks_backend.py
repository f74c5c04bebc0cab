"""Experts from MegaBlocks and grouped_gemm, for comparison on a GPU: optional, and imported only when called.

Source: MegaBlocks (arXiv:2211.15841) in its later, grouped form, from `megablocks.ops` 0.10.0 and `grouped_gemm.ops`
0.3.0. Their contracts, as read there:

- `gmm(a, b, batch_sizes, trans_b)`: (A, X) rows, one run an expert, times (E, X, Y) (`trans_b`: (E, Y, X)) gives
  (A, Y). bfloat16 on CUDA, contiguous; `batch_sizes` int64 on the host; differentiable in a and b. Single runs may be
  empty, all of them may not: the CUTLASS build then raises "not possible with HW". That build reads 16 bytes at a
  time, so widths are multiples of 8.
- `gather(x, indices, bin_ids, bins, top_k)` and `scatter(x, indices, bin_ids, weights, bins, top_k)` number the
  assignments token by token, `top_k` for every token, and leave slots that no assignment fills uninitialised. So they
  express dropless token choice, and nothing where the number of experts varies from token to token (expert choice,
  thresholds, drops, padding).
- `sort`, `histogram` and `inclusive_cumsum` make what a `Routing` already holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import ConfigError, require
from moe.kernels.permute import Combine, combine_rows, gather_rows, inverse_order, permute_rows
from moe.routing import Routing

KEY = 'moe.backend = "megablocks"'
INSTEAD = 'moe.backend = "torch" works'
INSTALL = "pip install --no-deps --no-build-isolation -r requirements/megablocks.txt"
# Where the packages run; the contract tests put a stand-in for them elsewhere.
DEVICE = "cuda"
# MegaBlocks' copy kernel numbers the elements of the sorted rows in int32.
INT32_ELEMENTS = 2**31


def grouped_mlp_megablocks(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    """See `moe.kernels.grouped_mlp`.

    Gather and combine are MegaBlocks' own where every token has the same number of experts, two or more, and otherwise
    this project's `gather_rows` and `combine_rows`, whose order of summation is fixed too. MegaBlocks' rounds the
    gradient of the weights to bfloat16.

    Without a known capacity the host waits for the device twice: `gmm` wants its run lengths there, and whether
    MegaBlocks' gather applies is read from the assignments. With one (expert choice) nothing is read back.

    Args:
        x_TD: (T, D) bfloat16 on CUDA; D a multiple of 8.
        w13_E2FD: (E, 2, F, D) bfloat16; F a multiple of 8.
        w2_EDF: (E, D, F) bfloat16.
        routing: who goes where.

    Raises:
        ConfigError: for other tensors, or if the packages cannot be imported; names the backend that works.
    """
    _check(x_TD, w13_E2FD, w2_EDF)
    ops, gmm = _packages()
    token_A, weight_A = routing.token_A, routing.weight_A
    x_TD = x_TD.contiguous()
    w13_EHD, w2_EDF = w13_E2FD.flatten(1, 2).contiguous(), w2_EDF.contiguous()
    if (x_TD if token_A is None else token_A).shape[0] == 0:
        # `gmm` has nothing to launch. The gradients must be zeros all the same, not missing.
        empty = [x_TD[:0], w13_EHD[:0], w2_EDF[:0]] + ([] if weight_A is None else [weight_A.to(x_TD.dtype)])
        return torch.zeros_like(x_TD) + sum(part.sum() for part in empty)
    batch_sizes_E = _batch_sizes(routing)

    def experts(rows_AD: Tensor) -> Tensor:
        gate_AF, up_AF = gmm(rows_AD, w13_EHD, batch_sizes_E, trans_b=True).chunk(2, dim=1)
        return gmm(F.silu(gate_AF) * up_AF, w2_EDF, batch_sizes_E, trans_b=True)

    if token_A is None:
        out_TD = experts(x_TD)
        return out_TD if weight_A is None else out_TD * weight_A.to(out_TD.dtype)[:, None]

    combine = Combine.by_token(token_A, x_TD.shape[0])
    top_k = _experts_per_token(combine, x_TD, routing.capacity)
    if top_k is None:
        out_AD = experts(gather_rows(x_TD, token_A, combine))
        weight_A = out_AD.new_ones(out_AD.shape[0]) if weight_A is None else weight_A
        return combine_rows(out_AD, weight_A, token_A, combine)
    # Place of each assignment when they are numbered token by token, which is also the order that weights come in.
    place_A, expert_A = inverse_order(combine.order_A).int(), routing.expert_A().int()
    out_AD = experts(ops.gather(x_TD, place_A, expert_A, routing.offsets_E, top_k))
    weight_A = None if weight_A is None else permute_rows(weight_A, combine.order_A)
    return ops.scatter(out_AD, place_A, expert_A, weight_A, routing.offsets_E, top_k)


def _batch_sizes(routing: Routing) -> Tensor:
    """int64 (E,) run lengths on the host; those of a known capacity come from nowhere else."""
    if routing.capacity is not None:
        return torch.full((routing.num_experts,), routing.capacity, dtype=torch.int64, device="cpu")
    offsets_E = routing.offsets_E
    return offsets_E.diff(prepend=offsets_E.new_zeros(1)).to("cpu", torch.int64)


def _experts_per_token(combine: Combine, x_TD: Tensor, capacity: int | None) -> int | None:
    """How many experts every token has, if MegaBlocks' gather and scatter can be used; else None.

    With one expert a token its scatter hands out a view, which FSDP2 cannot hook safely; and there is nothing to add.
    """
    (rows,), (num_tokens, width) = combine.order_A.shape, x_TD.shape
    top_k, rest = divmod(rows, num_tokens)
    if capacity is not None or rest or top_k < 2 or rows * width >= INT32_ELEMENTS:
        return None
    regular_T = torch.arange(num_tokens, device=x_TD.device) * top_k
    return top_k if combine.start_T.equal(regular_T) else None


def _packages() -> tuple[Any, Callable[..., Tensor]]:
    """`megablocks.ops` and `grouped_gemm.ops.gmm`."""
    try:
        import megablocks.ops
        from grouped_gemm.ops import gmm
    except ImportError as error:
        if error.name in ("megablocks", "stk", "grouped_gemm"):
            problem = f"needs the package {error.name}, which is not installed: {INSTALL}"
        else:
            problem = (
                f"cannot import its packages ({error}): they were built without CUDA, or for another torch than "
                f"{torch.__version__} (megablocks 0.10.0 declares torch 2.7.0). Build them again where nvcc and a GPU "
                f"are: {INSTALL}"
            )
        raise ConfigError(f"{KEY} {problem}; or {INSTEAD}") from error
    return megablocks.ops, gmm


def require_device(devices: list[str]) -> None:
    """Refuse another kind of device than the packages run on."""
    require(devices == [DEVICE], f"{KEY} runs on {DEVICE} only, and was given {' and '.join(devices)}: {INSTEAD} there")


def _check(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor) -> None:
    """Refuse what the packages cannot do, before their kernels do it wrongly."""
    tensors = (x_TD, w13_E2FD, w2_EDF)
    require_device(sorted({tensor.device.type for tensor in tensors}))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    require(
        dtypes == ["bfloat16"],
        f"{KEY} computes in bfloat16 only, and was given {' and '.join(dtypes)}: set training.precision = "
        f'"bf16", or {INSTEAD}',
    )
    _, width, expert_width = w2_EDF.shape
    require(
        width % 8 == 0 and expert_width % 8 == 0,
        f"{KEY} needs widths that are multiples of 8, and was given model.width = {width} and moe.expert_width = "
        f"{expert_width} (the slice of one process): change them, or {INSTEAD}",
    )
