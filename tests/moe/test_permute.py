"""Gathers and sums of rows: the values and gradients of plain indexing, in an order that is always the same."""

from __future__ import annotations

import torch

from moe.kernels.permute import Combine, combine_rows, gather_rows, inverse_order, permute_rows

TOKEN_A = torch.tensor([4, 0, 2, 4, 0, 0, 5])  # tokens 1 and 3 have no row
TOKENS, WIDTH = 6, 3


def test_gather_and_combine_have_the_values_and_gradients_of_indexing():
    combine = Combine.by_token(TOKEN_A, TOKENS)
    x_TD = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight_A = torch.rand(TOKEN_A.shape[0], dtype=torch.float64, requires_grad=True)
    y_TD = combine_rows(gather_rows(x_TD, TOKEN_A, combine).sin(), weight_A, TOKEN_A, combine)
    plain_TD = torch.zeros_like(y_TD).index_add(0, TOKEN_A, x_TD[TOKEN_A].sin() * weight_A[:, None])
    torch.testing.assert_close(y_TD, plain_TD)
    assert (y_TD[[1, 3]] == 0).all()
    upstream_TD = torch.randn_like(y_TD)
    for mine, theirs in zip(
        torch.autograd.grad(y_TD, (x_TD, weight_A), upstream_TD),
        torch.autograd.grad(plain_TD, (x_TD, weight_A), upstream_TD),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_no_rows_at_all_give_zeros_and_zero_gradients():
    nobody_A = torch.empty(0, dtype=torch.int64)
    combine = Combine.by_token(nobody_A, TOKENS)
    x_TD, weight_A = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.empty(0, requires_grad=True)
    y_TD = combine_rows(gather_rows(x_TD, nobody_A, combine), weight_A, nobody_A, combine)
    y_TD.sum().backward()
    assert (y_TD == 0).all() and (x_TD.grad == 0).all() and weight_A.grad.shape == (0,)


def test_a_permutation_and_its_inverse_undo_each_other_also_backward():
    order_A = torch.randperm(7)
    rows_AD = torch.randn(7, WIDTH, requires_grad=True)
    back_AD = permute_rows(permute_rows(rows_AD, order_A), inverse_order(order_A))
    assert torch.equal(back_AD, rows_AD)
    upstream_AD = torch.randn(7, WIDTH)
    (gradient,) = torch.autograd.grad(permute_rows(rows_AD, order_A), rows_AD, upstream_AD)
    assert torch.equal(gradient[order_A], upstream_AD)
