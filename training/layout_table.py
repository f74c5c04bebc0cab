"""What each process of a job holds, as a table."""

from __future__ import annotations

from rich.table import Table

from parallel.engine import Engine
from parallel.shards import local_part
from training.job import Job

MOST_ROWS = 16


def layout_table(engine: Engine, job: Job) -> Table:
    """One row a process, up to `MOST_ROWS`; all processes call this together."""
    mesh, moe = engine.mesh, engine.moe_config
    layout = mesh.layout
    layers = [int(name) for model in engine.models for name in model.blocks]
    experts = moe.num_experts // layout.expert if moe.is_moe else 0
    held = sum(local_part(h.parameter).numel() for h in engine.held)
    row = (
        str(job.rank),
        _runs(layers),
        f"{mesh.data + 1} of {layout.data}",
        f"{mesh.tensor + 1} of {layout.tensor}",
        _runs(list(range(mesh.expert * experts, (mesh.expert + 1) * experts))),
        f"{mesh.expert_tensor + 1} of {layout.expert_tensor}",
        f"{held / 1e6:.2f}M",
    )
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("process", "layers", "data", "tensor", "experts", "expert slice", "parameters"):
        table.add_column(name)
    rows = job.gather(row)
    for entry in rows[:MOST_ROWS]:
        table.add_row(*entry)
    if len(rows) > MOST_ROWS:
        table.add_row(f"... {len(rows) - MOST_ROWS} more")
    return table


def _runs(numbers: list[int]) -> str:
    """0, 1, 2, 6, 7 as "0-2, 6-7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "-"
