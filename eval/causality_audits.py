"""Exact audits of what routing can see: change some tokens, and look for any bit that moves where none may.

A1 resamples the end of one row: a changed bit before it, in that row, means that the router sees the future. A2
resamples the other rows: a changed bit in the row that was kept means that routing depends on the batch. Both compare
routes, combine weights and outputs of every mixture layer, and the logits. They run on the reference backend, in fp32
and at fixed shapes, where a matrix product cannot change its last bits because another token went elsewhere.

A4 is the most that routing could tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from moe.config import ModelConfig, MoEConfig, is_moe_layer
from moe.groups import check_routing
from moe.initialization import build_model
from moe.model import Transformer
from moe.routers.registry import ROUTERS, Verdict
from moe.routing import Routing, RoutingContext

RANK: dict[Verdict, int] = {"causal": 0, "batch-dependent": 1, "leaks": 2}
SUFFIX_PROBES = 6
MOST_TOKENS = 8192  # of one pass with two routing groups; larger groups are probed one at a time
PROBE_MODEL = ModelConfig(vocabulary_size=64, width=16, layers=3, heads=2)
PROBE_EXPERT_WIDTH = 4


class Way(NamedTuple):
    """One way in which a configuration routes.

    Attributes:
        name: for people.
        mode: see `RoutingContext`.
        threshold_phase: see `RoutingContext`.
        training: whether it counts for the training router's verdict; else for the evaluation router's.
    """

    name: str
    mode: Literal["train", "causal", "train_router"]
    threshold_phase: bool
    training: bool


@dataclass
class Audit:
    """A1 and A2 of one way of routing.

    Attributes:
        way: its name.
        training: see `Way`.
        suffix_probes: resampled ends of rows (A1).
        leaks: of these, the ones that changed something before the end, in the same row.
        row_probes: rows kept while the others were resampled (A2).
        batch_dependent: of these, the ones whose kept row changed.
        moved: (layer, token, expert) decisions that changed among the resampled tokens: the evidence that the probes
            could have shown something. None for a layer without routing decisions.
        moved_before: decisions that changed before the resampled ends, in the same row.
        dropped: choices that did not fit, over the unchanged batch.
        first: what the first leak or dependence changed first.
    """

    way: str
    training: bool
    suffix_probes: int = 0
    leaks: int = 0
    row_probes: int = 0
    batch_dependent: int = 0
    moved: int | None = 0
    moved_before: int = 0
    dropped: int = 0
    first: str = ""

    @property
    def verdict(self) -> Verdict:
        """As measured."""
        return "leaks" if self.leaks else "batch-dependent" if self.batch_dependent else "causal"


@dataclass
class Verdicts:
    """What was measured, beside what the registry declares.

    Attributes:
        audits: one for each way of routing.
        training: measured, the worst of the training ways.
        evaluation: measured.
        declared_training: by the registry.
        declared_evaluation: by the registry.
        rows, length: shape of the batch that was probed.
        notes: what was changed to make the audits affordable.
    """

    audits: list[Audit]
    training: Verdict
    evaluation: Verdict
    declared_training: Verdict
    declared_evaluation: Verdict
    rows: int
    length: int
    notes: list[str] = field(default_factory=list)


@dataclass
class _Look:
    """One pass: what was seen, by name, each (B, S, ...)."""

    seen: dict[str, Tensor] = field(default_factory=dict)
    dropped: int = 0

    @property
    def routes(self) -> list[str]:
        return [name for name in self.seen if name.startswith("routes")]


def certify_router(moe: MoEConfig, sequence_length: int, seed: int = 0) -> Verdicts:
    """Audit an untrained model with this routing: everything that routing compares is kept, the model is small.

    Args:
        moe: router, experts, experts per token, capacity and groups are used as they are; `allow_leak` is ignored.
        sequence_length: S of training.
        seed: of weights, tokens and probes.

    Returns:
        The verdicts.

    Raises:
        ConfigError: the routing does not fit the sequence length.
        ValueError: the probes have no power, or the model is not deterministic.
    """
    moe = replace(moe, allow_leak=True)
    check_routing(moe, sequence_length, moe.group_sequences)
    rows, length = probe_shape(moe, sequence_length)
    generator = torch.Generator().manual_seed(seed)
    small = replace(moe, expert_width=PROBE_EXPERT_WIDTH, shared_width=0, backend="reference")
    model = build_model(PROBE_MODEL, small, seed)
    _sharpen(model, generator)
    size = (2, rows, length)
    for token_BS in torch.randint(PROBE_MODEL.vocabulary_size, size, generator=generator):
        calibrate(model, token_BS)
    token_BS, other_BS = torch.randint(PROBE_MODEL.vocabulary_size, size, generator=generator)
    verdicts = certify_model(model, token_BS, other_BS, generator)
    verdicts.notes.append(
        f"untrained: {PROBE_MODEL.layers} layers of width {PROBE_MODEL.width}, experts of width {PROBE_EXPERT_WIDTH}, "
        f"{PROBE_MODEL.vocabulary_size} token ids, random text"
    )
    if length < sequence_length:
        verdicts.notes.append(f"sequences cut from {sequence_length} to {length} tokens, which no routing group spans")
    return verdicts


def certify_model(model: Transformer, token_BS: Tensor, other_BS: Tensor, generator: torch.Generator) -> Verdicts:
    """Audit a model as it is.

    Args:
        model: in fp32 on the reference backend. Its buffers are left as they were.
        token_BS: int64 ids; B is a multiple of the routing group's sequences.
        other_BS: ids of the same shape to put in their place.
        generator: chooses rows and positions.

    Raises:
        ValueError: the probes have no power, or the model is not deterministic.
    """
    rows, length = token_BS.shape
    if length < 2:
        raise ValueError("a sequence of 1 token has no future to see: raise training.sequence_length")
    moe = model.moe_config
    # Every resampled token differs: text repeats itself.
    other_BS = torch.where(other_BS == token_BS, (other_BS + 1) % model.config.vocabulary_size, other_BS)
    audits = [_audit(model, token_BS, other_BS, way, generator) for way in ways(moe)]

    def worst(training: bool) -> Verdict:
        return max((a.verdict for a in audits if a.training == training), key=RANK.__getitem__)

    declared = ROUTERS[moe.router].evaluation(moe)
    found = Verdicts(audits, worst(True), worst(False), moe.training_verdict, declared, rows, length)
    if moe.capacity_factor is not None and not any(audit.dropped for audit in audits):
        found.notes.append(f"moe.capacity_factor = {moe.capacity_factor} dropped nothing here: dropping was not tested")
    return found


def ways(moe: MoEConfig) -> list[Way]:
    """Every way in which a model of this configuration routes, in training and out of it."""
    switches = "threshold_after" in ROUTERS[moe.router].reads
    training = [Way("training", "train", False, True), Way("training, no state kept", "train_router", False, True)]
    if switches and moe.threshold_after == 0:
        training = []
    if switches and moe.threshold_after < 1:
        training.append(Way("training, threshold phase", "train", True, True))
    return [*training, Way("evaluation", "causal", False, False)]


def probe_shape(moe: MoEConfig, sequence_length: int) -> tuple[int, int]:
    """(B, S) of the audits: whole routing groups as in training.

    Long sequences are cut only where no group spans what is cut off. Two groups are probed where that is affordable,
    so that a router that looks beyond its group is noticed, and never fewer than two rows.
    """
    length = sequence_length
    if moe.group == "position":
        length = min(length, 64)
    elif moe.group == "chunk":
        length = min(length, max(1, 256 // moe.chunk_length) * moe.chunk_length)
    groups = 2 if 2 * moe.group_sequences * length <= MOST_TOKENS else 1
    return max(2, groups * moe.group_sequences), length


def calibrate(model: Transformer, token_BS: Tensor) -> None:
    """Let cutoffs, biases and the like come from data: one step of balance, none of learning."""
    rows, length = token_BS.shape
    with torch.no_grad():
        model(token_BS, RoutingContext(rows, length, mode="train"))
    model.after_step()


def information_bound(moe: MoEConfig, layers: int) -> float | None:
    """A4: bits a token that jointly chosen routes can carry at most: N * H(R) * L.

    N experts, R = c / N the share of tokens each takes, H the binary entropy: the limit of (N / T) log2 C(T, R T) for
    large groups T, which it bounds from above (Wang et al. 2024, arXiv 2408.15664, section 5.2 and appendix D). 16
    experts, 2 a token, 9 layers: 78.3.

    Args:
        moe: N and c.
        layers: L, mixture layers.

    Returns:
        None for soft mixtures, whose weights are real numbers, and for a model without experts.
    """
    if moe.router in ("soft", "dense"):
        return None
    share = moe.assignments_per_token / moe.num_experts
    if share >= 1:  # everyone is taken, which tells nothing
        return 0.0
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return moe.num_experts * entropy * layers


def count_moe_layers(model: ModelConfig, moe: MoEConfig) -> int:
    """Layers with experts."""
    return sum(is_moe_layer(model, index) for index in range(model.layers)) if moe.is_moe else 0


@torch.no_grad()
def _sharpen(model: Transformer, generator: torch.Generator) -> None:
    """Random models prefer nothing: larger weights make their choices matter, and nothing may start from a constant."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
        if parameter.dim() > 1:
            parameter.mul_(2)


