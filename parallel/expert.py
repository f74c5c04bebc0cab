"""Expert parallelism: tokens travel to the processes that own their experts, and their results back.

Who works on what. Tensor-parallel processes hold the same tokens; `shares` of them divide the assignments, so that
each travels once, and the layer's output is a part that adds up over them. The experts are split over `expert`
processes, and each expert's width over `expert_tensor` more. Where those slices lie within one tensor-parallel group,
their outputs are among the parts that add up there. Where they reach over data-parallel processes, a row is sent to
the owner of each slice and the results that come back are added.

Expert choice sends the same number of rows everywhere: the splits are static, no counts are exchanged, and nothing
waits for the device. Token choice tells its counts first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.kernels.permute import Combine, combine_rows, gather_rows, inverse_order, permute_rows
from moe.routing import Routing
from parallel.collectives import Exchange, exchange_counts
from parallel.mesh import Mesh


@dataclass
class Sent:
    """Tokens under way.

    Attributes:
        rows: not to be read before the exchange is finished.
        routing: of this process' part of the assignments.
        combine: their order by token; None where nothing travels.
        exchange: None where nothing travels.
        local: what the experts here are to do with the rows, once they are in order.
        order_A: sorts received rows by expert; None where their shape says it.
    """

    rows: Tensor
    routing: Routing
    local: Routing
    combine: Combine | None = None
    exchange: Exchange | None = None
    order_A: Tensor | None = None


class ExpertDispatcher:
    """Implements `moe.dispatch.Dispatcher` over a mesh.

    Args:
        mesh: of the job.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.owners, self.slices = mesh.layout.expert, mesh.slice_copies

    def send(self, x_TD: Tensor, routing: Routing) -> Sent:
        """See `Dispatcher.send`."""
        mine = share_of(routing, self.mesh.share, self.mesh.shares)
        group = self.mesh.dispatch_group
        if group is None:
            return Sent(x_TD, mine, mine)
        token_A = mine.token_A
        assert token_A is not None
        combine = Combine.by_token(token_A, mine.num_tokens)
        rows_AD = gather_rows(x_TD, token_A, combine)
        local_experts = mine.num_experts // self.owners
        if mine.capacity is not None:
            rows_AD = self._to_each_slice(rows_AD, None)
            exchange, order_A = Exchange(group), None
            per_expert = mine.capacity * self.owners * self.slices
            offsets_E = torch.arange(1, local_experts + 1, dtype=torch.int32, device=x_TD.device) * per_expert
            local = Routing(None, offsets_E, None, per_expert * local_experts, capacity=per_expert)
        else:
            edges_E = mine.offsets_E.long()
            count_E = edges_E.diff(prepend=edges_E.new_zeros(1))
            count_NE = count_E.view(self.owners, local_experts).repeat_interleave(self.slices, 0)
            sent, received = exchange_counts(count_NE, group)
            rows_AD = self._to_each_slice(rows_AD, [sum(row) for row in sent[:: self.slices]])
            exchange = Exchange(group, [sum(row) for row in sent], [sum(row) for row in received])
            received_NE = torch.tensor(received, device=x_TD.device)
            order_A = _by_expert(received_NE, sum(map(sum, received)))
            offsets_E = received_NE.sum(0).cumsum(0).to(torch.int32)
            local = Routing(None, offsets_E, None, order_A.shape[0])
        return Sent(exchange.start(rows_AD), mine, local, combine, exchange, order_A)

    def receive(self, sent: Sent) -> tuple[Tensor, Routing]:
        """See `Dispatcher.receive`."""
        if sent.exchange is None:
            return sent.rows, sent.local
        rows_AD = sent.exchange.finish(sent.rows)
        if sent.order_A is not None:
            return permute_rows(rows_AD, sent.order_A), sent.local
        # From each process, each expert's rows: the experts come first from here on.
        return self._swap(rows_AD, self.owners * self.slices, sent.local.num_experts), sent.local

    def combine(self, rows: Tensor, sent: Sent) -> Tensor:
        """See `Dispatcher.combine`."""
        if sent.exchange is None:
            return rows
        routing, exchange = sent.routing, sent.exchange
        if sent.order_A is not None:
            rows = permute_rows(rows, inverse_order(sent.order_A))
        else:
            rows = self._swap(rows, sent.local.num_experts, self.owners * self.slices)
        back = Exchange(exchange.group, exchange.receive, exchange.send)
        rows_AD = self._over_slices(back.finish(back.start(rows)), exchange.send)
        assert routing.token_A is not None and routing.weight_A is not None and sent.combine is not None
        return combine_rows(rows_AD, routing.weight_A, routing.token_A, sent.combine)

    def _to_each_slice(self, rows_AD: Tensor, lengths: list[int] | None) -> Tensor:
        """Repeat each owner's rows for every slice of its experts; without lengths, owners get equally many."""
        if self.slices == 1:
            return rows_AD
        parts = rows_AD.chunk(self.owners) if lengths is None else rows_AD.split(lengths)
        return torch.cat([part for part in parts for _ in range(self.slices)])

    def _over_slices(self, rows_AD: Tensor, lengths: list[int] | None) -> Tensor:
        """The reverse: add up what the slices of each owner's experts returned."""
        if self.slices == 1:
            return rows_AD
        if lengths is None:
            return rows_AD.view(self.owners, self.slices, -1, rows_AD.shape[1]).sum(1).flatten(0, 1)
        parts = rows_AD.split(lengths)
        return torch.cat([torch.stack(parts[n : n + self.slices]).sum(0) for n in range(0, len(parts), self.slices)])

    @staticmethod
    def _swap(rows_AD: Tensor, outer: int, inner: int) -> Tensor:
        """(outer, inner, n, D) -> (inner, outer, n, D), rows flat."""
        return rows_AD.view(outer, inner, -1, rows_AD.shape[1]).transpose(0, 1).reshape(rows_AD.shape)


def share_of(routing: Routing, share: int, shares: int) -> Routing:
    """Every `shares`-th assignment of a routing, from `share` on: even shares of every expert's, and static shapes."""
    if shares == 1:
        return routing
    assert routing.token_A is not None and routing.weight_A is not None
    if routing.capacity is not None and routing.capacity % shares:
        raise ValueError(
            f"{shares} tensor-parallel processes share the {routing.capacity} slots of an expert, and do not divide "
            "them: change the micro-batch"
        )
    return Routing(
        routing.token_A[share::shares],
        (routing.offsets_E + (shares - 1 - share)) // shares,
        routing.weight_A[share::shares],
        routing.num_tokens,
        None if routing.capacity is None else routing.capacity // shares,
    )


def _by_expert(received_NE: Tensor, rows: int) -> Tensor:
    """int64 order that sorts rows, which come process by process and within that by expert, by expert."""
    processes, experts = received_NE.shape
    expert_N = torch.arange(experts, device=received_NE.device).repeat(processes)
    return expert_N.repeat_interleave(received_NE.flatten(), output_size=rows).argsort(stable=True)
