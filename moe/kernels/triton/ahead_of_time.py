"""What a GPU would run, read without one: every kernel of a training step compiled, and its machine code measured.

    python -m moe.kernels.triton.ahead_of_time            # print the table of all targets
    python -m moe.kernels.triton.ahead_of_time --write    # and keep it as what the tests hold kernels to

The launches are those of the backend itself, noted down while it works on tensors without data, so that what is checked
is what runs. Registers and instructions come from Triton's own `cuobjdump` and `nvdisasm`, spills and warnings from its
`ptxas`, run once more on the same PTX. None of this shows speed, or races.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.triton.backend import grouped_mlp_on
from moe.kernels.triton.launch import TARGETS, Launch, interpreted, only_noted
from moe.kernels.triton.tiles import Tiles, find_tiles
from moe.routing import Routing

GOLDEN = Path(__file__).with_name("golden.json")
GPU_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that one block may have (CUDA C++ Programming Guide, compute capabilities; CDNA 3 ISA: 64 KiB of LDS).
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
REGISTERS = 65_536  # 32-bit ones of a multiprocessor
THREADS = {"sm_80": 2048, "sm_90": 2048, "sm_100": 2048}

# The shape that the table is about: Qwen3-30B-A3B (D 2048, F 768, E 128, K 8), 32,768 tokens.
D, F, E, T, K = 2048, 768, 128, 32_768, 8
LOADS: dict[str, dict[str, Any]] = {
    "token choice": {"uniform": False},
    "expert choice": {"uniform": True},
    "few tokens": {"uniform": False, "tokens": 1024},
}
COMPARED = ("registers", "shared", "blocks")

# Instructions that must be there: the target's matrix product, and asynchronous copies.
PRODUCTS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
_INSTRUCTION = re.compile(r"\s/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: of each thread (vector registers on AMD).
        shared: bytes of a block's shared memory.
        spilled: bytes written to and read from local memory in place of registers, and other local memory.
        blocks: how many fit on one multiprocessor by registers, shared memory and threads; 0: it does not launch.
        instructions: of interest, by name.
        warnings: the assembler's.
    """

    registers: int
    shared: int
    spilled: int
    blocks: int
    instructions: dict[str, int]
    warnings: tuple[str, ...]


