"""One checkpoint served in other ways: exact cutoffs, predictors fitted afterwards, and the way back.

Nothing here changes a weight of the model. What it sets (cutoffs, predictors, the way of inference), `preserved` puts
back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from data.batches import Batches, HeldoutBatch, document_numbers, heldout_windows
from data.corpus import Corpus
from moe.model import Transformer
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.predictor import Predictor
from moe.routers.threshold import ThresholdRouter
from moe.routing import Routing, RoutingContext
from training.config import Config

PREDICTOR_STEPS = 300
PREDICTOR_TOKENS = 1024  # of one step at least, where the run's batch has as many
PREDICTOR_RATE = 0.01


class HeldoutSplit(NamedTuple):
    """Two parts of the held-out text without a token in common, each a list of single rows.

    Attributes:
        scored: windows of S tokens.
        calibration: windows without their first token, S - 1 tokens.
    """

    scored: list[HeldoutBatch]
    calibration: list[HeldoutBatch]


def split_heldout(corpus: Corpus, sequence_length: int, tokens: int | None) -> HeldoutSplit:
    """Deal the held-out windows of each domain in turn: the first is scored, the second calibrates, and so on.

    Both parts so have the same mixture of domains, and cutoffs that suit the one should suit the other. The first
    token of a window can be the last label of the window before: calibration goes without it.

    Args:
        corpus: an open corpus.
        sequence_length: S.
        tokens: labels to score of each domain at most, in whole windows; None deals all.

    Raises:
        ValueError: there is too little held-out text for two parts.
    """
    scored, calibration = [], []
    wanted = None if tokens is None else 2 * -(-tokens // sequence_length) * sequence_length
    dealt: Counter[str] = Counter()
    for row in heldout_windows(corpus, sequence_length, 1, wanted):
        if dealt[row.domain] % 2 == 0:
            scored.append(row)
        elif row.valid_BS[:, 1:].any():
            calibration.append(
                HeldoutBatch(row.domain, *(part_BS[:, 1:] for part_BS in row[1:] if part_BS is not None))
            )
        dealt[row.domain] += 1
    if not calibration:
        raise ValueError(
            f"the held-out text of {corpus.folder} fills {len(scored)} windows of {sequence_length} tokens, and no "
            "domain has a second one to calibrate with: hold more text out, or give more --tokens"
        )
    return HeldoutSplit(scored, calibration)


@contextmanager
def preserved(model: Transformer) -> Iterator[None]:
    """Put cutoffs, predictors and the way of inference back at the end, whatever happens in between."""
    before: list[tuple[ThresholdRouter, Tensor, Any]] = []
    for router in _cutoff_routers(model).values():
        served = (router.inference, router.predictor) if isinstance(router, ExpertChoiceRouter) else None
        before.append((router, router.cutoff_E.clone(), served))
    try:
        yield
    finally:
        for router, cutoff_E, served in before:
            router.cutoff_E.copy_(cutoff_E)
            if isinstance(router, ExpertChoiceRouter):
                router.inference, router.predictor = served


def serve(
    model: Transformer,
    inference: Literal["threshold", "predictor", "token_choice"],
    predictors: dict[int, Predictor] | None = None,
) -> None:
    """Set how an expert-choice model routes in mode "causal"; a router with one way only is left as it is.

    Args:
        model: of any router.
        inference: see `MoEConfig.inference`.
        predictors: by layer, for "predictor"; None keeps the model's own.
    """
    for index, router in _cutoff_routers(model).items():
        if isinstance(router, ExpertChoiceRouter):
            router.inference = inference
            if predictors is not None:
                router.predictor = predictors[index]


def exact_cutoffs(scores_NE: Tensor, share: float) -> Tensor:
    """The score that exactly a share of the tokens reaches, for each expert: (E,).

    It is the (N * share)-th largest score, rounded to whole tokens. Tokens that tie with it all pass, so that ties can
    only raise the share.

    Args:
        scores_NE: of the calibration tokens.
        share: of the tokens, in (0, 1].

    Raises:
        ValueError: not even one token would pass.
    """
    count = round(len(scores_NE) * share)
    if count < 1:
        raise ValueError(
            f"{len(scores_NE)} calibration tokens are too few for experts that take {share:.2%} of them: give more "
            "--tokens, or hold more text out"
        )
    return scores_NE.topk(count, dim=0, sorted=False).values.amin(0)


@torch.no_grad()
def recalibrate(
    model: Transformer, rows: Sequence[HeldoutBatch], end_of_text: int | None = None, batch_rows: int = 8
) -> int:
    """Set every cutoff to the exact quantile of its expert's scores: a share c / E of these tokens reaches it.

    Layer by layer, with one pass each over the text: a layer's inputs come from the layers before it, which must have
    their new cutoffs already, or its quantiles would be those of inputs it will not see. A pass ends at the layer it
    is for.

    Args:
        model: whose routers keep cutoffs. It serves by them afterwards.
        rows: the calibration text. Padding does not count.
        end_of_text: see `likelihood.evaluate_windows`.
        batch_rows: rows of one forward pass.

    Returns:
        Tokens that the quantiles are over.
    """
    serve(model, "threshold")
    share = model.moe_config.assignments_per_token / model.moe_config.num_experts
    tokens = 0
    for index, router in _cutoff_routers(model).items():
        parts = [rows[first : first + batch_rows] for first in range(0, len(rows), batch_rows)]
        scores_NE = torch.cat([_scores_at(model, index, part, end_of_text) for part in parts])
        router.cutoff_E.copy_(exact_cutoffs(scores_NE, share))
        tokens = len(scores_NE)
    return tokens


class _Reached(Exception):
    """The layer's routing has been seen; the rest of the pass is not needed."""


