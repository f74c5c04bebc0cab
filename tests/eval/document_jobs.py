"""What every process of a job computes for the tests of document sums."""

from __future__ import annotations

import numpy as np
import torch

from data.batches import HeldoutBatch
from eval.likelihood import evaluate_windows
from moe.config import ModelConfig, MoEConfig
from parallel.config import Layout, ParallelConfig
from parallel.engine import Engine

ROWS, LENGTH, VOCABULARY = 3, 8, 37  # three rows are not shared out evenly


def document_sums(in_processes: bool) -> dict[tuple[str, int], tuple[float, int, int]]:
    """Nats, tokens and bytes of each document, as this process sums them."""
    parallel = ParallelConfig()
    layout = Layout.of(parallel, 2 if in_processes else 1)
    model = ModelConfig(vocabulary_size=VOCABULARY, width=24, layers=2, heads=2, kv_heads=1)
    moe = MoEConfig(router="token_choice", num_experts=4, expert_width=16, experts_per_token=2, group_sequences=1)
    engine = Engine.build(model, moe, parallel, layout, 0, torch.device("cpu"), torch.float32, 2, 1, LENGTH)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(2):
        token_BS = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
        label_BS = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
        label_BS[2, 5:] = -100
        document_BS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) // 5 + 4 * number  # some in both batches
        batches.append(HeldoutBatch("a", token_BS, label_BS, label_BS >= 0, document_BS))
    scores = evaluate_windows(engine, batches, np.arange(VOCABULARY))
    return {(d, n): (p.nats, p.tokens, p.bytes) for d, docs in scores.documents.items() for n, p in docs.items()}
