"""How a run's tokens meet experts once it is served, which is all that a checkpoint elsewhere can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe.config import MoEConfig


class InterchangeError(ValueError):
    """Something that one side has and the other cannot express; the message names it, its value and a way out."""


@dataclass(frozen=True)
class Served:
    """Routing as served.

    Attributes:
        selection: "threshold": every expert whose cutoff the score reaches; "top_k": the token's best; "dense": there
            are no experts.
        score: of the router's logits.
        renormalize: whether a token's weights are divided by their sum.
    """

    selection: Literal["threshold", "top_k", "dense"]
    score: str = "softmax"
    renormalize: bool = False


def served(moe: MoEConfig) -> Served:
    """How a run is served. Capacities, jitter, noise and losses belong to training and do not count.

    Raises:
        InterchangeError: it is neither by thresholds nor by plain top-k.
    """
    router = moe.router
    if router == "dense":
        return Served("dense")
    if router == "token_choice":
        return Served("top_k", moe.score, moe.renormalize)
    if router in ("noisy_top_k", "gshard"):  # without noise: a softmax over the chosen
        return Served("top_k", "softmax", True)
    if router in ("threshold", "expert_choice", "mixture_of_depths"):
        score = "sigmoid" if router == "mixture_of_depths" else moe.score
        if router != "threshold" and moe.inference == "predictor":
            raise InterchangeError(
                'moe.inference = "predictor": a predictor cannot be exported, thresholds and token choice can; '
                "set moe.inference in a copy of the run's config.toml to serve it otherwise"
            )
        by_threshold = router == "threshold" or moe.inference == "threshold"
        return Served("threshold" if by_threshold else "top_k", score)
    raise InterchangeError(
        f'moe.router = "{router}": can be exported where it is served by plain top-k (token_choice, noisy_top_k, '
        "gshard) or by thresholds (expert_choice, threshold, mixture_of_depths)"
    )
