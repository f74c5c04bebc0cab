"""Importance, load, orthogonality, mutual information and L1: values worked out by hand, gradients by plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe.losses import importance, l1_sparsity, load, mutual_information, orthogonality
from moe.routers.selection import top_k_mask

K = 2
Scalars = list[list[Tensor]]


def plain_squared_variation(totals: list[Tensor]) -> Tensor:
    mean = sum(totals) / len(totals)
    return sum((total - mean) ** 2 for total in totals) / len(totals) / mean**2


def plain_importance(weights: Scalars) -> Tensor:
    return plain_squared_variation([sum(row[e] for row in weights) for e in range(len(weights[0]))])


def plain_load(clean: Scalars, noisy: Scalars, std: Scalars) -> Tensor:
    experts = range(len(clean[0]))
    chances = []
    for t in range(len(clean)):
        for e in experts:
            others = sorted((noisy[t][other] for other in experts if other != e), reverse=True)
            z = (clean[t][e] - others[K - 1]) / std[t][e]
            chances.append((1 + torch.erf(z / math.sqrt(2))) / 2)
    return plain_squared_variation([sum(chances[e :: len(clean[0])]) for e in experts])


def plain_entropy(probabilities: list[Tensor]) -> Tensor:
    return -sum(p * p.log() for p in probabilities)


def plain_mutual_information(scores: Scalars) -> Tensor:
    rows = [[score / sum(row) for score in row] for row in scores]
    mean = [sum(row[e] for row in rows) / len(rows) for e in range(len(rows[0]))]
    return plain_entropy(mean) - sum(plain_entropy(row) for row in rows) / len(rows)


def plain_l1(scores: Scalars) -> Tensor:
    tokens, experts = len(scores), len(scores[0])
    active = [sum(1 for row in scores if row[e] > 0) for e in range(experts)]
    return sum(experts / (K * tokens) * active[e] * row[e] for row in scores for e in range(experts)) / tokens


@dataclass
class Case:
    """A loss of groups, its plain loop over one group, and what its inputs look like."""

    loss: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: Callable[[tuple[int, ...]], list[Tensor]]


def noisy_logits(shape: tuple[int, ...]) -> list[Tensor]:
    clean, std = torch.randn(shape), torch.rand(shape) + 0.3
    return [clean, clean + std * torch.randn(shape), std]


CASES = {
    "importance": Case(importance, plain_importance, lambda shape: [torch.rand(shape)]),
    "load": Case(lambda *inputs: load(*inputs[:3], K, *inputs[3:]), plain_load, noisy_logits),
    "mutual information": Case(mutual_information, plain_mutual_information, lambda shape: [torch.rand(shape) + 0.01]),
    "l1": Case(
        lambda scores, *valid: l1_sparsity(scores, scores > 0, K, *valid),
        plain_l1,
        lambda shape: [torch.randn(shape).relu()],
    ),
}
VALID_GN = torch.tensor([[True, True, False, True, True], [False, True, True, False, True]])
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
@pytest.mark.parametrize("shape", [(2, 5, 6), (1, 5, 3), (2, 3, 3)], ids=["T < E", "k + 1 = E", "T = E"])
def test_value_and_gradient_are_those_of_a_plain_loop(case: Case, shape: tuple[int, ...]) -> None:
    inputs = [value.requires_grad_() for value in case.inputs(shape)]
    loss_G = case.loss(*inputs)
    assert loss_G.dtype == torch.float32 and loss_G.shape == shape[:1]
    doubles = [value.detach().double().requires_grad_() for value in inputs]
    expected = [case.plain(*([list(row) for row in value[g]] for value in doubles)) for g in range(shape[0])]
    torch.testing.assert_close(loss_G.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    # Unequal weights, so that a group cannot receive its neighbour's gradient.
    weight_G = torch.arange(1.0, shape[0] + 1)
    (loss_G * weight_G).sum().backward()
    sum(value * weight for value, weight in zip(expected, weight_G.double(), strict=True)).backward()
    for value, double in zip(inputs, doubles, strict=True):
        assert value.grad.abs().sum() > 0
        torch.testing.assert_close(value.grad.double(), double.grad, rtol=1e-4, atol=1e-6)


@each_case
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_changes_neither_value_nor_gradient(case: Case, poison: float) -> None:
    """A02: a group equals that of its valid tokens alone, whatever the padding holds."""
    inputs = case.inputs((2, 5, 3))
    poisoned = [torch.where(VALID_GN[..., None], value, poison).requires_grad_() for value in inputs]
    loss_G = case.loss(*poisoned, VALID_GN)
    gradients = torch.autograd.grad(loss_G.sum(), poisoned)
    for g in range(2):
        alone = [value[g : g + 1, VALID_GN[g]].requires_grad_() for value in inputs]
        expected = case.loss(*alone)
        torch.testing.assert_close(loss_G[g : g + 1], expected)
        for whole, part in zip(gradients, torch.autograd.grad(expected.sum(), alone), strict=True):
            torch.testing.assert_close(whole[g, VALID_GN[g]], part[0])
            assert whole[g, ~VALID_GN[g]].eq(0).all()


@each_case
def test_a_group_of_padding_only_gives_zero_and_no_gradient(case: Case) -> None:
    """A02: 0, not NaN; its neighbour is unaffected."""
    inputs = [value.requires_grad_() for value in case.inputs((2, 5, 3))]
    valid_GN = torch.tensor([[False] * 5, [True] * 5])
    loss_G = case.loss(*inputs, valid_GN)
    assert loss_G[0] == 0
    torch.testing.assert_close(loss_G[1:], case.loss(*(value[1:] for value in inputs)))
    for gradient in torch.autograd.grad(loss_G.sum(), inputs):
        assert gradient[0].eq(0).all() and gradient[1].isfinite().all()


@each_case
def test_groups_add_up_over_micro_batches(case: Case) -> None:
    """Three groups in one pass, or two and one: the caller sums groups and divides by the step's."""
    inputs = case.inputs((3, 5, 6))
    parts = [case.loss(*(value[half] for value in inputs)) for half in (slice(2), slice(2, 3))]
    torch.testing.assert_close(torch.cat(parts), case.loss(*inputs))


