"""Time of a training step: `python -m benchmarks.train_step [CONFIG.toml] [--peer transformers] [--section.key ...]`.

Each contender lives in a process of its own, builds its model, and takes steps when told to; they take turns, so that
a drift of the machine's speed meets them alike, and only one computes at a time. Tokens are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.table import Table

from moe.config import ConfigError
from training.config import Config
from training.load_config import load_config

# Operators that are matrix products, by the profiler's names; attention is listed apart.
GEMM_OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::mkldnn_linear")
ATTENTION_OPERATORS = ("scaled_dot_product",)


def main(arguments: list[str]) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    parser.add_argument("--peer", choices=["transformers"], help="also time this library's model of the same shape")
    parser.add_argument("--repeats", type=int, default=7, help="counted steps of each contender")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    parser.add_argument("--json", help="also write the results to this file")
    # The configuration's name is taken off first: the parser would take a flag's value for it.
    named = bool(arguments) and not arguments[0].startswith("-")
    path, rest = (arguments[0], arguments[1:]) if named else ("configs/speed.toml", arguments)
    options, flags = parser.parse_known_args(rest)
    try:
        config = load_config([path, *flags], "python -m benchmarks.train_step")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    contenders = ["choir"]
    if options.peer == "transformers":
        # bf16 is compared with both of its bf16 modes: everything in bf16 (fastest, and no fp32 masters), and autocast.
        modes = ["fp32"] if config.training.precision == "fp32" else ["bf16 weights", "bf16 autocast"]
        contenders += [f"transformers, {mode}" for mode in modes]
    results = race(config, contenders, options.repeats, options.threads)
    report(config, results)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([dataclasses.asdict(result) for result in results], file, indent=1)
    return 0


@dataclasses.dataclass
class Result:
    """What one contender took.

    Attributes:
        seconds: of each counted step.
        gemm_share: share of operator time in matrix products, from a profiled step.
        attention_share: share in attention.
        peak_bytes: largest memory of the process (resident), or of the GPU's allocator.
    """

    name: str
    parameters: int
    seconds: list[float]
    gemm_share: float
    attention_share: float
    peak_bytes: int


def race(config: Config, contenders: list[str], repeats: int, threads: int) -> list[Result]:
    """Let contenders take turns, one step at a time; two uncounted steps first."""
    context = multiprocessing.get_context("spawn")
    workers = []
    for name in contenders:
        here, there = context.Pipe()
        process = context.Process(target=contender, args=(there, name, config, threads), daemon=True)
        process.start()
        parameters = _receive(here)
        workers.append((name, parameters, here, process))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 2):
        for name, _, pipe, _ in workers:
            pipe.send("step")
            took = _receive(pipe)
            if repeat >= 2:
                seconds[name].append(took)
    results = []
    for name, parameters, pipe, process in workers:
        pipe.send("profile")
        gemm_share, attention_share, peak = _receive(pipe)
        results.append(Result(name, parameters, seconds[name], gemm_share, attention_share, peak))
        process.join(30)
    return results


def contender(pipe: Connection, name: str, config: Config, threads: int) -> None:
    """Process of one contender: build, then obey "step" and "profile"."""
    try:
        import torch

        from training.device import choose_device, keep_freed_memory

        keep_freed_memory()
        if threads:
            torch.set_num_threads(threads)
        device = choose_device(config.training.device)
        build = build_choir if name == "choir" else build_transformers
        step, parameters = build(config, device, name)

        def timed() -> float:
            started = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        pipe.send(parameters)
        while pipe.recv() == "step":
            pipe.send(timed())
        # ru_maxrss is in KiB on Linux. Read before profiling, which allocates.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        pipe.send((*operator_shares(timed, device), peak))
    except BaseException as error:
        pipe.send(error)
        raise


def build_choir(config: Config, device: Any, name: str) -> tuple[Callable[[], object], int]:
    """This repository's training step, exactly as train.py takes it."""
    import torch

    from data.batches import Batch
    from moe.initialization import build_model, parameter_counts
    from training.device import compute_dtype
    from training.optimizer import build_optimizer
    from training.step import train_step

    model = build_model(config.model, config.moe, 0, device, compute_dtype(config.training.precision, device))
    optimizer = build_optimizer(model, config.training)
    token_BS, label_BS = random_tokens(config)
    batch = Batch(token_BS, label_BS, torch.zeros(token_BS.shape[0], dtype=torch.int64))
    return lambda: train_step(model, optimizer, batch, config, 0, end_of_text=0), parameter_counts(model)[0]


