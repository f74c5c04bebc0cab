"""A certificate of causality as a table, as two verdicts, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from eval.canary import PROOF, VOCABULARY, Canary
from eval.causality_audits import RANK
from eval.causality_certificate import Certificate
from eval.leak import Estimate

FORMAT_VERSION = 1


def audit_table(certificate: Certificate) -> Table:
    """A1 to A6."""
    made = Table(title=f"Causality of {certificate.target}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("audit", "of", "found"):
        made.add_column(column)
    for row in audit_rows(certificate):
        made.add_row(*row)
    return made


def audit_rows(certificate: Certificate) -> list[tuple[str, str, str]]:
    """(audit, what it is of, what was found)."""
    rows = []
    for audit in certificate.verdicts.audits:
        moved = "" if audit.moved is None else f"; {audit.moved:,} later decisions moved"
        found = f"past changed in {audit.leaks} of {audit.suffix_probes} probes{moved}"
        if audit.leaks:
            found += f"; first: {audit.first}"
        rows.append(("A1 end of a row resampled", audit.way, found))
    for audit in certificate.verdicts.audits:
        found = f"row changed in {audit.batch_dependent} of {audit.row_probes} probes"
        if audit.batch_dependent and not audit.leaks:
            found += f"; first: {audit.first}"
        rows.append(("A2 other rows resampled", audit.way, found))
    leak = certificate.leak
    if isinstance(leak, str):
        rows.append(("A3 leak", "training", leak))
    else:
        found = f"{_estimate(leak.leak)} bits a token{_per_byte(leak.per_byte(leak.leak))}, {leak.leak.draws} draws"
        rows.append(("A3 leak", "training", found))
    bound = certificate.bound
    rows.append(
        ("A4 bound N H(R) L", "routing at c a token", "none" if bound is None else f"{bound:.1f} bits a token at most")
    )
    rows.append(("A5 canary", "training", _canary(certificate.canary)))
    if isinstance(leak, str):
        rows.append(("A6 gap, not a leak", "evaluation minus training", leak))
    else:
        found = (
            f"{leak.gap.mean:+.4f} ± {leak.gap.standard_error:.4f} bits a token{_per_byte(leak.per_byte(leak.gap))}: "
            f"causal {leak.causal_bits:.4f}, training router {leak.native_bits:.4f}"
        )
        rows.append(("A6 gap, not a leak", "evaluation minus training", found))
    return rows


def verdict_lines(certificate: Certificate) -> list[str]:
    """The two verdicts, and what follows from them."""
    moe, verdicts, leak = certificate.config.moe, certificate.verdicts, certificate.leak
    training = [audit for audit in verdicts.audits if audit.training]
    line = f"training router ({moe.router}): {certificate.training}"
    if certificate.training == "leaks":
        if not isinstance(leak, str):
            line += f", {_estimate(leak.leak)} bits a token"
        line += "; its losses are never a result"
    elif RANK[certificate.training] < RANK[verdicts.declared_training]:
        probes = sum(audit.suffix_probes + audit.row_probes for audit in training)
        line += f"; declared {verdicts.declared_training}, which {probes} probes did not see"
    lines = [line]
    if certificate.lacks_allow_leak:
        lines.append("training with it is refused: it needs moe.allow_leak = true and lacks it")
    line = f"evaluation router: {verdicts.evaluation}"
    if verdicts.evaluation != "causal":
        line += "; what it scores is no likelihood of a text read from left to right"
    return [*lines, line]


def to_json(certificate: Certificate) -> dict[str, Any]:
    """Plain data."""
    verdicts, leak, canary = certificate.verdicts, certificate.leak, certificate.canary
    measured = None
    if not isinstance(leak, str):
        measured = {
            "bits_per_token": asdict(leak.leak),
            "bits_per_byte": _optional(leak.per_byte(leak.leak)),
        }
    gap = None
    if not isinstance(leak, str):
        gap = {
            "bits_per_token": asdict(leak.gap),
            "bits_per_byte": _optional(leak.per_byte(leak.gap)),
            "causal_bits_per_token": leak.causal_bits,
            "noncausal_training_router_bits_per_token": leak.native_bits,
        }
    return {
        "format_version": FORMAT_VERSION,
        "target": certificate.target,
        "step": certificate.step,
        "router": certificate.config.moe.router,
        "training": {"measured": certificate.training, "declared": verdicts.declared_training},
        "evaluation": {"measured": verdicts.evaluation, "declared": verdicts.declared_evaluation},
        "allow_leak": certificate.allow_leak,
        "lacks_allow_leak": certificate.lacks_allow_leak,
        "certified": certificate.certified,
        "audits": [{**asdict(audit), "verdict": audit.verdict} for audit in verdicts.audits],
        "rows": verdicts.rows,
        "length": verdicts.length,
        "leak": measured,
        "not_measured": leak if isinstance(leak, str) else None,
        "bound_bits_per_token": certificate.bound,
        "canary": None if canary is None else {**asdict(canary), "z": canary.z, "proves_leak": canary.proves_leak},
        "gap": gap,
        "notes": notes(certificate),
    }


def notes(certificate: Certificate) -> list[str]:
    """What was done otherwise than in training."""
    canary = certificate.canary
    return certificate.verdicts.notes + ([] if canary is None else [f"canary: {note}" for note in canary.notes])


def _canary(canary: Canary | None) -> str:
    if canary is None:
        return "skipped"
    if canary.proves_leak:
        meaning = "a leak is proved"
    elif canary.z > -PROOF:
        meaning = "not converged, says nothing; more --canary-steps"
    else:
        meaning = f"no proof (that takes z < {PROOF:g}); small leaks are A1's to find"
    return (
        f"{canary.loss:.4f} ± {canary.standard_error:.4f} nats a token on random tokens, ln {VOCABULARY} = "
        f"{canary.floor:.4f}, z = {canary.z:+.1f} after {canary.steps} steps: {meaning}; causal routing "
        f"{canary.causal_loss:.4f}"
    )


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.mean:.4f} ± {estimate.standard_error:.4f}"


def _per_byte(estimate: Estimate | None) -> str:
    return "" if estimate is None else f", {_estimate(estimate)} a byte"


def _optional(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else asdict(estimate)