@each_case
def test_a_nan_of_a_valid_token_is_not_hidden(case: Case) -> None:
    inputs = case.inputs((1, 5, 3))
    inputs[0][0, 1] = math.nan
    assert case.loss(*inputs).isnan().all()


def rows(*tokens: list[float]) -> Tensor:
    """One group."""
    return torch.tensor([tokens])


@pytest.mark.parametrize(
    "weights, expected",
    [
        (rows([0.25] * 4, [0.25] * 4), 0),
        (rows([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]), 0),
        (rows([1, 0, 0, 0], [1, 0, 0, 0]), 3),  # E - 1
        (rows([0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]), 1),  # E / k - 1
        (rows([0.5, 0.5, 0], [0.7, 0, 0.3]), 0.335),  # sums 1.2, 0.5, 0.3; mean 2/3; variance 0.446667 / 3
    ],
)
def test_importance_by_hand(weights: Tensor, expected: float) -> None:
    assert importance(weights).item() == pytest.approx(expected, abs=1e-6)


def test_importance_ignores_the_scale_of_all_weights() -> None:
    """Also where their squares would underflow."""
    weights_GNE = torch.rand(2, 5, 3)
    torch.testing.assert_close(importance(weights_GNE * 1e-18), importance(weights_GNE))


def test_importance_of_weights_that_are_all_zero_is_zero() -> None:
    weights_GNE = torch.zeros(1, 5, 3, requires_grad=True)
    loss_G = importance(weights_GNE)
    loss_G.sum().backward()
    assert loss_G == 0 and weights_GNE.grad.eq(0).all()


def test_load_by_hand() -> None:
    """k = 1, logits (1, 0, -1), noise 2, nothing drawn: the bars are 0, 1, 1, so Phi(0.5), Phi(-0.5), Phi(-1)."""
    logits, std = rows([1.0, 0.0, -1.0]), torch.full((1, 1, 3), 2.0)
    chances = [0.6914625, 0.3085375, 0.1586553]
    mean = sum(chances) / 3
    expected = sum((chance - mean) ** 2 for chance in chances) / 3 / mean**2
    assert load(logits, logits, std, 1).item() == pytest.approx(expected, rel=1e-5)


