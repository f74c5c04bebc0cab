"""Routers: from `x_TD` to a `Routing`. `python -m moe.routers` lists them; `registry.py` says what each is.

A new one is one file here and one entry in `ROUTERS`. Importing this package loads neither torch nor any router, so
that a wrong flag fails at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe.routers.registry import ROUTERS

if TYPE_CHECKING:
    from moe.config import MoEConfig
    from moe.routers.base import Router


def router_class(name: str) -> Any:
    """The class that the registry names; imported only now."""
    module, _, attribute = ROUTERS[name].target.rpartition(".")
    return getattr(import_module(module), attribute)


def build_router(config: MoEConfig, width: int, layer: int = 0) -> Router:
    """The router that `config.router` names.

    Args:
        config: of the mixture layers.
        width: D of the inputs.
        layer: number of the transformer block; noise differs between layers.
    """
    router: Router = router_class(config.router)(config, width, layer)
    return router


__all__ = ["ROUTERS", "build_router", "router_class"]
