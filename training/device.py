"""What the run computes on, and how fast that could be at best."""

from __future__ import annotations

import ctypes
import sys

import torch

from moe.config import ConfigError

# Dense bf16 peak, FLOP/s, from the vendors' data sheets (without sparsity), by the name that the driver gives. An
# unknown device gets no MFU rather than a wrong one.
PEAK_BF16_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def choose_device(name: str) -> torch.device:
    """The device of `training.device`: "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('training.device = "cuda": this machine has no usable GPU; use "auto" or "cpu"')
    return torch.device(name)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of `training.precision`: "auto" is bf16 on GPUs and CPUs that multiply it in hardware, else fp32."""
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16(device) else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # PyTorch before 2.13 cannot say what the CPU has; fp32 is right on all of them.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a known GPU in bf16; None for a CPU, an unknown GPU, or another dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return PEAK_BF16_FLOPS.get(torch.cuda.get_device_name(device))


def keep_freed_memory() -> None:
    """Let glibc keep what large tensors free, on CPU.

    By default every tensor over 32 MB at most is mapped afresh, and the kernel's zeroing of its pages costs more than
    the arithmetic that follows. Elsewhere than glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold, keep = -1, -3, 1 << 30
        libc.mallopt(mmap_threshold, keep)
        libc.mallopt(trim_threshold, keep)
