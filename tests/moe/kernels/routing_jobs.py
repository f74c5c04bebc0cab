"""Routing decisions in the interpreter's process, beside those of `moe/routers/selection.py`."""

from __future__ import annotations

import torch

from moe.routers import selection


def top_k(tokens: int, experts: int, k: int, levels: int) -> dict[str, float]:
    """Logits of few different values, so that scores tie. What differs, and by how much."""
    from moe.kernels.triton.routing import softmax_top_k

    logits_TE = (torch.randn(tokens, experts) * levels).round() / levels * 3
    logits_TE[0] = 1.0
    logits_TE[1] = torch.cat([torch.full((experts - 1,), -torch.inf), torch.zeros(1)])
    logits_TE = logits_TE.requires_grad_()
    scores_TE, chosen_TE = softmax_top_k(logits_TE, k)
    expected_TE = logits_TE.softmax(-1)
    upstream_TE = torch.randn(tokens, experts)
    gradients = [torch.autograd.grad(scores, logits_TE, upstream_TE)[0] for scores in (scores_TE, expected_TE)]
    wanted_TE = selection.top_k_mask(scores_TE.detach(), k)
    last_T = scores_TE.masked_fill(~wanted_TE, 2).amin(1)
    return {
        "ties": ((scores_TE == last_T[:, None]).sum(1) > 1).float().mean().item(),
        "decisions": (chosen_TE != wanted_TE).sum().item(),
        "experts": (chosen_TE.sum(1) - k).abs().max().item(),
        "scores": (scores_TE - expected_TE).abs().max().item(),
        "gradients": (gradients[0] - gradients[1])[2:].abs().max().item(),
    }


def top_k_of_nan(experts: int, k: int) -> tuple[list[list[bool]], list[list[bool]]]:
    """A token of NaN logits: what is chosen, and what `top_k_mask` chooses."""
    from moe.kernels.triton.routing import softmax_top_k

    logits_TE = torch.zeros(2, experts)
    logits_TE[1, 2] = torch.nan
    scores_TE, chosen_TE = softmax_top_k(logits_TE, k)
    return chosen_TE.tolist(), selection.top_k_mask(scores_TE, k).tolist()


def largest(shape: tuple[int, ...], count: int, levels: int) -> dict[str, bool]:
    """Values of few different sizes, both zeros and -inf among them. What agrees with `selection.largest_per_row`."""
    from moe.kernels.triton.routing import largest_per_row

    values = (torch.randn(shape) * levels).round() / levels
    values[torch.rand(shape) < 0.1] = -torch.inf
    values[values == 0] = torch.tensor([0.0, -0.0])[torch.randint(2, (int((values == 0).sum()),))]
    found, expected = largest_per_row(values, count), selection.largest_per_row(values, count)
    tied = (values == expected[1][..., None]).sum(-1).max().item() > 1
    return {"ties": tied, "index": found[0].equal(expected[0]), "kth": found[1].equal(expected[1])}
