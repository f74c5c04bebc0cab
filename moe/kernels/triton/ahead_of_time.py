"""Compile the kernels for a GPU that is not there, and read what the machine code needs.

Triton brings the assembler and disassembler along; no driver is asked. This proves code generation: registers, spills,
shared memory, and which units the code uses. It proves neither speed nor the absence of races.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe.kernels.tile import Tile, tiles_for, uses_tma
from moe.kernels.triton import backward, forward, plan

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
# Bytes of shared memory that one block can have, and registers and threads of a multiprocessor (CUDA programming
# guide, compute capabilities; AMD: CDNA 3 instruction set).
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
SHARED_TOTAL = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024}
SHARED_RESERVED = 1024  # bytes that the system takes of each block's
REGISTERS, THREADS, MOST_BLOCKS = 65536, 2048, 32
# The instruction of the tensor cores, where a kernel has a product.
PRODUCT = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
WIDTH, EXPERT_WIDTH = 2048, 768  # Qwen3-30B-A3B


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs.

    Attributes:
        registers: of a thread.
        spill_bytes: of registers that had no room, stored and loaded, and of stack.
        shared_bytes: of shared memory, for one block.
        warps: of a block.
        instructions: how often each occurs in the machine code.
        warnings: of the assembler.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    instructions: dict[str, int]
    warnings: tuple[str, ...] = ()

    def blocks(self, target: str) -> int:
        """Occupancy: blocks that a multiprocessor holds at once."""
        per_warp = -(-self.registers * 32 // 256) * 256  # registers are dealt in units of 256
        by_registers = REGISTERS // (per_warp * self.warps)
        by_shared = SHARED_TOTAL[target] // (self.shared_bytes + SHARED_RESERVED)
        return min(by_registers, by_shared, THREADS // (32 * self.warps), MOST_BLOCKS)


def problems(resources: Resources, target: str, kernel: str) -> list[str]:
    """What is wrong with a kernel's code; empty if nothing."""
    found = []
    if resources.spill_bytes:
        found.append(f"spills {resources.spill_bytes} bytes")
    if resources.shared_bytes > SHARED_LIMIT[target]:
        found.append(f"{resources.shared_bytes} bytes of shared memory, at most {SHARED_LIMIT[target]}")
    needed = [PRODUCT[target]] if kernel in PRODUCTS else []
    needed += ["UTMALDG"] if kernel in WITH_DESCRIPTORS and uses_tma(target) else []
    found += [f"no {name}" for name in needed if not resources.instructions.get(name)]
    return found + list(resources.warnings)


PRODUCTS = ("up_fwd", "down_fwd", "down_dgrad", "up_dgrad", "dw2", "dw13")
WITH_DESCRIPTORS = ("up_fwd", "down_fwd", "down_dgrad", "up_dgrad")
EVERY_KERNEL = (*PRODUCTS, "combine", "plan_tiles")


def compile_kernel(
    kernel: str, target: str, width: int = WIDTH, expert_width: int = EXPERT_WIDTH, rows: int = 4096, **changes: int
) -> Resources:
    """Compile a kernel in bf16 with the tile that the table has for the target.

    Args:
        kernel: one of `EVERY_KERNEL`.
        target: "sm_80", "sm_90", "sm_100" or "gfx942".
        width: D.
        expert_width: F.
        rows: per expert, by which the tile is chosen.
        **changes: fields of the `Tile` to set otherwise.
    """
    tile = replace(tiles_for(target, rows)[kernel], **changes) if kernel in PRODUCTS else Tile(128, 128, 64, 4)
    function, types, constants = _signature(kernel, tile, uses_tma(target), width, expert_width)
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # Pointers come from the allocator: aligned. Numbers are never specialised, see the kernels.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    compiled = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned),
        target=_gpu(target),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    return _of_amd(compiled, tile.warps) if target.startswith("gfx") else _of_nvidia(compiled, target, tile.warps)


def _gpu(target: str) -> GPUTarget:
    return GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)