def _scores_at(model: Transformer, layer: int, rows: Sequence[HeldoutBatch], end_of_text: int | None) -> Tensor:
    """Scores (N, E) of the rows' valid tokens at one layer, under causal routing."""
    device = model.device
    token_BS = torch.cat([row.token_BS for row in rows]).to(device)
    valid_BS = torch.cat([row.valid_BS for row in rows]).to(device)
    found: list[Tensor] = []

    def observe(index: int, routing: Routing) -> None:
        if index == layer:
            found.append(routing.scores()[valid_BS.flatten()])
            raise _Reached

    context = RoutingContext(len(token_BS), token_BS.shape[1], valid_BS, observe=observe)
    try:
        model(token_BS, context, _documents(token_BS, end_of_text))
    except _Reached:
        return found[0]
    raise AssertionError(f"layer {layer} has not routed")


def own_predictors(model: Transformer) -> dict[int, Predictor]:
    """The predictors that were trained with the model, by layer; empty where there are none."""
    routers = _cutoff_routers(model).items()
    return {i: r.predictor for i, r in routers if isinstance(r, ExpertChoiceRouter) and r.predictor is not None}


def predictor_text(corpus: Corpus, config: Config) -> tuple[Batches, int]:
    """Training text in whole routing groups, in the run's own order, and the tokens of one batch of it."""
    training, group = config.training, config.moe.group_sequences
    groups = -(-PREDICTOR_TOKENS // (group * training.sequence_length))
    rows = min(training.batch_sequences, groups * group)
    seed, exponent = config.run.seed, config.data.mixture_exponent
    return Batches(corpus, training.sequence_length, rows, seed, exponent), rows * training.sequence_length


def fit_predictors(
    model: Transformer, batch: Callable[[int], Tensor], steps: int, end_of_text: int | None = None
) -> dict[int, Predictor]:
    """Logistic regressions of the training router's choice on the router's inputs (Raposo et al. 2024, section 3.5).

    The model is frozen and routes as in training, so that one pass serves the predictors of all layers. Each step is
    one of Adam, whose rate falls linearly to 0; no random number is drawn.

    Args:
        model: of the expert-choice family.
        batch: int64 (B, S) training text of a step, in whole routing groups.
        steps: Adam steps.
        end_of_text: see `likelihood.evaluate_windows`.

    Returns:
        A predictor for each mixture layer, by the block's number.
    """
    config, device = model.moe_config, model.device
    share = config.assignments_per_token / config.num_experts
    predictors = {
        i: Predictor(config.num_experts, model.config.width, share).to(device) for i in _cutoff_routers(model)
    }
    for predictor in predictors.values():
        predictor.reset_parameters()
    optimizer = torch.optim.Adam([p for predictor in predictors.values() for p in predictor.parameters()])
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    with watched(model, lambda index, x_TD, routing: seen.update({index: (x_TD, routing.assigned_TE())})):
        for step in range(steps):
            token_BS = batch(step).to(device)
            context = RoutingContext(len(token_BS), token_BS.shape[1], mode="train_router")
            with torch.no_grad():
                model(token_BS, context, _documents(token_BS, end_of_text))
            losses = [predictors[i].loss(predictors[i](x_TD), taken_TE).mean() for i, (x_TD, taken_TE) in seen.items()]
            optimizer.param_groups[0]["lr"] = PREDICTOR_RATE * (1 - step / steps)
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
    return predictors


class GuessCounter:
    """Compares predictors with the training router's choice, over the passes it watches.

    Attributes:
        pairs: (token, expert) pairs seen, of all layers.
        right: of these, guessed right.
        taken: of these, the ones the router chose.
    """

    def __init__(self, predictors: dict[int, Predictor]) -> None:
        self._predictors = predictors
        self.pairs = self.right = self.taken = 0

    @torch.no_grad()
    def __call__(self, layer: int, x_TD: Tensor, routing: Routing) -> None:
        """Look at one layer of one pass without padding; a callback of `watched`."""
        taken_TE = routing.assigned_TE()
        self.pairs += taken_TE.numel()
        self.right += int(((self._predictors[layer](x_TD) > 0) == taken_TE).sum())
        self.taken += int(taken_TE.sum())

    @property
    def accuracy(self) -> float:
        """Share of the pairs guessed right."""
        return self.right / self.pairs

    @property
    def base_rate(self) -> float:
        """The same for the better of two constant guesses: always taken, or never."""
        return max(self.taken, self.pairs - self.taken) / self.pairs


@contextmanager
def watched(model: Transformer, see: Callable[[int, Tensor, Routing], None]) -> Iterator[None]:
    """Call `see` with (layer, the router's input (T, D), its routing) whenever a router of the model has routed."""
    handles = [
        layer.router.register_forward_hook(lambda _, inputs, routing, index=layer.index: see(index, inputs[0], routing))
        for layer in model.moe_layers()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cutoff_routers(model: Transformer) -> dict[int, ThresholdRouter]:
    """Routers that keep cutoffs, by the block's number."""
    layers = model.moe_layers()
    return {layer.index: layer.router for layer in layers if isinstance(layer.router, ThresholdRouter)}


def _documents(token_BS: Tensor, end_of_text: int | None) -> Tensor | None:
    return None if end_of_text is None else document_numbers(token_BS, end_of_text)
