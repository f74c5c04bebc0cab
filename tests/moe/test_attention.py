"""Attention against a plain loop: grouped heads, norms, rotary positions, documents and padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.attention import Attention, attention_mask, rotary_rotation, rotate
from moe.config import ModelConfig
from moe.model import positions, token_losses
from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import calibrate, make_model, model_config, relative_error

CPU = torch.device("cpu")


def loop_attention(module: Attention, config: ModelConfig, x_SD: Tensor, document: list[int]) -> Tensor:
    """One sequence, one query, one head, one key at a time, in float64; positions restart in each document."""
    heads, kv_heads, size = config.heads, config.resolved_kv_heads, config.resolved_head_dim
    weight = torch.cat([module.query.weight, module.key.weight, module.value.weight]).double()
    weights = (
        weight[: heads * size],
        weight[heads * size : (heads + kv_heads) * size],
        weight[(heads + kv_heads) * size :],
    )
    position = [t - document.index(d) for t, d in enumerate(document)]
    rows: list[list[list[Tensor]]] = []  # query, key, value; position; head
    for which, w in enumerate(weights):
        norm = (module.query_norm, module.key_norm, None)[which]
        table = []
        for t, x_D in enumerate(x_SD):
            row = w @ x_D
            if norm is not None and config.qk_norm == "width":
                row = oracle.rms_norm(row, norm.weight.double(), config.norm_epsilon)
            split = list(row.split(size))
            if norm is not None and config.qk_norm == "head":
                split = [oracle.rms_norm(h, norm.weight.double(), config.norm_epsilon) for h in split]
            table.append([oracle.rotate(h, position[t], config.rope_base) for h in split] if which < 2 else split)
        rows.append(table)
    query, key, value = rows
    out = []
    for t in range(len(document)):
        seen = [s for s in range(t + 1) if document[s] == document[t]]
        heads_out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            logits = torch.stack([query[t][h] @ key[s][g] / math.sqrt(size) for s in seen])
            heads_out.append(sum(p * value[s][g] for p, s in zip(logits.softmax(0), seen, strict=True)))
        out.append(module.output.weight.double() @ torch.cat(heads_out))
    return torch.stack(out)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "one head": {"heads": 1, "kv_heads": None, "head_dim": 24},
    "multi-head": {"heads": 4, "kv_heads": None},
    "grouped": {"heads": 6, "kv_heads": 2},
    "multi-query, odd head size": {"heads": 3, "kv_heads": 1, "head_dim": 10},
    "norm per head": {"heads": 6, "kv_heads": 2, "qk_norm": "head"},
    "norm over the width": {"heads": 6, "kv_heads": 3, "qk_norm": "width", "rope_base": 100.0},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_is_the_loop(case: str, packed: bool) -> None:
    """Output and the gradient of every weight, for two rows with different document borders (F08)."""
    config = model_config(**ATTENTIONS[case])
    module = Attention(config, index=0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    documents = [[0, 0, 0, 1, 2, 2, 2], [5, 5, 6, 6, 6, 6, 6]] if packed else [[0] * 7] * 2
    x_BSD, upstream_BSD = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    document_BS = torch.tensor(documents) if packed else None
    rotation = rotary_rotation(
        positions(2, 7, CPU, document_BS, None, None), config.resolved_head_dim, config.rope_base, torch.float32
    )
    mask = attention_mask(2, 7, CPU, torch.float32, document_BS)
    out_BSD = module(x_BSD, rotation, mask)
    loop_BSD = torch.stack(
        [loop_attention(module, config, x, d) for x, d in zip(x_BSD.double(), documents, strict=True)]
    )
    parameters = list(module.parameters())
    found = torch.autograd.grad((out_BSD * upstream_BSD).sum(), parameters)
    expected = torch.autograd.grad((loop_BSD * upstream_BSD).sum(), parameters)
    assert relative_error(out_BSD, loop_BSD) < 1e-5
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5


def test_rotary_products_depend_on_the_distance_only() -> None:
    """<R_i q, R_j k> = <R_{i+n} q, R_{j+n} k>, and it does depend on the distance."""
    query, key = torch.randn(2, 1, 1, 1, 8)

    def product(i: int, j: int) -> float:
        turned = [
            rotate(x, rotary_rotation(torch.tensor([[p]]), 8, 50.0, torch.float32)) for x, p in ((query, i), (key, j))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert product(7, 3) == pytest.approx(product(1007, 1003), abs=1e-4)
    assert product(7, 3) == pytest.approx(product(4, 0), abs=1e-5)
    assert abs(product(7, 3) - product(8, 3)) > 1e-3


def test_rotary_angles_are_exact_at_large_positions_in_bf16() -> None:
    """bf16 cannot tell 256 from 257; the angles must come from fp32."""
    cos, _ = rotary_rotation(torch.tensor([[256, 257]]), 4, 10000.0, torch.bfloat16)
    assert cos[0, 0, :, 0].tolist() == pytest.approx([math.cos(256), math.cos(257)], abs=4e-3)


def test_positions_restart_in_every_document_and_skip_left_padding() -> None:
    """F08: the first token of each document has position 0. H05: so has the first real token after padding."""
    document_BS = torch.tensor([[0, 0, 0, 1, 2, 2], [3, 3, 3, 3, 3, 4]])
    assert positions(2, 6, CPU, document_BS, None, None).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 0]]
    valid_BS = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    assert positions(2, 6, CPU, None, valid_BS, None)[0, 4:].tolist() == [0, 1]
    assert positions(2, 6, CPU, None, valid_BS, None)[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert positions(2, 3, CPU, None, None, None).tolist() == [[0, 1, 2]] * 2


def test_a_document_number_that_returns_is_a_new_document() -> None:
    """Mask and positions agree: the last token of [0, 0, 1, 1, 0] sees neither of the first two."""
    model = make_model(router="token_choice", backend="reference")
    token_BS = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        returning, fresh = (model(token_BS, document_BS=torch.tensor([d])) for d in ([0, 0, 1, 1, 0], [0, 0, 1, 1, 2]))
    assert returning.equal(fresh)


@pytest.mark.parametrize("case", ["multi-head", "grouped", "norm per head", "norm over the width"])
def test_no_token_of_another_document_reaches_a_logit(case: str) -> None:
    """F08: batch 2, every token of document 1 changed: document 2 is bit-equal. Without documents it is not."""
    model = make_model(model=model_config(**ATTENTIONS[case]), router="token_choice", backend="reference")
    token_BS = torch.randint(37, (2, 11))
    document_BS = torch.tensor([[0] * 5 + [1] * 6, [0] * 8 + [1] * 3])
    other_BS = torch.where(document_BS == 0, (token_BS + 1 + torch.arange(11) % 3) % 37, token_BS)
    with torch.no_grad():
        first, second = (model(t, document_BS=document_BS) for t in (token_BS, other_BS))
        assert first[document_BS == 1].equal(second[document_BS == 1])
        assert not first[document_BS == 0].isclose(second[document_BS == 0]).all(-1).any()
        first, second = model(token_BS), model(other_BS)
        assert not first[document_BS == 1].isclose(second[document_BS == 1]).all(-1).any()


@pytest.mark.parametrize("router", ["token_choice", "threshold", "expert_choice"])
def test_a_packed_row_is_its_documents_one_by_one(router: str) -> None:
    """F08: logits of each document, the token-weighted loss and its gradient; documents of length 1 included."""
    model = make_model(router=router, group="flat", group_sequences=2)
    if router != "token_choice":
        calibrate(model)
    lengths = [5, 1, 4, 1]
    token_BS = torch.randint(37, (1, sum(lengths)))
    document_BS = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    label_BS = token_BS.roll(-1, 1).masked_fill(document_BS != document_BS.roll(-1, 1), -100)
    label_BS[:, -1] = -100
    packed = model(token_BS, document_BS=document_BS)
    alone = [model(t) for t in token_BS.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
    packed_loss = token_losses(packed, label_BS).sum() / 7
    alone_loss = sum(token_losses(x, y).sum() for x, y in zip(alone, label_BS.split(lengths, 1), strict=True)) / 7
    assert packed_loss.item() == pytest.approx(alone_loss.item(), rel=1e-5)
    assert token_losses(packed, label_BS)[label_BS == -100].eq(0).all()
    parameters = [p for n, p in model.named_parameters()]
    found, expected = torch.autograd.grad(packed_loss, parameters), torch.autograd.grad(alone_loss, parameters)
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-4


def test_ignored_labels_cost_nothing_and_losses_are_fp32_nats() -> None:
    """H07: sums are over real labels only: uniform logits give ln V each, padding 0."""
    logits_BSV = torch.zeros(2, 3, 10, dtype=torch.bfloat16)
    loss_BS = token_losses(logits_BSV, torch.tensor([[0, -100, 3], [9, 9, -100]]))
    assert loss_BS.dtype == torch.float32
    expected = torch.tensor([[1.0, 0, 1], [1, 1, 0]]) * math.log(10)
    torch.testing.assert_close(loss_BS, expected)
    peaked = torch.zeros(1, 1, 10)
    peaked[0, 0, 4] = 800
    assert token_losses(peaked, torch.tensor([[3]])).item() == 800


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
def test_padding_on_either_side_leaves_the_real_tokens_logits(router: str, side: str) -> None:
    """H01, H05: pads are not attended to, not routed, and do not shift positions; what they hold is irrelevant."""
    model = calibrate(make_model(router=router, group="flat", group_sequences=2))
    lengths, longest = [2, 5, 9], 12
    token_BS, valid_BS = torch.randint(37, (3, longest)), torch.zeros(3, longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        valid_BS[row, longest - length :] = side == "left"
        valid_BS[row, :length] |= side == "right"
    seen = []
    context = RoutingContext(3, longest, valid_BS, observe=lambda _, routing: seen.append(routing))
    with torch.no_grad():
        logits_BSV = model(token_BS, context)
        for row in range(3):
            alone_SV = model(token_BS[row, valid_BS[row]][None])[0]
            torch.testing.assert_close(logits_BSV[row, valid_BS[row]], alone_SV, rtol=1e-4, atol=1e-5)
        other_BS = torch.where(valid_BS, token_BS, torch.randint(37, (3, longest)))
        assert model(other_BS, context)[valid_BS].equal(logits_BSV[valid_BS])
    assert logits_BSV.isfinite().all()
    for routing in seen:
        assert not routing.assigned_TE()[~valid_BS.flatten()].any()


def test_masks_say_exactly_who_sees_whom() -> None:
    """Causal, same document, valid; every row sees at least itself; no mask where plain causality says the same."""
    assert attention_mask(2, 5, CPU, torch.float32) is None
    document_BS = torch.tensor([[0, 0, 1, 1]])
    valid_BS = torch.tensor([[False, True, True, True]])
    mask = attention_mask(1, 4, CPU, torch.float32, document_BS, valid_BS)
    assert mask.shape == (1, 1, 4, 4)
    seen = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[0, 0].eq(0).int().tolist() == seen
    assert mask[mask != 0].eq(-torch.inf).all()
    plain = attention_mask(2, 5, CPU, torch.float32, torch.zeros(2, 5, dtype=torch.int64))
    assert plain[:, 0].eq(0).equal(torch.ones(5, 5).tril().bool().expand(2, -1, -1))
    assert F.softmax(mask, -1).isfinite().all()
