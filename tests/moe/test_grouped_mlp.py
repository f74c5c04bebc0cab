"""`grouped_mlp` on its own: rows already in expert order, missing weights, poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe.config import ConfigError
from moe.kernels import choose_backend, grouped_mlp
from moe.routing import Routing
from tests.moe import oracle
from tests.moe.helpers import CPU_BACKENDS, relative_error, routing_from_mask

D, E, F = 24, 5, 16


def experts() -> tuple[Tensor, Tensor]:
    return torch.randn(E, 2, F, D).mul_(0.3).requires_grad_(), torch.randn(E, D, F).mul_(0.3).requires_grad_()


def ordered(counts: list[int], weighted: bool, capacity: int | None) -> Routing:
    """Rows that stand in expert order already."""
    offsets_E = torch.tensor(counts).cumsum(0).to(torch.int32)
    weight_A = torch.rand(sum(counts), requires_grad=True) if weighted else None
    return Routing(None, offsets_E, weight_A, sum(counts), capacity)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("counts", "capacity"), [([3, 0, 4, 1, 0], None), ([0, 0, 0, 0, 7], None), ([3] * 5, 3)])
def test_rows_in_expert_order_keep_their_order(
    backend: str, weighted: bool, counts: list[int], capacity: int | None
) -> None:
    """What an all-to-all dispatcher hands over: row i belongs to the run it lies in; weights may be missing."""
    routing = ordered(counts, weighted, capacity)
    (w13_E2FD, w2_EDF), rows = experts(), torch.randn(sum(counts), D, requires_grad=True)
    inputs = [rows, w13_E2FD, w2_EDF] + ([routing.weight_A] if weighted else [])
    out = grouped_mlp(rows, w13_E2FD, w2_EDF, routing, backend)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad((out * upstream).sum(), inputs)

    copies = [t.detach().double().requires_grad_() for t in inputs]
    expert_A = [e for e, count in enumerate(counts) for _ in range(count)]
    one = torch.ones(sum(counts), dtype=torch.float64)
    weight_A = copies[3] if weighted else one
    loop = torch.stack(
        [
            weight_A[a] * oracle.swiglu(copies[0][a], copies[1][e, 0], copies[1][e, 1], copies[2][e])
            for a, e in enumerate(expert_A)
        ]
    )
    expected = torch.autograd.grad((loop * upstream.double()).sum(), copies)
    assert relative_error(out, loop) < 1e-5
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_error(actual, wanted) < 1e-5


@pytest.mark.parametrize("ragged", [False, True])
def test_a_row_that_nobody_takes_may_hold_nan(ragged: bool) -> None:
    """Poisoned unrouted rows give 0, no gradient, and touch no expert. (`reference` visits every row; it may not.)"""
    mask_TE = torch.zeros(9, E, dtype=torch.bool)
    mask_TE[[0, 2, 3, 5, 8], [0, 1, 2, 3, 4]] = True
    if ragged:
        mask_TE[3, 0] = mask_TE[8, 0] = True
    scores_TE = torch.rand(9, E)
    routing = routing_from_mask(mask_TE, scores_TE, scores_TE)
    routing.capacity = None if ragged else 1
    x_TD = torch.randn(9, D)
    x_TD[[1, 4, 6, 7]] = torch.nan
    x_TD.requires_grad_()
    w13_E2FD, w2_EDF = experts()
    y_TD = grouped_mlp(x_TD, w13_E2FD, w2_EDF, routing, "torch")
    y_TD.sum().backward()
    assert y_TD[[1, 4, 6, 7]].eq(0).all() and x_TD.grad[[1, 4, 6, 7]].eq(0).all()
    for tensor in (y_TD, x_TD.grad, w13_E2FD.grad, w2_EDF.grad):
        assert tensor.isfinite().all() and tensor.abs().sum() > 0


def test_known_and_unknown_capacity_agree() -> None:
    """Equal runs give the same through `bmm` as through the ragged product."""
    mask_TE = torch.zeros(10, E, dtype=torch.bool)
    for e in range(E):
        mask_TE[torch.randperm(10)[:4], e] = True
    scores_TE, (w13_E2FD, w2_EDF), x_TD = torch.rand(10, E), experts(), torch.randn(10, D, requires_grad=True)
    found = []
    for capacity in (None, 4):
        routing = routing_from_mask(mask_TE, scores_TE, scores_TE)
        routing.capacity = capacity
        y_TD = grouped_mlp(x_TD, w13_E2FD, w2_EDF, routing, "torch")
        found.append((y_TD, *torch.autograd.grad(y_TD.square().sum(), [x_TD, w13_E2FD, w2_EDF])))
    for ragged, static in zip(*found, strict=True):
        assert relative_error(ragged, static) < 1e-6


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_repeats_are_bit_equal(backend: str) -> None:
    """A token in several experts is summed in a fixed order: three runs, forward and backward, are identical."""
    mask_TE = torch.rand(40, E) > 0.4
    scores_TE = torch.rand(40, E)
    (w13_E2FD, w2_EDF), x_TD = experts(), torch.randn(40, D, requires_grad=True)
    runs = []
    for _ in range(3):
        y_TD = grouped_mlp(x_TD, w13_E2FD, w2_EDF, routing_from_mask(mask_TE, scores_TE, scores_TE), backend)
        runs.append((y_TD, *torch.autograd.grad(y_TD.square().sum(), [x_TD, w13_E2FD, w2_EDF])))
    for other in runs[1:]:
        assert all(a.equal(b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_summed_output_is_backpropagated_like_any_other(backend: str) -> None:
    """`y.sum()` hands back an expanded gradient, which some kernels refuse."""
    mask_TE = torch.rand(11, E) > 0.5
    scores_TE = torch.rand(11, E)
    (w13_E2FD, w2_EDF), x_TD = experts(), torch.randn(11, D, requires_grad=True)
    routing = routing_from_mask(mask_TE, scores_TE, scores_TE)
    expanded = torch.autograd.grad(grouped_mlp(x_TD, w13_E2FD, w2_EDF, routing, backend).sum(), [x_TD, w2_EDF])
    y_TD = grouped_mlp(x_TD, w13_E2FD, w2_EDF, routing, backend)
    plain = torch.autograd.grad(y_TD, [x_TD, w2_EDF], torch.ones(11, D))
    assert all(a.equal(b) for a, b in zip(expanded, plain, strict=True))


def test_a_routing_knows_its_experts() -> None:
    """`expert_A` inverts the offsets, empty experts included."""
    mask_TE = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
    scores_TE = torch.rand(3, E)
    routing = routing_from_mask(mask_TE, scores_TE, scores_TE)
    assert routing.expert_A().tolist() == [1, 1, 3, 3]
    assert routing.token_A.tolist() == [0, 1, 0, 2]
    assert routing.offsets_E.tolist() == [0, 2, 2, 4, 4]
    assert routing.assigned_TE().equal(mask_TE)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    ("width", "hidden", "dtype", "tolerance"),
    [
        (7, 5, torch.float32, 1e-5),
        (8, 6, torch.float32, 1e-5),
        (6, 8, torch.bfloat16, 2e-2),
        (7, 5, torch.float64, 1e-12),
    ],
)
def test_any_width_and_precision_works(
    backend: str, width: int, hidden: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Rows that are no multiple of 16 bytes, and float64: with empty experts, first and last included."""
    mask_TE = torch.rand(13, E) > 0.5
    mask_TE[:, [0, 2, 4]] = False
    scores_TE = torch.rand(13, E)
    pairs = [(t, e) for t, e in mask_TE.nonzero().tolist()]
    inputs = [torch.randn(13, width), torch.randn(E, 2, hidden, width), torch.randn(E, width, hidden)]
    inputs = [t.to(dtype).requires_grad_() for t in inputs]
    y_TD = grouped_mlp(*inputs, routing_from_mask(mask_TE, scores_TE, scores_TE), backend)
    upstream = torch.randn(13, width).to(dtype)
    found = torch.autograd.grad((y_TD * upstream).sum(), inputs)
    copies = [t.detach().double().requires_grad_() for t in inputs]
    loop = oracle.mixture(copies[0], scores_TE.double(), pairs, copies[1], copies[2])
    expected = torch.autograd.grad((loop * upstream.double()).sum(), copies)
    assert y_TD.dtype == dtype
    for actual, wanted in zip((y_TD, *found), (loop, *expected), strict=True):
        assert relative_error(actual, wanted) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("counts", "spare"), [([1, 0, 5], 2), ([0, 0, 0], 3), ([0, 104, 0], 24)])
