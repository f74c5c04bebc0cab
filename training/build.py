"""From a configuration to this process' part of the model."""

from __future__ import annotations

import torch

from data.batches import Batches
from data.corpus import Corpus
from parallel.engine import Engine
from training.config import Config
from training.device import compute_dtype


def build_engine(config: Config, world: int, device: torch.device, dtype: torch.dtype | None = None) -> Engine:
    """Build, split and fill; all processes of the job call this together.

    Args:
        config: of the run.
        world: processes of the job.
        device: to compute on.
        dtype: of activations and products; None takes the configuration's.

    Raises:
        ConfigError: if the run cannot be spread over so many processes.
    """
    layout, training = config.layout(world), config.training
    rows = config.micro_batch_sequences(layout)
    return Engine.build(
        config.model,
        config.moe,
        config.parallel,
        layout,
        config.run.seed,
        device,
        compute_dtype(training.precision, device) if dtype is None else dtype,
        rows,
        training.batch_sequences // layout.data // rows,
        training.sequence_length,
    )


def build_batches(config: Config, corpus: Corpus) -> Batches:
    """The training batches of a run: what step n reads is decided by the configuration and the corpus alone."""
    data, training = config.data, config.training
    return Batches(
        corpus,
        training.sequence_length,
        training.batch_sequences,
        config.run.seed,
        data.mixture_exponent,
        data.row_order,
    )
