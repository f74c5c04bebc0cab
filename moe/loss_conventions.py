"""What other libraries mean by "balance loss" and "z-loss": their values and coefficients in terms of ours, and back.

The formulas differ in two factors. f, the share of the assignments an expert is given, sums to 1 where it is divided
by k and to k where it is not. Layers are summed or averaged, and what is printed need not be what is minimised.

| convention     | f sums to | layers, minimised | layers, printed | read in                                        |
|----------------|-----------|-------------------|-----------------|------------------------------------------------|
| `choir`        | 1         | sum               | sum             | `moe/losses.py`                                |
| `transformers` | k         | pooled            | pooled          | Mixtral's `load_balancing_loss_func` (5.24)    |
| `megatron`     | 1         | sum               | mean            | `switch_load_balancing_loss_func`, MoE logging |
| `megablocks`   | 1         | mean              | mean            | `batched_load_balancing_loss`                  |
| `flaxformer`   | k         | mean              | mean            | `_load_balancing_loss`, T5X's `_expert_losses` |

A printed value is meant without its coefficient: MegaBlocks and T5X print the product, so divide it first. All
coefficients stand beside a language-model loss that is a mean over tokens; none depends on the number of tokens.
Which tokens share an f is another matter: a micro-batch in the other libraries (a group in flaxformer), a routing group
here. Values and gradients compare over equal sets of tokens.

"Pooled": transformers averages f and P over all layers *before* their product, as if the layers were one layer with
more tokens. Layers that lean opposite ways then cancel, and no factor turns one value into the other. The factors here
are exact where every layer has the same f; `printed_balance` computes the true value of a given routing.

Padding is cut out by choir, transformers and Megatron. MegaBlocks counts it as tokens, and flaxformer still divides by
the number of all tokens where it masks them: no factor here corrects that. Older Megatron printed the mean over all
layers, dense ones too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moe.losses import switch_balance

Layers = Literal["sum", "mean", "pooled"]


@dataclass(frozen=True)
class Convention:
    """How a library defines a loss.

    Attributes:
        divides_by_k: f sums to 1 instead of k. A z-loss knows no k.
        minimised: how layers combine in the loss that is differentiated.
        printed: how they combine in the value that is logged.
    """

    divides_by_k: bool
    minimised: Layers
    printed: Layers

    def factor(self, layers_combine: Layers, experts_per_token: int, layers: int) -> float:
        """This loss over choir's, for one routing with the same f in every layer."""
        return (1 if self.divides_by_k else experts_per_token) / (1 if layers_combine == "sum" else layers)


BALANCE = {
    "choir": Convention(divides_by_k=True, minimised="sum", printed="sum"),
    "transformers": Convention(divides_by_k=False, minimised="pooled", printed="pooled"),
    "megatron": Convention(divides_by_k=True, minimised="sum", printed="mean"),
    "megablocks": Convention(divides_by_k=True, minimised="mean", printed="mean"),
    "flaxformer": Convention(divides_by_k=False, minimised="mean", printed="mean"),
}
"""Conventions of the balance loss. A value of 1 in `choir` and one layer is uniform routing."""

Z = {
    "choir": Convention(divides_by_k=True, minimised="sum", printed="sum"),
    "transformers": Convention(divides_by_k=True, minimised="mean", printed="mean"),
    "megatron": Convention(divides_by_k=True, minimised="sum", printed="mean"),
    "flaxformer": Convention(divides_by_k=True, minimised="mean", printed="mean"),
}
"""Conventions of the z-loss. transformers has it in its Switch Transformers only, where encoder and decoder each take
the mean over their own layers. MegaBlocks hands out one value a layer and leaves it to its user to combine them: name
`choir` for their sum, `flaxformer` for their mean."""