def test_load_is_zero_at_even_loads_and_experts_over_k_less_one_when_the_same_experts_are_certain() -> None:
    std = torch.ones(1, 4, 4)
    even, collapsed = 50 * torch.eye(4)[None], rows(*[[50.0, 50.0, 0.0, 0.0]] * 4)
    assert load(even, even, std, 1).item() == pytest.approx(0, abs=1e-6)
    assert load(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), std, 2).item() == pytest.approx(0, abs=1e-6)
    assert load(collapsed, collapsed, std, 2).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("std", [0.0, 1e-44, 1e-30, 1e-3])
def test_load_with_vanishing_noise_counts_assignments(std: float) -> None:
    """Its value is the squared variation of the counts; every gradient stays finite."""
    clean_GNE = torch.randn(2, 5, 6).mul(10).requires_grad_()
    std_GNE = torch.full((2, 5, 6), std, requires_grad=True)
    loss_G = load(clean_GNE, clean_GNE, std_GNE, K)
    counts_GE = torch.stack([top_k_mask(logits.detach(), K).sum(0) for logits in clean_GNE]).float()
    torch.testing.assert_close(loss_G, counts_GE.var(1, correction=0) / counts_GE.mean(1) ** 2, atol=1e-4, rtol=1e-4)
    for gradient in torch.autograd.grad(loss_G.sum(), (clean_GNE, std_GNE)):
        assert gradient.isfinite().all()


def test_load_of_tied_logits_without_noise_is_a_half_each() -> None:
    """Two of three experts tie for one place: chances 1/2, 1/2, 0."""
    logits_GNE = rows([1.0, 1.0, 0.0]).requires_grad_()
    loss_G = load(logits_GNE, logits_GNE, torch.zeros(1, 1, 3), 1)
    assert loss_G.item() == pytest.approx(0.5)
    assert torch.autograd.grad(loss_G.sum(), logits_GNE, allow_unused=True, materialize_grads=True)[0].eq(0).all()


def test_an_expert_masked_with_minus_infinity_has_no_load_and_finite_gradients() -> None:
    """Chances Phi(1), Phi(-1), 0: the bars of the others are 0 and 1."""
    clean_GNE = rows([1.0, 0.0, -math.inf]).requires_grad_()
    std_GNE = torch.ones(1, 1, 3, requires_grad=True)
    loss_G = load(clean_GNE, clean_GNE.detach(), std_GNE, 1)
    chances = [0.8413447, 0.1586553, 0.0]
    assert loss_G.item() == pytest.approx(3 * sum(chance**2 for chance in chances) - 1, rel=1e-5)
    for gradient in torch.autograd.grad(loss_G.sum(), (clean_GNE, std_GNE)):
        assert gradient.isfinite().all() and gradient[..., :2].ne(0).all() and gradient[..., 2] == 0


def test_load_with_every_expert_chosen_is_zero() -> None:
    """k = E: nobody has a bar to beat."""
    logits_GNE = torch.randn(2, 5, 3)
    assert load(logits_GNE, logits_GNE, torch.ones(2, 5, 3), 3, VALID_GN).equal(torch.zeros(2))


@pytest.mark.parametrize("k", [0, 4])
def test_load_refuses_a_k_that_no_token_can_have(k: int) -> None:
    with pytest.raises(ValueError, match=f"experts_per_token = {k}: must be from 1 to the number of experts, 3"):
        load(torch.zeros(1, 5, 3), torch.zeros(1, 5, 3), torch.ones(1, 5, 3), k)


def test_orthogonality_by_hand() -> None:
    """Gram matrix (1, 2; 2, 5) less the identity: 0 + 2 + 2 + 4; its gradient is 2 sign(.) R."""
    weight_ED = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 1.0]], requires_grad=True)
    value = orthogonality(weight_ED)
    value.backward()
    assert value == 8
    sign_EE = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert weight_ED.grad.equal(2 * sign_EE @ weight_ED.detach())


@pytest.mark.parametrize("experts, width", [(3, 5), (4, 4)])
def test_orthogonality_is_zero_for_orthonormal_routers(experts: int, width: int) -> None:
    """For a rotated basis up to rounding, and with exactly no gradient for unit vectors."""
    rotation_ED = torch.linalg.qr(torch.randn(width, width))[0][:experts]
    assert orthogonality(rotation_ED).item() == pytest.approx(0, abs=1e-5)
    weight_ED = torch.eye(experts, width, requires_grad=True)
    orthogonality(weight_ED).backward()
    assert weight_ED.grad.eq(0).all()


