"""Does a model say the same however a text is fed to it?

A whole text at once, token by token with the cache, in chunks, each row alone, padded on the left: under causal
routing all are the same function, so logits differ by rounding only, and a route differs only where a score lies
within rounding of its cutoff.

    python -m eval.parity RUN [--rows 4]

checks a run on its held-out text, in fp32 whatever it was trained in, and fails where parity does not hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batches import heldout_windows
from eval.command import run_command
from eval.routing_recorder import NEAR
from moe.attention import KeyValueCache
from moe.model import Transformer
from moe.routing import Routing, RoutingContext
from training.run import Run

LOGIT_TOLERANCE = 1e-4
LEFT_PADDING = 3
CHUNK = 4


@dataclass(frozen=True)
class Parity:
    """One way of feeding the text, compared with one pass over the whole batch.

    Attributes:
        way: "token by token", "in chunks", "row by row" or "padded on the left".
        max_logit_difference: largest absolute difference of a logit.
        routes: (layer, token, expert) decisions compared.
        routes_different: how many of them differ.
        first_different: of these, the ones with no differing decision before them, in an earlier layer at the same or
            an earlier position of the row, that could have caused them.
        first_near_cutoff: of those, the ones whose score was within the tolerance of its cutoff.
    """

    way: str
    max_logit_difference: float
    routes: int
    routes_different: int
    first_different: int
    first_near_cutoff: int

    @property
    def explained(self) -> bool:
        """Every difference in routing started from a score at its cutoff."""
        return self.first_different == self.first_near_cutoff


@dataclass
class _Pass:
    """Logits, and for each mixture layer the routes and their distance from the cutoff."""

    logits_BSV: Tensor
    routes_LBSE: Tensor
    distance_LBSE: Tensor


@torch.no_grad()
def check_parity(model: Transformer, token_BS: Tensor, tolerance: float = NEAR) -> list[Parity]:
    """Feed a text in four ways and compare each with one pass over the whole batch.

    Args:
        model: any router; routing is causal.
        token_BS: int64 ids, one document a row.
        tolerance: how near to its cutoff a score may be for rounding to decide its route; 1e-5 suits fp32.

    Returns:
        One comparison for each way.
    """
    token_BS = token_BS.to(model.device)
    whole = _cached(model, token_BS, token_BS.shape[1], use_cache=False)
    return [_compare(way, other, whole, tolerance) for way, other in _ways(model, token_BS)]


def _ways(model: Transformer, token_BS: Tensor) -> Iterator[tuple[str, _Pass]]:
    yield "token by token", _cached(model, token_BS, 1)
    yield "in chunks", _cached(model, token_BS, CHUNK)
    alone = [_cached(model, row_S[None], token_BS.shape[1], use_cache=False) for row_S in token_BS]
    yield (
        "row by row",
        _Pass(
            torch.cat([one.logits_BSV for one in alone]),
            torch.cat([one.routes_LBSE for one in alone], dim=1),
            torch.cat([one.distance_LBSE for one in alone], dim=1),
        ),
    )
    padding_BP = torch.zeros_like(token_BS[:, :1]).expand(-1, LEFT_PADDING)
    padded_BS = torch.cat([padding_BP, token_BS], dim=1)
    valid_BS = torch.ones_like(padded_BS, dtype=torch.bool)
    valid_BS[:, :LEFT_PADDING] = False
    padded = _cached(model, padded_BS, padded_BS.shape[1], valid_BS)
    yield (
        "padded on the left",
        _Pass(
            padded.logits_BSV[:, LEFT_PADDING:],
            padded.routes_LBSE[:, :, LEFT_PADDING:],
            padded.distance_LBSE[:, :, LEFT_PADDING:],
        ),
    )


def _cached(
    model: Transformer, token_BS: Tensor, chunk: int, valid_BS: Tensor | None = None, use_cache: bool = True
) -> _Pass:
    """Feed `chunk` positions at a time."""
    batch, length = token_BS.shape
    cache = None
    if use_cache:  # exactly as many positions as are needed: the last one must be usable
        cache = KeyValueCache(model.config, batch, length, model.compute_dtype, token_BS.device)
    layers = {layer.index: layer for layer in model.moe_layers()}
    logits, routes, distances = [], [], []
    seen: list[tuple[int, Routing]] = []  # of one part, by layer
    for start in range(0, length, chunk):
        part_BS = token_BS[:, start : start + chunk]
        part_valid = None if valid_BS is None else valid_BS[:, start : start + chunk]
        seen.clear()
        context = RoutingContext(
            batch, part_BS.shape[1], part_valid, "causal", observe=lambda *routed: seen.append(routed)
        )
        logits.append(model(part_BS, context, cache=cache).float())
        if layers:
            shape = (batch, part_BS.shape[1], -1)
            routes.append(torch.stack([routing.assigned_TE().view(shape) for _, routing in seen]))
            distance = [layers[index].router.decision_distance(routing).view(shape) for index, routing in seen]
            distances.append(torch.stack(distance))
    if not layers:  # a dense model routes nothing
        nothing = torch.zeros(0, batch, length, 1, device=token_BS.device)
        return _Pass(torch.cat(logits, dim=1), nothing.bool(), nothing)
    return _Pass(torch.cat(logits, dim=1), torch.cat(routes, dim=2), torch.cat(distances, dim=2))


def _compare(way: str, other: _Pass, whole: _Pass, tolerance: float) -> Parity:
    different_LBSE = other.routes_LBSE != whole.routes_LBSE
    # Differences in any earlier layer, at any position up to this one of the row.
    reached_LBS = different_LBSE.any(-1).cummax(2).values if different_LBSE.numel() else different_LBSE.any(-1)
    earlier_LBS = torch.zeros_like(reached_LBS)
    for layer in range(1, len(reached_LBS)):
        earlier_LBS[layer] = earlier_LBS[layer - 1] | reached_LBS[layer - 1]
    first_LBSE = different_LBSE & ~earlier_LBS[..., None]
    return Parity(
        way,
        float((other.logits_BSV - whole.logits_BSV).abs().max()),
        different_LBSE.numel(),
        int(different_LBSE.sum()),
        int(first_LBSE.sum()),
        int((first_LBSE & (whole.distance_LBSE <= tolerance)).sum()),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.parity", description="Check that a run says the same however fed."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--rows", type=int, default=4, help="held-out sequences of training length (default 4)")
    options = parser.parse_args(arguments)
    run = Run.open(options.run)
    model = run.model()
    model.compute_dtype = torch.float32
    length = run.config.training.sequence_length
    windows = next(heldout_windows(run.corpus(), length, options.rows, options.rows * length))
    results = check_parity(model, windows.token_BS[windows.valid_BS.all(1)])
    for result in results:
        print(
            f"{result.way}: logits differ by {result.max_logit_difference:.1e} at most; {result.routes_different} of "
            f"{result.routes:,} routes differ, {result.first_different} of them first, "
            f"{result.first_near_cutoff} of those within {NEAR} of the cutoff"
        )
    if not all(result.explained for result in results):
        raise ValueError("a route differs although its score is not at the cutoff")
    if all(result.routes_different == 0 for result in results):
        worst = max(result.max_logit_difference for result in results)
        if worst > LOGIT_TOLERANCE:
            raise ValueError(f"equal routes, but logits differ by {worst:.1e}; {LOGIT_TOLERANCE} is allowed")


if __name__ == "__main__":
    run_command(main)