def convert_balance_value(value: float, source: str, target: str, experts_per_token: int, layers: int) -> float:
    """What `target` would print for a routing for which `source` printed `value`.

    Exact, except that to or from `transformers` it holds only where every layer has the same f or the same mean
    probabilities P (always with one layer).

    Args:
        value: printed by `source`, without its coefficient.
        source: a key of `BALANCE`.
        target: a key of `BALANCE`.
        experts_per_token: k.
        layers: mixture layers L.

    Raises:
        ValueError: an unknown convention; k or L below 1.
    """
    return value * _ratio(BALANCE, "printed", source, target, experts_per_token, layers)


def convert_balance_coefficient(
    coefficient: float, source: str, target: str, experts_per_token: int, layers: int
) -> float:
    """The coefficient in `target` that gives the router the gradient that `coefficient` gives it in `source`.

    Exact, except that to or from `transformers` it holds only where every layer has the same f: its gradient pulls
    each layer towards the pooled load, not towards its own. For arguments and errors see `convert_balance_value`.
    """
    return coefficient / _ratio(BALANCE, "minimised", source, target, experts_per_token, layers)


def convert_z_value(value: float, source: str, target: str, layers: int) -> float:
    """What `target` would print for logits for which `source` printed the z-loss `value`; always exact.

    Args:
        value: printed by `source`, without its coefficient.
        source: a key of `Z`.
        target: a key of `Z`.
        layers: mixture layers L.

    Raises:
        ValueError: an unknown convention; L below 1.
    """
    return value * _ratio(Z, "printed", source, target, 1, layers)


def convert_z_coefficient(coefficient: float, source: str, target: str, layers: int) -> float:
    """The z-loss coefficient in `target` with the gradient of `coefficient` in `source`; see `convert_z_value`."""
    return coefficient / _ratio(Z, "minimised", source, target, 1, layers)


def printed_balance(
    convention: str, scores_LTE: Tensor, assigned_LTE: Tensor, experts_per_token: int, valid_T: Tensor | None = None
) -> Tensor:
    """The balance loss that a library prints for a routing, by its own formula, also where no factor is exact.

    Args:
        convention: a key of `BALANCE`.
        scores_LTE: scores of each layer, normalised per token.
        assigned_LTE: bool, the choice before any token is dropped.
        experts_per_token: k.
        valid_T: bool, False at padding, which is cut out whatever the library does with it.

    Returns:
        fp32 scalar, differentiable.

    Raises:
        ValueError: an unknown convention.
    """
    facts = _named(BALANCE, convention)
    layers = scores_LTE.shape[0]
    valid_LT = None if valid_T is None else valid_T.expand(layers, -1)
    if facts.printed == "pooled":
        scores_LTE, assigned_LTE = scores_LTE.reshape(1, -1, scores_LTE.shape[-1]), assigned_LTE.flatten(0, 1)[None]
        valid_LT = None if valid_LT is None else valid_LT.reshape(1, -1)
        layers = 1
    value = switch_balance(scores_LTE, assigned_LTE, experts_per_token, valid_LT).sum()
    return value * facts.factor(facts.printed, experts_per_token, layers)


def _ratio(
    conventions: Mapping[str, Convention],
    which: Literal["printed", "minimised"],
    source: str,
    target: str,
    experts_per_token: int,
    layers: int,
) -> float:
    """The target's loss over the source's."""
    for name, number in (("experts_per_token", experts_per_token), ("layers", layers)):
        if number < 1:
            raise ValueError(f"{name} = {number}: must be at least 1")
    of_source, of_target = (
        facts.factor(facts.printed if which == "printed" else facts.minimised, experts_per_token, layers)
        for facts in (_named(conventions, source), _named(conventions, target))
    )
    return of_target / of_source


def _named(conventions: Mapping[str, Convention], name: str) -> Convention:
    if name not in conventions:
        hint = ""
        if name == "megablocks":  # only Z lacks it
            hint = "; MegaBlocks' z-loss is one value a layer: name choir for their sum, flaxformer for their mean"
        raise ValueError(f"convention {name!r} is unknown: choose among {', '.join(conventions)}{hint}")
    return conventions[name]