def _audit(model: Transformer, token_BS: Tensor, other_BS: Tensor, way: Way, generator: torch.Generator) -> Audit:
    """All probes of one way of routing."""
    audit = Audit(way.name, way.training)
    base = _look(model, token_BS, way)
    audit.dropped = base.dropped
    if any(_differs(base, _look(model, token_BS, way))):
        raise ValueError(f"{way.name}: the same batch gave other bits the second time, so changes would prove nothing")
    if not base.routes:
        audit.moved = None
    power = False
    for row, start in _suffixes(token_BS.shape, generator):
        changed_BS = token_BS.clone()
        changed_BS[row, start:] = other_BS[row, start:]
        look = _look(model, changed_BS, way)
        place = f"tokens {start} on of row {row} changed"
        audit.suffix_probes += 1
        audit.leaks += _note(audit, base, look, (slice(row, row + 1), slice(0, start)), place)
        power |= _moved(audit, base, look, (slice(row, row + 1), slice(start, None)))
        audit.moved_before += _count(base, look, (slice(row, row + 1), slice(0, start)))
    for row in _kept_rows(len(token_BS), generator):
        changed_BS = other_BS.clone()
        changed_BS[row] = token_BS[row]
        look = _look(model, changed_BS, way)
        audit.row_probes += 1
        audit.batch_dependent += _note(audit, base, look, (slice(row, row + 1), slice(None)), f"row {row} kept")
    if not power:
        raise ValueError(
            f"{way.name}: the probe has no power: no route, weight or output changed even where the tokens did, so an "
            "unchanged past is no evidence; audit a model whose routing depends on its input"
        )
    return audit


