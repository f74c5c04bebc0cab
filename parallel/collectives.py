"""Collectives that gradients pass through, and a few that they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallel.mesh import Group, group_size


class Exchange:
    """An all-to-all of rows, in two halves so that work can be done in between.

    `start` sends; what it returns holds nothing until `finish` has been called on it. Backward does the same the other
    way round: it starts where forward finished and finishes where forward started.

    Args:
        group: processes that exchange.
        send: rows for each of them, in order; None for equal parts.
        receive: rows from each of them; None for equal parts.
    """

    def __init__(self, group: Group, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> None:
        self.group = group
        self.send = None if send is None else list(send)
        self.receive = None if receive is None else list(receive)
        self.pending: dist.Work | None = None
        self.gradient: Tensor | None = None  # of what was sent, under way

    def start(self, rows_AD: Tensor) -> Tensor:
        """(sum of `send`, D) -> (sum of `receive`, D), under way.

        Raises:
            ValueError: before anything is sent, if the rows are not those that `send` speaks of.
        """
        size = group_size(self.group)
        if self.send is None and rows_AD.shape[0] % size:
            raise ValueError(f"{rows_AD.shape[0]} rows cannot go in equal parts to {size} processes")
        if self.send is not None and sum(self.send) != rows_AD.shape[0]:
            raise ValueError(f"splits {self.send} are for {sum(self.send)} rows; {rows_AD.shape[0]} were given")
        for name, splits in (("send", self.send), ("receive", self.receive)):
            if splits is not None and len(splits) != size:
                raise ValueError(f"{len(splits)} splits to {name} were given for {size} processes")
        return _Start.apply(rows_AD, self)

    def finish(self, rows_AD: Tensor) -> Tensor:
        """Wait for what `start` returned."""
        return _Finish.apply(rows_AD, self)

    def launch(self, rows: Tensor, send: list[int] | None, receive: list[int] | None) -> Tensor:
        """Start one all-to-all without gradient."""
        length = rows.shape[0] if receive is None else sum(receive)
        out = rows.new_empty(length, *rows.shape[1:])
        # gloo and NCCL refuse strided tensors, which gradients of sums and transposed inputs are.
        self.pending = dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.group, async_op=True)
        return out

    def wait(self) -> None:
        """Until what was launched last has arrived."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.launch(rows, exchange.send, exchange.receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        exchange.wait()
        assert exchange.gradient is not None
        gradient, exchange.gradient = exchange.gradient, None
        return gradient, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        exchange.gradient = exchange.launch(grads[0], exchange.receive, exchange.send)
        # The gradient that travels has the shape of what was sent; autograd is given one of the shape it expects.
        return grads[0].new_zeros(()).expand_as(grads[0]), None


def exchange_counts(count_NE: Tensor, group: Group) -> tuple[list[list[int]], list[list[int]]]:
    """Tell every process how many rows each of its experts gets from here.

    Args:
        count_NE: int64, row n for process n: how many rows each of its experts gets.
        group: processes N.

    Returns:
        (what was given, what the others send here, likewise), on the host: this waits for the device, once.
    """
    received_NE = torch.empty_like(count_NE)
    dist.all_to_all_single(received_NE, count_NE.contiguous(), group=group)
    sent, received = torch.stack((count_NE, received_NE)).tolist()
    return sent, received


def gather_sequence(x_BSD: Tensor, tensor_mesh: DeviceMesh) -> Tensor:
    """(B, S/tp, D) -> (B, S, D) on all tensor-parallel processes, each of which contributes a part of the gradient."""
    x = DTensor.from_local(x_BSD, tensor_mesh, [Shard(1)], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def scatter_sequence(part_BSD: Tensor, tensor_mesh: DeviceMesh) -> Tensor:
    """(B, S, D) that add up over tensor-parallel processes -> their sum, (B, S/tp, D)."""
    part = DTensor.from_local(part_BSD, tensor_mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[Shard(1)]).to_local()


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sum over processes that each go on with all of it in their own way: backward sums as well."""
    return _SumOver.apply(x, group)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return total(grads[0], ctx.group), None


def add_up(tensors: Sequence[Tensor], group: Group, dtype: torch.dtype | None = None) -> None:
    """Replace tensors by their sums over a group, in one all-reduce.

    Args:
        tensors: of one type where no `dtype` is given; the same shapes on all processes.
        group: whose.
        dtype: to add up in.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).to(dtype or tensor.dtype) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def total(x: Tensor, group: Group | None) -> Tensor:
    """Sum over a group, without gradient, in a new tensor."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
