"""Known answers for the balance loss, the z-loss and the way they reach the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe.losses import attach_loss, global_balance, router_z, switch_balance
from moe.routers.selection import top_k_mask

CASES = {
    "uniform": ([[0, 0, 0, 0]] * 8, 1, 1.0),
    "uniform, two experts": ([[0, 0, 0, 0]] * 8, 2, 1.0),
    "uniform, k = E": ([[0, 0, 0, 0]] * 8, 4, 1.0),
    "uniform, T = E": ([[0, 0, 0, 0]] * 4, 2, 1.0),
    "two of four": ([[10, 10, 0, 0]] * 8, 2, 1.99991),
    "two of four, T = E": ([[10, 10, 0, 0]] * 4, 2, 1.99991),
    "skewed, k = E": ([[10, 10, 0, 0]] * 8, 4, 1.0),
    "collapsed": ([[10, 0, 0, 0]] * 8, 1, 3.99946),
    "collapsed, T = k": ([[10, 0, 0, 0]] * 1, 1, 3.99946),
    "opposite halves": ([[10, 10, 0, 0]] * 4 + [[0, 0, 10, 10]] * 4, 2, 1.0),
}


def balance(logits: list[list[float]] | Tensor, k: int, valid: list[bool] | None = None) -> Tensor:
    """The balance loss of one group of softmax scores."""
    logits_TE = torch.as_tensor(logits, dtype=torch.float32)
    chosen_TE = top_k_mask(logits_TE.detach(), k)
    valid_GN = None if valid is None else torch.tensor([valid])
    (value,) = switch_balance(logits_TE.softmax(-1)[None], chosen_TE[None], k, valid_GN)
    return value


@pytest.mark.parametrize("case", CASES)
def test_balance_loss_has_its_published_value(case: str) -> None:
    """A01: f sums to 1 (it is divided by k), so 1 is uniform and E is collapsed, whatever k and T are."""
    logits, k, expected = CASES[case]
    assert balance(logits, k).item() == pytest.approx(expected, abs=2e-5)


def test_balance_loss_is_larger_for_a_lopsided_router_than_for_two_opposite_halves() -> None:
    """A01: the value is not a constant of the configuration."""
    lopsided, opposite = CASES["two of four"], CASES["opposite halves"]
    assert balance(lopsided[0], lopsided[1]) > balance(opposite[0], opposite[1]) + 0.9


def test_balance_gradient_flows_through_the_probabilities_only() -> None:
    """d loss / d p_te = E * f_e / T by hand; the fraction f carries no gradient."""
    scores_GNE = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]], requires_grad=True)
    assigned_GNE = torch.tensor([[[True, True, False], [False, True, True]]])
    switch_balance(scores_GNE, assigned_GNE, 2).sum().backward()
    # f = (1/4, 2/4, 1/4). Normalisation of the scores projects: d/ds_i = g_i - sum_j g_j p_j, with g = E f / T.
    g = [3 * f / 2 for f in (0.25, 0.5, 0.25)]
    expected = [
        [g[i] - sum(a * b for a, b in zip(g, p, strict=True)) for i in range(3)] for p in scores_GNE[0].tolist()
    ]
    torch.testing.assert_close(scores_GNE.grad[0], torch.tensor(expected))


def test_balance_loss_normalises_sigmoid_scores_per_token() -> None:
    """Scores that sum to 0.2 and to 2 count alike, or a router could shrink its loss by shrinking its scores."""
    proportions_GNE = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1]]])
    scale_GN1 = torch.tensor([[[0.2], [1.0], [2.0], [0.01]]])
    assigned_GNE = proportions_GNE > 0.25
    scaled = switch_balance(proportions_GNE * scale_GN1, assigned_GNE, 1)
    torch.testing.assert_close(scaled, switch_balance(proportions_GNE, assigned_GNE, 1))


def test_each_group_has_a_loss_of_its_own() -> None:
    """Two opposite collapsed groups are both collapsed; averaging before the product would call them balanced."""
    logits_GNE = torch.tensor([[[10.0, 0, 0]] * 5, [[0, 0, 10.0]] * 5])
    chosen_GNE = top_k_mask(logits_GNE.flatten(0, 1), 1).view_as(logits_GNE)
    loss_G = switch_balance(logits_GNE.softmax(-1), chosen_GNE, 1)
    assert loss_G.tolist() == pytest.approx([3, 3], abs=1e-3)


def test_padding_counts_nowhere_in_the_balance_loss() -> None:
    """A02: four pads that all like expert 0 leave the value at 1 (counted, it would be 1.74986) and get no gradient."""
    logits_TE = torch.cat((10 * torch.eye(4), torch.tensor([[10.0, 0, 0, 0]] * 4))).requires_grad_()
    valid = [True] * 4 + [False] * 4
    masked, unmasked = balance(logits_TE, 1, valid), balance(logits_TE, 1)
    assert masked.item() == pytest.approx(1, abs=1e-6)
    assert unmasked.item() == pytest.approx(1.74986, abs=2e-5)
    # Uniform f gives every token the same probabilities' gradient, which softmax projects to 0: skew it by a pad.
    skewed = balance(logits_TE, 1, [True] * 3 + [False, True] + [False] * 3)
    (gradient_TE,) = torch.autograd.grad(skewed, logits_TE)
    assert gradient_TE[[3, 5, 6, 7]].eq(0).all()
    assert gradient_TE[[0, 1, 2, 4]].abs().sum(1).gt(0).all()


def test_padding_per_row_and_layer_equals_a_plain_loop() -> None:
    """A02: 2 layers, batch 2 with 1 and 3 pads: every group's value is that of its valid rows alone."""
    logits_LBSE = torch.randn(2, 2, 5, 3)
    valid = [[False, True, True, True, True], [False, False, False, True, True]]
    for layer in range(2):
        logits_BSE = logits_LBSE[layer]
        chosen_BSE = top_k_mask(logits_BSE.flatten(0, 1), 2).view_as(logits_BSE)
        loss_B = switch_balance(logits_BSE.softmax(-1), chosen_BSE, 2, torch.tensor(valid))
        for row in range(2):
            assert loss_B[row].item() == pytest.approx(balance(logits_BSE[row][valid[row]], 2).item(), rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_padding_may_hold_anything_without_changing_the_losses(poison: float) -> None:
    """A02: padding is cut out, not multiplied by 0."""
    scores_TE, logits_TE = torch.rand(5, 3), torch.randn(5, 3)
    valid_T = torch.tensor([True, False, True, True, False])
    clean = switch_balance(scores_TE[None, valid_T], scores_TE[None, valid_T] > 0.4, 2), router_z(logits_TE[valid_T])
    chosen_TE = scores_TE > 0.4
    scores_TE[~valid_T], logits_TE[~valid_T] = poison, poison
    torch.testing.assert_close(switch_balance(scores_TE[None], chosen_TE[None], 2, valid_T[None]), clean[0])
    assert router_z(logits_TE, valid_T)[valid_T].equal(clean[1])
    assert router_z(logits_TE, valid_T)[~valid_T].eq(0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_that_is_not_finite_leaves_every_gradient_finite(poison: float) -> None:
    """A02: masking the value alone is not enough; 0 times the gradient of an infinite row is NaN."""
    valid_T = torch.tensor([True, False, True])
    logits_TE = torch.tensor([[1.0, 0.0], [poison, 0.0], [0.5, 2.0]], requires_grad=True)
    scores_TE = torch.tensor([[0.6, 0.3], [poison, 0.0], [0.1, 0.7]], requires_grad=True)
    assigned_GNE = torch.tensor([[[True, False], [True, True], [True, False]]])
    loss = router_z(logits_TE, valid_T).sum() + switch_balance(scores_TE[None], assigned_GNE, 1, valid_T[None]).sum()
    loss.backward()
    for gradient in (logits_TE.grad, scores_TE.grad):
        assert gradient.isfinite().all()
        assert gradient[1].eq(0).all() and gradient[0].ne(0).any()


def test_a_group_of_padding_only_gives_zero_and_no_gradient() -> None:
    """A02: 0, not NaN; its neighbour is unaffected."""
    scores_GNE = torch.rand(2, 4, 3, requires_grad=True)
    valid_GN = torch.tensor([[False] * 4, [True] * 4])
    loss_G = switch_balance(scores_GNE, torch.rand(2, 4, 3) > 0.5, 1, valid_GN)
    loss_G.sum().backward()
    assert loss_G[0] == 0 and loss_G[1] > 0
    assert scores_GNE.grad[0].eq(0).all() and scores_GNE.grad[1].abs().sum() > 0
    assert router_z(torch.randn(4, 3), torch.zeros(4, dtype=torch.bool)).eq(0).all()


def test_global_balance_against_the_batchs_own_load_is_the_balance_loss_of_one_group() -> None:
    """Value and gradient: only where f comes from differs."""
    scores_TE = torch.rand(15, 6, requires_grad=True)
    chosen_TE = top_k_mask(scores_TE.detach(), 2)
    loss_T = global_balance(scores_TE, chosen_TE.float().mean(0) / 2)
    (expected,) = switch_balance(scores_TE[None], chosen_TE[None], 2)
    torch.testing.assert_close(loss_T.mean(), expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, scores_TE) for value in (loss_T.mean(), expected)))