def _suffixes(shape: torch.Size, generator: torch.Generator) -> Iterator[tuple[int, int]]:
    """(row, first resampled position): the last token alone, all but the first, and random ones in between."""
    rows, length = shape
    starts = [length - 1, 1, *torch.randint(1, length, (SUFFIX_PROBES - 2,), generator=generator).tolist()]
    for start in starts:
        yield int(torch.randint(rows, (), generator=generator)), start


def _kept_rows(rows: int, generator: torch.Generator) -> list[int]:
    """The last row, which others of its group precede; the first, which they follow; and a random one."""
    middle = 1 + int(torch.randint(rows - 2, (), generator=generator)) if rows > 2 else 0
    return sorted({0, middle, rows - 1}, reverse=True)


def _note(audit: Audit, base: _Look, look: _Look, place: tuple[slice, slice], what: str) -> bool:
    """Whether a bit changed at a place that must not change; the first such finding is kept in words."""
    changed = next(_differs(base, look, place), None)
    if changed and not audit.first:
        audit.first = f"{changed} ({what})"
    return changed is not None


def _differs(base: _Look, look: _Look, place: tuple[slice, ...] = (slice(None),)) -> Iterator[str]:
    """Names of what is not bit-equal, in the order of the model. NaN equals itself here."""
    for name, tensor in base.seen.items():
        a, b = tensor[place], look.seen[name][place]
        if not torch.equal(a, b) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
            yield name


def _moved(audit: Audit, base: _Look, look: _Look, place: tuple[slice, slice]) -> bool:
    """Count the decisions that changed; whether anything of the mixture layers did."""
    if audit.moved is not None:
        audit.moved += _count(base, look, place)
    wanted = ("routes", "weights") if base.routes else ("output", "logits")
    return any(name.startswith(wanted) for name in _differs(base, look, place))


def _count(base: _Look, look: _Look, place: tuple[slice, slice]) -> int:
    return sum(int((base.seen[name][place] != look.seen[name][place]).sum()) for name in base.routes)


@torch.no_grad()
def _look(model: Transformer, token_BS: Tensor, way: Way) -> _Look:
    """Run the model once and leave its state as it was."""
    batch, length = token_BS.shape
    look = _Look()

    def observe(layer: int, routing: Routing) -> None:
        look.seen[f"routes of layer {layer}"] = routing.assigned_TE().view(batch, length, -1)
        look.seen[f"weights of layer {layer}"] = routing.weight_TE().view(batch, length, -1)
        look.dropped += int(routing.dropped())

    context = RoutingContext(batch, length, mode=way.mode, threshold_phase=way.threshold_phase, observe=observe)
    with _same_state(model), _outputs(model, look):
        look.seen["logits"] = model(token_BS, context)
    return look


@contextmanager
def _same_state(model: nn.Module) -> Iterator[None]:
    """Put every buffer back: what a pass records must not reach the next one."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


@contextmanager
def _outputs(model: Transformer, look: _Look) -> Iterator[None]:
    """Keep what each block's feed-forward, with or without experts, adds to the residual stream."""

    def keep(index: str, output_BSD: Tensor) -> None:
        look.seen[f"output of layer {index}"] = output_BSD

    handles = [
        model.get_submodule(f"blocks.{index}.feed_forward").register_forward_hook(
            lambda module, given, output, index=index: keep(index, output)
        )
        for index in model.blocks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
