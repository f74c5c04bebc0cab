"""Routers: from `x_TD` to a `Routing`. A new one is one file here and one line in `ROUTERS`."""

from __future__ import annotations

from moe.config import MoEConfig
from moe.routers.base import Router
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.threshold import ThresholdRouter
from moe.routers.token_choice import TokenChoiceRouter

ROUTERS: dict[str, type[Router]] = {
    "expert_choice": ExpertChoiceRouter,
    "threshold": ThresholdRouter,
    "token_choice": TokenChoiceRouter,
}


def build_router(config: MoEConfig, width: int) -> Router:
    """The router that `config.router` names, for inputs of `width` D."""
    return ROUTERS[config.router](config, width)


__all__ = ["ROUTERS", "ExpertChoiceRouter", "Router", "ThresholdRouter", "TokenChoiceRouter", "build_router"]
