"""What a process sends: every collective of a part of a program, with its bytes. For tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# What the operators of torch are called here, and which argument is sent. The `c10d` ones come from the functions of
# torch.distributed, and so from FSDP2 and pipelining; the functional ones from DTensor.
C10D = {
    "_allgather_base_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "barrier": ("barrier", 0),
    "broadcast_": ("broadcast", 0),
    "gather_": ("gather", 1),
    "recv_": ("recv", 0),
    "reduce_": ("reduce", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
}
FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "shard_dim_alltoall": "all_to_all",
}
# Methods of ProcessGroup that breadcrumbs are left for, under the names of all supported versions of torch.
METHODS = [
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
]
NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
# Operators of those namespaces that send nothing.
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}


@dataclasses.dataclass(frozen=True)
class Record:
    """One call of a collective, or of a send or a receive.

    Attributes:
        kind: "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "recv"; also "barrier",
            "gather", "scatter" and "reduce".
        ranks: of the group, in its order, as numbered in the whole job; for "send" and "recv", (from, to).
        group_size: processes in the group.
        dtype: of what is sent.
        elements: of this process' part, as the call was given it.
        bytes: that this process sends to others, by the convention of `bytes_sent`.
    """

    kind: str
    ranks: tuple[int, ...]
    group_size: int
    dtype: torch.dtype
    elements: int
    bytes: float

    def __str__(self) -> str:
        name = "point to point" if self.kind in ("send", "recv") else self.kind
        # Rows of an all-to-all may differ between processes that agree about it.
        amount = "" if self.kind in ("all_to_all", "gather", "scatter", "barrier") else f" of {self.elements}"
        return f"{name}{amount} {str(self.dtype).removeprefix('torch.')}"


class Ledger(TorchDispatchMode):
    """Records every collective that this process enters while the mode is on, whoever asks for it.

    That is our own calls of torch.distributed, DTensor's, FSDP2's and the pipeline's, in forward and in backward,
    waited for or not. A record is made before the call, so the last one is where a process that hangs is. Whatever
    a `torch.compile`d region sends is not seen. Every operator passes through Python, so nothing else is to be timed.

    Attributes:
        records: in order.

    Raises:
        NotImplementedError: by any operation that may send something and is not known here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.supports_higher_order_operators = True
        self.records: list[Record] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that DTensor goes first, and what it calls comes back here
        if isinstance(func, torch._ops.OpOverload) and func.namespace in NAMESPACES:
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes sent by this process."""
        total: dict[str, float] = {}
        for record in self.records:
            total[record.kind] = total.get(record.kind, 0) + record.bytes
        return total

    def count_by_kind(self) -> dict[str, int]:
        """Number of calls."""
        return dict(Counter(record.kind for record in self.records))

    def sequence(self) -> dict[str, list[str]]:
        """Calls in order, for each group ("0, 1, 2, 3") and each direction between two processes ("0 to 1").

        Processes fit together when those that share a key have the same list.
        """
        calls: dict[str, list[str]] = {}
        for record in self.records:
            joint = " to " if record.kind in ("send", "recv") else ", "
            calls.setdefault(joint.join(map(str, record.ranks)), []).append(str(record))
        return calls

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.split("::")[1]
        native = func.namespace == "c10d"
        if name in SILENT:
            return
        if name not in (C10D if native else FUNCTIONAL):
            raise NotImplementedError(f"the ledger does not know what {func} sends: add it to parallel/ledger.py")
        kind, position = C10D[name] if native else (FUNCTIONAL[name], 0)
        # Arguments by name where the schema has them in other places.
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = _group(given["process_group"] if native else given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        rank = dist.get_rank(group)
        sent = _flatten(args[position])
        root = given.get("root_rank", given.get("src", given.get("dst", 0)))
        amount = bytes_sent(kind, _size(sent), len(ranks), rank, root)
        if splits := given.get("input_split_sizes"):
            amount = sent[0][:1].numel() * sent[0].element_size() * (sum(splits) - splits[rank])
        elif name == "alltoall_":
            amount = _size(sent) - _size(sent[rank : rank + 1])
        ends = {"send": (ranks[rank], ranks[root]), "recv": (ranks[root], ranks[rank])}
        dtype = _flatten(list(args[:2]) if native else args[0])[0].dtype  # only a root is given what it scatters
        elements = sum(tensor.numel() for tensor in sent)
        self.records.append(Record(kind, ends.get(kind, ranks), len(ranks), dtype, elements, amount))


def bytes_sent(kind: str, size: int, group: int, rank: int = 0, root: int = 0) -> float:
    """Bytes that one process of a group of n sends to others in a collective.

    all_to_all, reduce_scatter: (n-1)/n of what it is given. all_gather: n-1 times that, as in a ring. all_reduce:
    2(n-1)/n times that, as in a ring of a reduce_scatter and an all_gather; not a whole number if n does not divide
    it. broadcast: all of it, as in a ring that begins at the root, in which the process before the root is last and
    sends nothing. reduce: likewise the other way round, so that the root sends nothing. send, and gather except by
    the root: all of it. scatter: (n-1)/n of it by the root. recv, barrier: nothing.

    Args:
        kind: see `Record`.
        size: bytes that the process gives to it.
        group: n.
        rank: of this process within the group.
        root: of a broadcast, reduce, gather or scatter, likewise.
    """
    others = group - 1
    match kind:
        case "all_to_all" | "reduce_scatter":
            return size * others / group
        case "all_gather":
            return size * others
        case "all_reduce":
            return 2 * size * others / group
        case "broadcast":
            return 0 if (rank + 1) % group == root else size
        case "gather" | "reduce":
            return 0 if rank == root else size
        case "scatter":
            return size * others / group if rank == root else 0
        case "send":
            return size
        case "recv" | "barrier":
            return 0
    raise ValueError(f"no convention for the bytes of {kind!r}")


def leave_breadcrumbs(note: Callable[[str], None]) -> None:
    """From now on, call `note` with a line about every collective that this process enters, before it is entered.

    For finding out where a process hangs: a `Ledger` would make all else slow. Wraps the methods of `ProcessGroup`,
    where all functions of torch.distributed end, and the functions that DTensor calls, which end elsewhere.

    Args:
        note: must be quick.
    """
    for name in METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _noting(getattr(dist.ProcessGroup, name), name, 0, note))
    for name, call in inspect.getmembers(functional, inspect.isfunction):
        taken = list(inspect.signature(call).parameters)
        if name.startswith(("all_", "reduce_scatter", "broadcast")) and {"group", "tag"} <= set(taken):
            setattr(functional, name, _noting(call, name, taken.index("group"), note))


def _noting(call: Callable[..., Any], name: str, place: int, note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        ranks = _ranks(kwargs["group"] if "group" in kwargs else args[place])
        tensors = _flatten(args)
        what = f" of {str(tensors[0].dtype).removeprefix('torch.')} {tuple(tensors[0].shape)}" if tensors else ""
        peer = f", {'to' if name == 'send' else 'from'} {ranks[args[2]]}" if name in ("send", "recv") else ""
        note(f"{name}{what} among ranks {', '.join(map(str, ranks))}{peer}")
        return call(*args, **kwargs)

    return noted


def _ranks(group: Any) -> list[int]:
    """Of a group as functional collectives take it: also a mesh of one axis, or a mesh and an axis."""
    if isinstance(group, tuple):
        group = group[0].get_group(group[1])
    elif isinstance(group, DeviceMesh):
        group = group.get_group()
    return dist.get_process_group_ranks(_group(group))


def _group(given: Any) -> dist.ProcessGroup:
    """The group that an operator was given: a name, the group, or the group in a box."""
    if isinstance(given, str):
        return _resolve_process_group(GroupName(given))
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def _flatten(things: Any) -> list[Tensor]:
    """The tensors of nested lists, in order."""
    if isinstance(things, Tensor):
        return [things]
    return [tensor for part in things for tensor in _flatten(part)] if isinstance(things, list | tuple) else []


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
