"""How assignments are shared out among tensor-parallel processes, and the order of work in a layer."""

from __future__ import annotations

import pytest
import torch

from moe.config import MoEConfig
from moe.dispatch import LocalDispatcher
from moe.layer import MoELayer
from moe.routing import Routing, RoutingContext
from parallel.expert import share_of


def make_routing(counts: list[int], capacity: int | None = None) -> Routing:
    assignments = sum(counts)
    offsets_E = torch.tensor(counts).cumsum(0).to(torch.int32)
    return Routing(torch.randint(0, 9, (assignments,)), offsets_E, torch.rand(assignments), 9, capacity)


@pytest.mark.parametrize("shares", [2, 3, 4])
@pytest.mark.parametrize("counts", [[5, 0, 1, 7], [0, 0, 0, 2], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_shares_of_ragged_assignments_are_whole_together_and_even_for_every_expert(shares, counts):
    routing = make_routing(counts)
    parts = [share_of(routing, share, shares) for share in range(shares)]
    per_expert = torch.stack([part.offsets_E.diff(prepend=torch.zeros(1, dtype=torch.int32)) for part in parts])
    assert per_expert.sum(0).tolist() == counts
    assert (per_expert.amax(0) - per_expert.amin(0)).max() <= 1
    pairs = [
        (part.expert_A()[place].item(), part.token_A[place].item(), part.weight_A[place].item())
        for part in parts
        for place in range(part.token_A.shape[0])
    ]
    whole = zip(routing.expert_A().tolist(), routing.token_A.tolist(), routing.weight_A.tolist(), strict=True)
    assert sorted(pairs) == sorted(whole)


def test_shares_of_equal_slots_stay_equal_and_those_that_cannot_are_refused():
    part = share_of(make_routing([6, 6, 6], capacity=6), 1, 3)
    assert part.capacity == 2
    assert part.offsets_E.tolist() == [2, 4, 6]
    with pytest.raises(ValueError, match="4 tensor-parallel processes share the 6 slots of an expert"):
        share_of(make_routing([6, 6, 6], capacity=6), 1, 4)


def test_the_shared_expert_is_computed_while_tokens_travel():
    layer = MoELayer(MoEConfig(num_experts=4, expert_width=6, shared_width=5, group_sequences=2), 8, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.router.reset_buffers()
    done = []

    class Watched(LocalDispatcher):
        def send(self, x_TD, routing):
            done.append("send")
            return super().send(x_TD, routing)

        def receive(self, sent):
            done.append("receive")
            return super().receive(sent)

    layer.dispatcher = Watched()
    layer.shared.register_forward_hook(lambda *_: done.append("shared"))
    layer(torch.randn(2, 4, 8), RoutingContext(2, 4, mode="train"))
    assert done == ["send", "shared", "receive"]