def test_global_balance_by_hand() -> None:
    """E sum_e f_e p_te with p normalised per token: the second token's scores sum to 4. At most E."""
    scores_TE = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 3.0], [0.0, 1.0, 0.0]], requires_grad=True)
    fraction_E = torch.tensor([0.5, 0.5, 0.0], requires_grad=True)
    loss_T = global_balance(scores_TE, fraction_E)
    assert loss_T.tolist() == pytest.approx([1.125, 0.375, 1.5])
    assert global_balance(torch.eye(3), torch.tensor([1.0, 0.0, 0.0])).tolist() == [3, 0, 0]
    loss_T.sum().backward()
    assert fraction_E.grad is None, "the load is data"
    # d/ds = E (f_e - f . p) / sum of the scores
    expected_TE = [[0.375, 0.375, -1.125], [0.28125, 0.28125, -0.09375], [0.0, 0.0, -1.5]]
    torch.testing.assert_close(scores_TE.grad, torch.tensor(expected_TE))


def test_global_balance_at_an_even_load_is_one_and_pulls_nowhere() -> None:
    scores_TE = torch.rand(5, 4, requires_grad=True)
    loss_T = global_balance(scores_TE, torch.full((4,), 0.25))
    loss_T.sum().backward()
    assert loss_T.tolist() == pytest.approx([1] * 5)
    assert scores_TE.grad.abs().max() < 1e-6


