"""The processes of one training job, as torchrun started them; or the one that was started without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe.config import ConfigError, require
from training.device import choose_device

Result = TypeVar("Result")
# How long a collective may wait for a process that does not come: torchrun ends the job when one dies, so this is for
# those that hang.
PATIENCE = timedelta(minutes=10)


class Job:
    """This process among those of its job.

    Attributes:
        rank, world: its number, and how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @property
    def launcher(self) -> str:
        """What was typed in front of the script, as far as its processes know."""
        if self.world == 1:
            return "python"
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        machines = f"--nnodes {self.world // here} " if self.world > here else ""
        return f"torchrun {machines}--nproc-per-node {here}"

    def connect(self, device_name: str) -> torch.device:
        """Choose the device and meet the other processes; on GPUs over NCCL, else over gloo."""
        device = choose_device(device_name)
        if device.type == "cuda":
            local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            require(
                local < there,
                f"process {local} of this machine has no GPU of its own, there are {there}: start --nproc-per-node "
                f'{there}, or set training.device = "cpu"',
            )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        if self.world > 1:
            require(dist.is_available(), "this build of torch has no torch.distributed: start one process")
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        return device

    def leave(self) -> None:
        """Part from the other processes, after all have come this far."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def on_main(self, function: Callable[[], Result]) -> Result:
        """What `function` gives on the main process, for all. An error of it is raised on all, see `is_shared`."""
        if self.world == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            outcome[1].shared = True
            raise outcome[1]
        result: Result = outcome[0]
        return result

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether it is so on some process; all ask together."""
        if self.world == 1:
            return here
        flag = torch.tensor(int(here), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def is_shared(error: BaseException) -> bool:
    """Whether all processes have this error, so that one says it."""
    return isinstance(error, ConfigError) or getattr(error, "shared", False)