def test_rows_behind_the_last_expert_may_hold_anything(dtype: torch.dtype, counts: list[int], spare: int) -> None:
    """Known failure E01: memory that was used before holds NaN there, in outputs and in the rows' gradients."""
    width, experts, used = 104, len(counts), sum(counts)
    for _ in range(50):  # what the allocator hands out next
        torch.full((used + spare, 2 * width), torch.nan, dtype=dtype)
    x_TD = torch.randn(used + spare, width, dtype=dtype)
    x_TD[used:] = torch.nan
    x_TD.requires_grad_()
    weights = [torch.randn(*shape, dtype=dtype).mul_(0.1).requires_grad_() for shape in
               ((experts, 2, 32, width), (experts, width, 32))]  # fmt: skip
    routing = Routing(None, torch.tensor(counts).cumsum(0).to(torch.int32), None, used + spare)
    upstream = torch.randn_like(x_TD)
    upstream[used:] = torch.nan
    for _ in range(2):
        out = grouped_mlp(x_TD, *weights, routing, "torch")
        grads = torch.autograd.grad(out, [x_TD, *weights], upstream)
        assert out[used:].eq(0).all() and grads[0][used:].eq(0).all()
        assert all(t.isfinite().all() for t in (out, *grads))
        for e, count in enumerate(counts):
            for grad in grads[1:]:
                assert bool(grad[e].abs().sum() > 0) == (count > 0)  # E02: exactly 0 where nobody was