def test_orthogonality_of_zero_weights_is_the_number_of_experts() -> None:
    weight_ED = torch.zeros(3, 5, requires_grad=True)
    value = orthogonality(weight_ED)
    value.backward()
    assert value == 3 and weight_ED.grad.eq(0).all()


def test_more_experts_than_width_cannot_be_orthogonal() -> None:
    """E - D is the minimum, with E - D silent experts: random routers and descent stay above it."""
    assert orthogonality(torch.eye(6, 4)) == 2
    weight_ED = torch.randn(6, 4, requires_grad=True)
    for step in range(200):
        (gradient,) = torch.autograd.grad(orthogonality(weight_ED), weight_ED)
        weight_ED = (weight_ED - 0.02 * 0.97**step * gradient).detach().requires_grad_()
        assert orthogonality(weight_ED) > 2 - 1e-5


def test_orthogonality_stays_in_fp32_under_autocast() -> None:
    weight_ED = torch.randn(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = orthogonality(weight_ED)
    assert inside.equal(orthogonality(weight_ED))


@pytest.mark.parametrize(
    "scores, expected",
    [
        (rows([0.25] * 4, [0.25] * 4), 0),
        (rows([1, 0, 0, 0], [1, 0, 0, 0]), 0),  # collapsed: certain, and says nothing
        (rows([1, 0, 0], [0, 1, 0], [0, 0, 1]), math.log(3)),
        (rows([1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]), math.log(3) - 2 / 3 * math.log(2)),
        # H(0.5, 0.5) - (H(1/4, 3/4) + H(3/4, 1/4)) / 2
        (rows([0.25, 0.75], [0.75, 0.25]), math.log(2) - (0.25 * math.log(4) + 0.75 * math.log(4 / 3))),
    ],
)
def test_mutual_information_by_hand(scores: Tensor, expected: float) -> None:
    assert mutual_information(scores).item() == pytest.approx(expected, abs=1e-6)


def test_mutual_information_normalises_scores_per_token() -> None:
    """Sigmoid scores that sum to 0.2 and to 2 count alike."""
    scores_GNE = torch.rand(1, 4, 3)
    scaled = mutual_information(scores_GNE * torch.tensor([0.2, 1.0, 2.0, 0.01])[:, None])
    torch.testing.assert_close(scaled, mutual_information(scores_GNE))


def test_mutual_information_of_certain_tokens_has_a_finite_gradient() -> None:
    """0 ln 0 = 0, and so is its gradient."""
    scores_GNE = torch.eye(3)[None].requires_grad_()
    mutual_information(scores_GNE).sum().backward()
    assert scores_GNE.grad.isfinite().all()
    logits_GNE = torch.tensor([[[200.0, 0.0, 0.0], [0.0, 200.0, -200.0]]], requires_grad=True)
    mutual_information(logits_GNE.softmax(-1)).sum().backward()
    assert logits_GNE.grad.isfinite().all()


def test_mutual_information_of_one_token_is_zero() -> None:
    assert mutual_information(torch.rand(3, 1, 4)).abs().max() < 1e-6


@pytest.mark.parametrize("k", [1, 2, 4])
def test_l1_at_even_target_sparsity_is_the_mean_norm_of_a_token(k: int) -> None:
    """Each of 4 experts is active, with weight 3, for k of 4 tokens: f = 1, so the loss is 3 k."""
    scores_NE = 3 * sum(torch.eye(4).roll(shift, 1) for shift in range(k))
    assert l1_sparsity(scores_NE[None], scores_NE[None] > 0, k).item() == pytest.approx(3 * k)


def test_l1_by_hand() -> None:
    """k = 1, two tokens, E = 3: active 2, 1, 0 times, so f = 3, 1.5, 0; (3 * 1.5 + 1.5 * 0.5) / 2."""
    scores = rows([1.0, 0.5, 0.0], [0.5, 0.0, 0.0]).requires_grad_()
    loss_G = l1_sparsity(scores, scores > 0, 1)
    loss_G.sum().backward()
    assert loss_G.item() == 2.625
    assert scores.grad.equal(rows([1.5, 0.75, 0.0], [1.5, 0.75, 0.0]))


def test_l1_of_a_silent_router_is_zero() -> None:
    """The lower bound, which every coefficient above 0 pulls towards."""
    assert l1_sparsity(torch.zeros(2, 5, 3), torch.zeros(2, 5, 3, dtype=torch.bool), K).eq(0).all()