def _signature(
    kernel: str, tile: Tile, tma: bool, width: int, expert_width: int
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """(function, types of its arguments, its constants) for ragged groups, gathered and weighted."""
    b, i32, i64, f32 = "*bf16", "*i32", "*i64", "*fp32"
    groups = {"offsets_E": i32, "expert_M": i32, "row_M": i32, "capacity": "i32", "tiles": "i32", "token_A": i64}
    sizes = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK}
    flags = {"EQUAL": False, "TMA": tma}

    def blocks(*shape: int) -> str:
        return f"tensordesc<bf16[{','.join(map(str, shape))}]>" if tma else b

    if kernel == "up_fwd":
        types = groups | {"x": b, "w13": blocks(1, tile.BN, tile.BK), "h_AH": b, "a_AF": b}
        return forward.up_fwd, types, {"D": width, "F": expert_width, "GATHER": True, **flags, **sizes}
    if kernel in ("down_fwd", "up_dgrad"):
        down = kernel == "down_fwd"
        block = (tile.BN, tile.BK) if down else (tile.BK, tile.BN)
        x, y = (expert_width, width) if down else (2 * expert_width, width)
        types = groups | {"rows_AX": blocks(tile.BM, tile.BK), "w": blocks(1, *block), "out_AY": b}
        constants = {"X": x, "Y": y, "TRANSPOSED": down, "SUBTILES": tile.subtiles, **flags, **sizes}
        return forward.rows_times, types, constants
    if kernel == "down_dgrad":
        types = groups | {"dout": b, "w2": blocks(1, tile.BK, tile.BN), "h_AH": b, "weight_A": f32}
        types |= {"dh_AH": b, "sa_AF": b, "dweight_AN": f32}
        constants = {"D": width, "F": expert_width, "GATHER": True, "WEIGHTED": True, "SUBTILES": tile.subtiles}
        return backward.down_dgrad, types, constants | flags | sizes
    if kernel in ("dw2", "dw13"):
        left = kernel == "dw2"
        x, y = (width, expert_width) if left else (2 * expert_width, width)
        types = groups | {"left": b, "right": b, "dw_EXY": b, "experts": "i32"}
        return backward.outer, types, {"X": x, "Y": y, "GATHER_LEFT": left, "GATHER_RIGHT": not left, **sizes}
    if kernel == "combine":
        types = {"rows_AD": b, "weight_A": f32, "order_A": i64, "start_T": i64, "out_TD": b}
        types |= {"tokens": "i32", "assignments": "i32"}
        return forward.combine, types, {"D": width, "WEIGHTED": True, "BLOCK": 1024}
    types = {"offsets_E": i32, "expert_M": i32, "row_M": i32, "experts": "i32", "tiles": "i32"}
    return plan.plan_tiles, types, {"BLOCK": 128, "EXPERTS": 256}


def _of_nvidia(compiled: Any, target: str, warps: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        Path(cubin).write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
        code = _tool("nvdisasm", "-c", cubin)
        ptx = os.path.join(folder, "kernel.ptx")
        Path(ptx).write_text(compiled.asm["ptx"])
        assembler = "ptxas-blackwell" if target == "sm_100" else "ptxas"
        suffix = "a" if target != "sm_80" else ""
        # The same level as Triton's own call: another one reports other registers.
        said = _tool(assembler, "-v", "--regAllocOptLevel=2", f"--gpu-name={target}{suffix}", ptx, "-o", os.devnull)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    spilt = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert found and spilt, (usage, said)
    instructions = collections.Counter(re.findall(r"\s/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)", code))
    spills = int(found[2]) + int(found[3]) + sum(map(int, spilt.groups())) + instructions["LDL"] + instructions["STL"]
    warnings = tuple(line.strip() for line in said.splitlines() if "wgmma" in line.lower() or "warning" in line.lower())
    return Resources(int(found[1]), spills, compiled.metadata.shared, warps, dict(instructions), warnings)


def _of_amd(compiled: Any, warps: int) -> Resources:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    spills = number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size")
    instructions = {
        "v_mfma": len(re.findall(r"v_mfma", text)),
        "scratch": len(re.findall(r"scratch_(?:load|store)", text)),
    }
    return Resources(number("vgpr_count"), spills, compiled.metadata.shared, warps, instructions)


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout + done.stderr


def measure(kernel: str, target: str) -> dict[str, int]:
    """Registers, shared memory and occupancy of a kernel, as the table of budgets has them."""
    resources = compile_kernel(kernel, target)
    row = {"registers": resources.registers, "shared_bytes": resources.shared_bytes}
    return row | ({"blocks": resources.blocks(target)} if target in SHARED_TOTAL else {})
