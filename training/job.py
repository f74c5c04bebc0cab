"""The processes of one training job, as torchrun started them; or the one that was started without it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe.config import require
from training.device import choose_device

Result = TypeVar("Result")
# How long a collective may wait for a process that does not come: torchrun ends the job when one dies, so this is for
# those that hang. The main process may be checking a large checkpoint alone.
PATIENCE = timedelta(minutes=30)
# How long a process that failed lets the main one speak first: as a rule both have the same error.
MAIN_FIRST_S = 10.0
CONTINUE = ["--run.resume", "auto", "--run.stop-after", "0"]


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

    def continue_command(self, arguments: list[str]) -> str:
        """What to type to go on with this run, as far as its processes know what was typed.

        Args:
            arguments: the script and its flags.
        """
        # Later flags win, so the command can be repeated as it was with these behind it.
        flags = arguments[: -len(CONTINUE)] if arguments[-len(CONTINUE) :] == CONTINUE else arguments
        script = shlex.join([*flags, *CONTINUE])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        if self.world == 1:
            return f"python {script}"
        if self.world == here:
            return f"torchrun --nproc-per-node {here} {script}"
        return f"the same launcher on each of the {self.world // here} machines: {script}"

    def connect(self, device_name: str) -> torch.device:
        """Choose the device and meet the other processes: tensors on GPUs go over NCCL, all else over gloo."""
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
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        return device

    def leave(self) -> None:
        """Part from the other processes. Nothing may be communicated afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def let_main_speak(self) -> None:
        """Wait on a process that failed, so that an error which all have is printed once.

        The main process prints it and ends, and torchrun then ends those that wait here. It returns where the main
        process does not have the error, which must be printed then.
        """
        if not self.is_main:
            time.sleep(MAIN_FIRST_S)

    def on_main(self, function: Callable[[], Result]) -> Result:
        """What `function` gives on the main process, for all. An error of it is raised on all."""
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
            raise outcome[1]
        result: Result = outcome[0]
        return result

    def require_same(self, facts: dict[str, Any]) -> None:
        """Refuse processes that were started differently: they would train together, and wrongly, without a word.

        Args:
            facts: what must be equal everywhere, by name.

        Raises:
            ConfigError: on all processes; names the first that differs, and in what.
        """
        for rank, theirs in enumerate(everyone := self.gather(facts)):
            differs = [name for name, value in everyone[0].items() if theirs.get(name) != value]
            require(
                not differs,
                f"process {rank} has {', '.join(f'{n} = {theirs.get(n)!r}' for n in differs[:3])} where process 0 has "
                f"{', '.join(repr(everyone[0][n]) for n in differs[:3])}: start all processes alike",
            )

    def any(self, here: bool) -> bool:
        """Whether it is so on some process; all ask together."""
        if self.world == 1:
            return here
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values
