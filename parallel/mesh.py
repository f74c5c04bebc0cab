"""The processes seen twice: as the dense layers divide them, and as the experts do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import Layout

Group = dist.ProcessGroup


class Mesh:
    """Places of this process in a layout, and the groups it communicates in.

    Every process of the job makes its mesh at the same time: groups are made together. A group is None where this
    process would be alone in it, and then nothing is communicated.

    Attributes:
        layout: degrees.
        dense: (pp, dp_replicate, dp_shard, tp); None in a job of one process.
        sparse: (pp, edp_replicate, edp_shard, ep, etp); likewise.
        stage, data, tensor: this process among pipeline ranks, data-parallel parts and tensor-parallel processes.
        expert_data, expert, expert_tensor: and among copies, owners and slices of experts.
        replica, expert_replica: the HSDP group it is in, for the dense layers and for the experts.
        world_group, pipeline_group, data_group, tensor_group: all processes; those that differ in one place only.
        stage_group: all processes of this pipeline rank.
        expert_data_group: those that hold the same part of the same experts.
        dispatch_group: those that exchange tokens: see `parallel/expert.py`.
        ends_group: the holders of the first and the last stage; None where this process holds neither or both.
    """

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        self.layout = layout
        self.dense: DeviceMesh | None = None
        self.sparse: DeviceMesh | None = None
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.rank = rank
        self.stage, in_stage = divmod(rank, layout.per_stage)
        self.data, self.tensor = divmod(in_stage, layout.tensor)
        self.expert_data, in_copy = divmod(in_stage, layout.expert * layout.expert_tensor)
        self.expert, self.expert_tensor = divmod(in_copy, layout.expert_tensor)
        self.replica, self.expert_replica = (
            self.data * layout.replicate // layout.data,
            self.expert_data * layout.expert_replicate // layout.expert_data,
        )
        names = ("world", "pipeline", "data", "tensor", "stage", "expert_data", "dispatch", "ends")
        groups: dict[str, Group | None] = dict.fromkeys(names)
        if dist.is_initialized() and layout.world > 1:
            groups |= self._make_groups(device)
        self.world_group, self.pipeline_group = groups["world"], groups["pipeline"]
        self.data_group, self.tensor_group, self.stage_group = groups["data"], groups["tensor"], groups["stage"]
        self.expert_data_group, self.dispatch_group = groups["expert_data"], groups["dispatch"]
        self.ends_group = groups["ends"]

    def _make_groups(self, device: str) -> dict[str, Group | None]:
        layout = self.layout
        shards = layout.data // layout.replicate
        self.dense = init_device_mesh(
            device,
            (layout.pipeline, layout.replicate, shards, layout.tensor),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
        )
        copies = (layout.expert_replicate, layout.expert_data // layout.expert_replicate)
        self.sparse = init_device_mesh(
            device,
            (layout.pipeline, *copies, layout.expert, layout.expert_tensor),
            mesh_dim_names=("pp", "edp_replicate", "edp_shard", "ep", "etp"),
        )
        data = self.dense["dp_replicate", "dp_shard"]._flatten("dp")
        stage = self.dense["dp_replicate", "dp_shard", "tp"]._flatten("stage")
        expert_data = self.sparse["edp_replicate", "edp_shard"]._flatten("edp")
        made: dict[str, Group | None] = {
            "world": dist.group.WORLD,
            "pipeline": self.dense.get_group("pp"),
            "data": data.get_group(),
            "tensor": self.dense.get_group("tp"),
            "stage": stage.get_group(),
            "expert_data": expert_data.get_group(),
            "dispatch": self._dispatch_group(),
            "ends": self._ends_group(),
        }
        return {name: group for name, group in made.items() if group is not None and dist.get_world_size(group) > 1}

    @property
    def slice_copies(self) -> int:
        """Processes, one in each of so many data-parallel parts, that compute slices of the same experts' width."""
        return max(1, self.layout.expert_tensor // self.layout.tensor)

    @property
    def shares(self) -> int:
        """Tensor-parallel processes that hold the same tokens and divide their assignments among them."""
        return max(1, self.layout.tensor // self.layout.expert_tensor)

    @property
    def share(self) -> int:
        """Which of those this one is."""
        return self.tensor // self.layout.expert_tensor if self.shares > 1 else 0

    def own_rows(self, rows: int) -> slice:
        """Which of a global batch's rows this process reads."""
        own = rows // self.layout.data
        return slice(self.data * own, (self.data + 1) * own)

    def _dispatch_group(self) -> Group | None:
        """Owners of all experts, and of all slices that tensor parallelism does not already bring together."""
        assert self.sparse is not None
        if self.slice_copies == 1:
            return self.sparse.get_group("ep")
        layout = self.layout
        blocks = torch.arange(layout.world).view(-1, layout.expert * self.slice_copies, layout.tensor)
        members = blocks.transpose(1, 2).reshape(-1, layout.expert * self.slice_copies).tolist()
        group, _ = dist.new_subgroups_by_enumeration(members)
        return group

    def _ends_group(self) -> Group | None:
        layout = self.layout
        if layout.pipeline == 1:
            return None
        last = (layout.pipeline - 1) * layout.per_stage
        group, _ = dist.new_subgroups_by_enumeration([[n, last + n] for n in range(layout.per_stage)])
        return group


def group_size(group: Group | None) -> int:
    """Processes in a group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)