TOKENS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("width", [8, 100, 128, 136])
@pytest.mark.parametrize("expert_width", [24, 96, 130])
def test_any_size_works(width: int, expert_width: int) -> None:
    """Known failure E08: every token count, 1, 3 and 8 experts, 1, 2 and all a token; fp32 and bf16."""
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        for experts in (1, 3, 8):
            for k in {1, min(2, experts), experts}:
                scores_TE = torch.rand(tokens, experts, generator=generator)
                mask_TE = torch.zeros(tokens, experts, dtype=torch.bool)
                mask_TE.scatter_(1, scores_TE.topk(k).indices, True)
                routing = routing_from_mask(mask_TE, scores_TE, scores_TE)
                x_TD = torch.randn(tokens, width, generator=generator)
                w13 = torch.randn(experts, 2, expert_width, width, generator=generator) * width**-0.5
                w2 = torch.randn(experts, width, expert_width, generator=generator) * expert_width**-0.5
                wanted = grouped_mlp(x_TD.double(), w13.double(), w2.double(), routing, "reference")
                for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
                    found = grouped_mlp(x_TD.to(dtype), w13.to(dtype), w2.to(dtype), routing, "torch")
                    assert found.shape == wanted.shape
                    assert tokens == 0 or relative_error(found, wanted) < limit, (tokens, experts, k)


def test_auto_is_torch_here_and_a_backend_that_is_not_here_is_refused() -> None:
    assert choose_backend("auto", "cpu") == "torch"
    with pytest.raises(ConfigError, match=r'"triton" needs a GPU, and this is cpu: use "torch"'):
        choose_backend("triton", "cpu")
