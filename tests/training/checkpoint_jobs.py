"""One process of the jobs that `test_checkpoint.py` starts: `python -m tests.training.checkpoint_jobs RANK FOLDER`.

Four processes save and load, then the first two of them load in a job of their own, then the first one alone. What
each case came to is left in FOLDER/results_RANK.json: "ok", or the traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import training.checkpoint as checkpoints
from training.checkpoint import CheckpointError, load_model, load_optimizer, newest_checkpoint, save_checkpoint

# Odd and unequal; over 4 processes, "fsdp" leaves the last one empty-handed.
SHAPES = {"plain": (3, 2), "scalar": (), "fsdp": (5, 3), "tensor": (7, 4), "strided": (8, 3), "experts": (4, 2, 6, 5)}


class Holder(nn.Module):
    """One parameter, in a module because FSDP2 shards modules."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Model(nn.Module):
    """A parameter of every layout, and buffers of every type."""

    def __init__(self, seed: int, without: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            if name != without:
                self.add_module(name, Holder(torch.randn(shape, generator=generator)))
        self.register_buffer("updates", torch.tensor(2**53 + 1 + seed))  # no float holds it
        self.register_buffer("used", torch.arange(5) % 2 == seed % 2)
        self.register_buffer("l1_weight", torch.rand((), generator=generator))


def split(model: Model, name: str, mesh, placements) -> None:
    holder = getattr(model, name)
    holder.weight = nn.Parameter(distribute_tensor(holder.weight.detach(), mesh, placements))


def over_four(seed: int) -> Model:
    model = Model(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    fully_shard(model.fsdp, mesh=init_device_mesh("cpu", (4,)))
    split(model, "tensor", mesh["tp"], [Shard(1)])
    split(model, "strided", mesh["tp"], [Shard(0)])
    for name in ("tensor", "strided"):
        fully_shard(getattr(model, name), mesh=mesh["dp"])
    split(model, "experts", experts, [Shard(0), Shard(2)])
    return model


def over_two(seed: int) -> Model:
    model = Model(seed)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.tensor, mesh=mesh)
    split(model, "plain", mesh, [Shard(0)])
    split(model, "fsdp", mesh, [Shard(1)])
    split(model, "strided", mesh, [Replicate()])
    split(model, "experts", mesh, [Shard(3)])
    return model


def adamw(model: nn.Module, steps: int = 0) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters], lr=0.1, fused=True)
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    return optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything a checkpoint holds, put together without one."""
    names = {p: name for name, p in model.named_parameters()}
    tensors = dict(model.state_dict())
    tensors |= {f"{names[p]}/{key}": value for p, entries in optimizer.state.items() for key, value in entries.items()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def the_model_is_saved(folder: Path) -> None:
    model = over_four(seed=1)
    optimizer = adamw(model, steps=2)
    assert save_checkpoint(folder / "four", 2, [model], optimizer, {"tokens": 7}) == folder / "four" / "step_2"
    expected = whole(model, optimizer)
    if dist.get_rank() == 0:
        save_file(expected, folder / "expected.safetensors")
    dist.barrier()


def loaded_into(folder: Path, model: nn.Module) -> None:
    optimizer = adamw(model)
    checkpoint = newest_checkpoint(folder / "four")
    assert checkpoint is not None and checkpoint.state == {"tokens": 7}
    load_model(checkpoint, [model])
    load_optimizer(checkpoint, [model], optimizer)
    assert_same(whole(model, optimizer), load_file(folder / "expected.safetensors"))


def it_is_loaded_under_the_same_layout(folder: Path) -> None:
    loaded_into(folder, over_four(seed=2))


def a_step_after_loading_is_the_step_of_the_saved_one(folder: Path) -> None:
    model, other = over_four(seed=1), over_four(seed=2)
    optimizer, other_optimizer = adamw(model, steps=2), adamw(other)
    checkpoint = newest_checkpoint(folder / "four")
    load_model(checkpoint, [other])
    load_optimizer(checkpoint, [other], other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    other_optimizer.step()
    assert_same(whole(other, other_optimizer), whole(model, optimizer))


def first_and_last(seed: int) -> tuple[nn.ModuleDict, nn.ModuleDict]:
    """The ends of a pipeline, with a tied embedding."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(3, 5, generator=generator) for _ in range(3)]
    stages = ({"embedding": 0, "block_0": 1}, {"block_1": 2, "embedding": 0})
    first, last = (nn.ModuleDict({n: Holder(weights[i].clone()) for n, i in stage.items()}) for stage in stages)
    return first, last