def build_transformers(config: Config, device: Any, name: str) -> tuple[Callable[[], object], int]:
    """OLMoE of the same shape from transformers, with its default experts and attention, and the same optimizer."""
    import torch

    try:
        from transformers import OlmoeConfig, OlmoeForCausalLM
    except ImportError:
        raise SystemExit(
            "--peer transformers: install it with pip install -c constraints.txt -e '.[interchange]'"
        ) from None
    from training.optimizer import build_optimizer

    model_config = OlmoeConfig(
        vocab_size=config.model.vocabulary_size,
        hidden_size=config.model.width,
        intermediate_size=config.moe.expert_width,
        num_hidden_layers=config.model.layers,
        num_attention_heads=config.model.heads,
        num_key_value_heads=config.model.resolved_kv_heads,
        num_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.experts_per_token,
        max_position_embeddings=config.training.sequence_length,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = OlmoeForCausalLM(model_config).to(device).train()
    if name.endswith("bf16 weights"):
        model = model.to(torch.bfloat16)
    optimizer = build_optimizer(model, config.training)
    token_BS, label_BS = (t.to(device) for t in random_tokens(config))
    autocast = name.endswith("bf16 autocast")

    def step() -> None:
        for start in range(0, token_BS.shape[0], config.training.micro_batch_sequences):
            rows = slice(start, start + config.training.micro_batch_sequences)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logits_BSV = model(input_ids=token_BS[rows]).logits
            loss = torch.nn.functional.cross_entropy(
                logits_BSV.float().flatten(0, 1), label_BS[rows].flatten(), reduction="sum"
            )
            (loss / label_BS.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(p.numel() for p in model.parameters())


def random_tokens(config: Config) -> tuple[Any, Any]:
    """(token_BS, label_BS) of one step; id 0 (the document marker) does not occur."""
    import torch

    shape = (config.training.batch_sequences, config.training.sequence_length + 1)
    window = torch.randint(1, config.model.vocabulary_size, shape, generator=torch.Generator().manual_seed(1))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def operator_shares(step: Callable[[], object], device: Any) -> tuple[float, float]:
    """Shares of operator time spent in matrix products and in attention during one step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as trace:
        step()
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [(event.key, getattr(event, key)) for event in trace.key_averages()]
    total = sum(took for _, took in events)
    gemm = sum(took for operator, took in events if operator in GEMM_OPERATORS)
    attention = sum(took for operator, took in events if any(part in operator for part in ATTENTION_OPERATORS))
    return gemm / total, attention / total


def report(config: Config, results: list[Result]) -> None:
    """Print the table."""
    tokens = config.tokens_per_step
    console = Console()
    table = Table(
        title=f"{tokens:,} tokens a step, {config.training.precision}, {config.moe.router}, "
        f"{len(results[0].seconds)} steps each, in turn"
    )
    for column in (
        "",
        "parameters",
        "tokens/s",
        "step s: median",
        "min - max",
        "ratio",
        "GEMM",
        "attention",
        "peak GiB",
    ):
        table.add_column(column, justify="left" if not column else "right")
    base = results[0].seconds
    for result in results:
        ratios = sorted(other / own for own, other in zip(base, result.seconds, strict=True))
        middle = statistics.median(result.seconds)
        table.add_row(
            result.name,
            f"{result.parameters / 1e6:.1f}M",
            f"{tokens / middle:,.0f}",
            f"{middle:.3f}",
            f"{min(result.seconds):.3f} - {max(result.seconds):.3f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
            f"{result.gemm_share:.0%}",
            f"{result.attention_share:.0%}",
            f"{result.peak_bytes / 2**30:.2f}",
        )
    console.print(table)
    console.print("ratio: step time of the contender over choir's, step by step; above 1 means that choir is faster")


def _receive(pipe: Connection) -> Any:
    answer = pipe.recv()
    if isinstance(answer, BaseException):
        raise SystemExit(f"error: a contender failed: {answer}")
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