def test_global_balance_adds_up_over_micro_batches() -> None:
    """Each token's term depends on that token and the load alone: any split gives the same terms."""
    scores_TE, fraction_E = torch.rand(15, 6), torch.rand(6).softmax(0)
    parts = [global_balance(part, fraction_E) for part in scores_TE.split([4, 1, 10])]
    torch.testing.assert_close(torch.cat(parts), global_balance(scores_TE, fraction_E))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_padding_counts_nowhere_in_the_global_balance_loss(poison: float) -> None:
    """A02: 0 and no gradient at padding; a batch of padding only gives 0."""
    valid_T, fraction_E = torch.tensor([True, False, True, True, False]), torch.tensor([0.5, 0.3, 0.2])
    scores_TE = torch.where(valid_T[:, None], torch.rand(5, 3), poison).requires_grad_()
    loss_T = global_balance(scores_TE, fraction_E, valid_T)
    torch.testing.assert_close(loss_T[valid_T], global_balance(scores_TE[valid_T], fraction_E))
    (gradient_TE,) = torch.autograd.grad(loss_T.sum(), scores_TE)
    assert loss_T[~valid_T].eq(0).all() and gradient_TE[~valid_T].eq(0).all()
    assert gradient_TE[valid_T].isfinite().all() and gradient_TE[valid_T].ne(0).any()
    assert global_balance(scores_TE, fraction_E, torch.zeros(5, dtype=torch.bool)).eq(0).all()


@pytest.mark.parametrize("tokens", [4, 400])
def test_z_loss_of_a_silent_router_is_log_experts_squared(tokens: int) -> None:
    """A07: (ln 8)^2 per token, whatever the number of tokens."""
    assert router_z(torch.zeros(tokens, 8)).tolist() == pytest.approx([4.32408] * tokens, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_z_loss_stays_finite_for_large_logits(dtype: torch.dtype) -> None:
    """A07: a stable logsumexp in fp32, also for bf16 logits."""
    z_T = router_z(torch.tensor([[100.0] + [0.0] * 7, [-3e4] * 8], dtype=dtype))
    assert z_T.dtype == torch.float32
    assert z_T[0].item() == pytest.approx(10000, abs=1e-2)
    assert z_T.isfinite().all()


def test_z_gradient_is_twice_logsumexp_times_softmax() -> None:
    """d z / d h = 2 logsumexp(h) softmax(h); a pad's gradient is exactly 0."""
    logits_TE = torch.randn(5, 3, requires_grad=True)
    valid_T = torch.tensor([True, True, False, True, False])
    router_z(logits_TE, valid_T).sum().backward()
    expected_TE = 2 * logits_TE.logsumexp(-1, keepdim=True) * logits_TE.softmax(-1)
    torch.testing.assert_close(logits_TE.grad, (expected_TE * valid_T[:, None]).detach())


@pytest.mark.parametrize("upstream", [0.0, 1.0, 1024.0])
def test_an_attached_loss_has_gradient_one_whatever_is_backpropagated_through_the_activation(upstream: float) -> None:
    """A06, A04: the loss scale of the main loss does not reach it; the activation's own gradient is untouched."""
    activation, parameter = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = attach_loss(activation, parameter**3)
    assert out.equal(activation)
    (out * upstream).sum().backward()
    assert parameter.grad == 12
    assert activation.grad.eq(upstream).all()


def test_two_losses_can_be_attached_to_one_activation() -> None:
    """Each arrives once."""
    activation, parameter = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    attach_loss(attach_loss(activation, 5 * parameter), parameter**2).sum().backward()
    assert parameter.grad == 5 + 4