def launches(
    target: str,
    tiles: Tiles | None = None,
    width: int = D,
    hidden: int = F,
    uniform: bool = False,
    tokens: int = T,
    experts: int = E,
    per_token: int = K,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Launch]:
    """The kernel calls of one layer, forward and backward, by name; of `combine`, the weighted one.

    Args:
        target: of `TARGETS`.
        tiles: other than the table's.
        width: D.
        hidden: F.
        uniform: expert choice, not token choice.
        tokens: T.
        experts: E.
        per_token: K.
        dtype: of the operands.
    """
    rows = tokens * per_token
    if tiles is None:
        tiles = find_tiles(TARGETS[target], dtype, width, hidden, rows / experts)

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta", requires_grad=of.is_floating_point)

    inputs = (
        empty(tokens, width),
        empty(experts, 2, hidden, width),
        empty(experts, width, hidden),
        empty(rows, of=torch.float32),
    )
    token_A, offsets_E = empty(rows, of=torch.int64), empty(experts, of=torch.int32)
    routing = Routing(token_A, offsets_E, inputs[3], tokens, rows // experts if uniform else None)
    with only_noted() as noted:
        out_TD = grouped_mlp_on(*inputs[:3], routing, tiles, TARGETS[target])
        torch.autograd.grad(out_TD, inputs, torch.empty_like(out_TD))
    found: dict[str, Launch] = {}
    for each in noted:
        found.setdefault(each.name, each)
    return found


def compiled(launch: Launch, target: str) -> CompiledKernel:
    """Compile one launch; Triton keeps the result in its cache."""
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: Triton compiles nothing. Unset it before Python starts")
    constants: dict[str, Any] = {}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        # As in a launch: ones and missing tensors are constants, and the compiler is told of multiples of 16; not of
        # counts, so that a new one compiles nothing.
        number = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (number and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            attributes[(place,)] = []
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{_short(value.base.dtype)}{list(value.block_shape)}>"
        else:
            signature[parameter.name] = f"*{_short(value.dtype)}" if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or number:
                start = value.data_ptr() if isinstance(value, Tensor) else value
                attributes[(place,)] = [["tt.divisibility", 16]] if start % 16 == 0 else []
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPU_TARGETS[target], options=options)


def measure(launch: Launch, target: str) -> Resources:
    """Compile one launch and read its machine code."""
    kernel = compiled(launch, target)
    return _of_amd(kernel) if target.startswith("gfx") else _of_nvidia(kernel, target, launch.warps)


def measure_at(target: str, load: str, name: str) -> Resources:
    """`measure` of one kernel at the table's shape: a job for a process of its own."""
    return measure(launches(target, **LOADS[load])[name], target)


def faults(name: str, found: Resources, target: str) -> list[str]:
    """What no kernel may have, in words; empty when all is well."""
    wrong = []
    if found.spilled:
        wrong.append(f"spills: {found.spilled} bytes of local memory")
    if found.shared > SHARED_LIMIT[target]:
        wrong.append(f"shared memory: {found.shared} bytes, of {SHARED_LIMIT[target]}")
    wrong += [f"ptxas: {warning}" for warning in found.warnings]
    if name != "combine":
        needed = [PRODUCTS[target]]
        if TARGETS[target].descriptors:
            needed.append("UTMALDG")
        wrong += [f"no {instruction}" for instruction in needed if not found.instructions.get(instruction)]
    return wrong


def compare(found: Resources, golden: dict[str, int]) -> tuple[list[str], list[str]]:
    """(what got worse, what got better) since the numbers were kept."""
    worse: list[str] = []
    better: list[str] = []
    for key in COMPARED:
        now, before = getattr(found, key), golden[key]
        if now != before:
            (worse if (now < before) == (key == "blocks") else better).append(f"{key}: {before} -> {now}")
    return worse, better


def _of_nvidia(kernel: CompiledKernel, target: str, warps: int) -> Resources:
    usage, code, verbose = _read(kernel.asm["cubin"], kernel.asm["ptx"], target)
    registers, stack, local = (int(_group(rf"{key}:(\d+)", usage)) for key in ("REG", "STACK", "LOCAL"))
    spilled = int(_group(r"(\d+) bytes spill stores", verbose)) + int(_group(r"(\d+) bytes spill loads", verbose))
    counts = Counter(_INSTRUCTION.findall(code))
    shared, threads = kernel.metadata.shared, 32 * warps
    # Registers are given out by eights to each thread; each block needs a kilobyte of shared memory for itself.
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    by_shared = (SHARED_LIMIT[target] + 1024) // (shared + 1024)
    return Resources(
        registers,
        shared,
        spilled + stack + local + 4 * (counts["STL"] + counts["LDL"]) * (spilled == 0),
        min(by_registers, by_shared, THREADS[target] // threads, 32),
        {name: counts[name] for name in ("HMMA", "HGMMA", "UTCHMMA", "UTMALDG", "LDGSTS") if counts[name]},
        tuple(line.strip() for line in verbose.splitlines() if "warning" in line.lower() or "C7511" in line),
    )


def _of_amd(kernel: CompiledKernel) -> Resources:
    code = kernel.asm["amdgcn"]
    number = {key: int(_group(rf"\.{key}:\s+(\d+)", code)) for key in ("vgpr_count", "vgpr_spill_count")}
    private = int(_group(r"\.private_segment_fixed_size:\s+(\d+)", code))
    shared = kernel.metadata.shared
    registers = number["vgpr_count"]
    waves = 512 // max(8, -(-registers // 8) * 8)  # of one of four SIMDs
    blocks = min(4 * waves // kernel.metadata.num_warps, SHARED_LIMIT["gfx942"] // max(shared, 1))
    mfma = {"v_mfma": len(re.findall(r"v_mfma", code))}
    return Resources(registers, shared, 4 * number["vgpr_spill_count"] + private, blocks, mfma, ())


@functools.cache
def _read(cubin: bytes, ptx: str, target: str) -> tuple[str, str, str]:
    """What cuobjdump says of resources, nvdisasm of instructions, and ptxas while it assembles: at the same time."""
    tools = knobs.nvidia
    assembler = tools.ptxas_blackwell if target == "sm_100" else tools.ptxas
    architecture = target if target == "sm_80" else f"{target}a"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        binary, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        binary.write_bytes(cubin)
        text.write_text(ptx)
        # The options that Triton itself gives.
        options = ("-v", "--regAllocOptLevel=2", f"--gpu-name={architecture}", str(text), "-o", "/dev/null")
        usage, code, verbose = pool.map(
            _output,
            (
                (tools.cuobjdump.path, "--dump-resource-usage", str(binary)),
                (tools.nvdisasm.path, "-c", str(binary)),
                (assembler.path, *options),
            ),
        )
    return usage, code, verbose


def _output(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _group(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in {text[:500]}"
    return match[1]


def _short(dtype: torch.dtype) -> str:
    return triton.runtime.jit.type_canonicalisation_dict[str(dtype).removeprefix("torch.")]


def main(write: bool) -> None:
    """Print the table, and keep it if told to."""
    table: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for target in TARGETS:
        for load in LOADS:
            for name, launch in launches(target, **LOADS[load]).items():
                found = measure(launch, target)
                kept = {key: asdict(found)[key] for key in COMPARED}
                table.setdefault(target, {}).setdefault(load, {})[name] = kept
                print(
                    f"{target:7}{load:14}{name:11} {found.registers:3} registers {found.shared:7} B shared "
                    f"{found.blocks:3} blocks  {found.instructions} {'; '.join(faults(name, found, target))}",
                    flush=True,
                )
    if write:
        GOLDEN.write_text(json.dumps({"triton": triton.__version__, "targets": table}, indent=1) + "\n")


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