def one_step(stage: nn.Module) -> torch.optim.AdamW:
    optimizer = adamw(stage)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def stages_on_different_processes_are_saved(folder: Path) -> None:
    stage = first_and_last(seed=3)[dist.get_rank() // 2]
    optimizer = one_step(stage)
    save_checkpoint(folder / "pipeline", 1, [stage], optimizer, {})
    other = first_and_last(seed=4)[dist.get_rank() // 2]
    checkpoint, other_optimizer = newest_checkpoint(folder / "pipeline"), adamw(other)
    load_model(checkpoint, [other])
    load_optimizer(checkpoint, [other], other_optimizer)
    assert_same(whole(other, other_optimizer), whole(stage, optimizer))


def refused(function: Callable[[], object], *words: str) -> None:
    """On all processes, in the same words."""
    message = None
    try:
        function()
    except CheckpointError as error:
        message, shared = str(error), error.shared
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert message is not None, "no error here"
    assert shared and messages == [message] * len(messages), messages
    for word in words:
        assert word in message, message


def a_key_that_one_process_misses_is_an_error_on_all(folder: Path) -> None:
    model = over_four(seed=2)
    if dist.get_rank() == 3:
        model.register_buffer("extra", torch.zeros(2))
    before = whole(model, adamw(model))
    refused(lambda: load_model(newest_checkpoint(folder / "four"), [model]), "four/step_2/model", "missing extra")
    assert_same(whole(model, adamw(model)), before)


def a_key_that_nobody_wants_and_another_shape_are_errors_on_all(folder: Path) -> None:
    model = Model(seed=2, without="fsdp")
    if dist.get_rank() == 1:
        model.scalar.weight = nn.Parameter(torch.zeros(1))
    checkpoint = newest_checkpoint(folder / "four")
    shape = "scalar.weight has shape (), the model wants (1,)"
    refused(lambda: load_model(checkpoint, [model]), "unexpected fsdp.weight", shape)
    optimizer = adamw(model)
    refused(
        lambda: load_optimizer(checkpoint, [model], optimizer), "unexpected fsdp.weight/exp_avg", "step_2/optimizer"
    )


def a_full_disk_of_one_process_is_an_error_on_all_and_leaves_nothing(folder: Path) -> None:
    model = over_four(seed=2)

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    written, fingerprint = HuggingFaceStorageWriter.write_data, checkpoints._fingerprint
    for owner, name in ((HuggingFaceStorageWriter, "write_data"), (checkpoints, "_fingerprint")):
        if dist.get_rank() == 2:
            setattr(owner, name, disk_full)
        refused(
            lambda: save_checkpoint(folder / "four", 3, [model], adamw(model, steps=1), {}),
            "process 2: OSError: [Errno 28] No space left",
        )
        HuggingFaceStorageWriter.write_data, checkpoints._fingerprint = written, fingerprint
        dist.barrier()
        assert [path.name for path in (folder / "four").iterdir()] == ["step_2"]


def a_folder_that_cannot_be_made_is_an_error_on_all(folder: Path) -> None:
    (folder / "file").touch()
    model = over_four(seed=2)
    refused(lambda: save_checkpoint(folder / "file", 3, [model], adamw(model, steps=1), {}), "NotADirectoryError")


def it_is_loaded_by_two_processes_with_other_placements(folder: Path) -> None:
    loaded_into(folder, over_two(seed=2))


def it_is_loaded_by_one_process_without_a_group(folder: Path) -> None:
    assert not dist.is_initialized()
    loaded_into(folder, Model(seed=2))


CASES: dict[int, list[Callable[[Path], None]]] = {
    4: [
        the_model_is_saved,
        it_is_loaded_under_the_same_layout,
        a_step_after_loading_is_the_step_of_the_saved_one,
        stages_on_different_processes_are_saved,
        a_key_that_one_process_misses_is_an_error_on_all,
        a_key_that_nobody_wants_and_another_shape_are_errors_on_all,
        a_full_disk_of_one_process_is_an_error_on_all_and_leaves_nothing,
        a_folder_that_cannot_be_made_is_an_error_on_all,
    ],
    2: [it_is_loaded_by_two_processes_with_other_placements],
    1: [it_is_loaded_by_one_process_without_a_group],
}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, str] = {}
    for world, cases in CASES.items():
        if rank >= world:
            break
        if world > 1:
            store = f"file://{folder}/store_{world}"
            dist.init_process_group("gloo", store, timedelta(seconds=20), world, rank)
        for case in cases:
            try:
                case(folder)
                results[case.__name__] = "ok"
            except BaseException:
                results[case.__name__] = traceback.format_exc()
        if world > 1:
            dist.destroy_process_group()
    (folder / f"results_{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
