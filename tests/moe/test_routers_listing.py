"""`python -m moe.routers` says of every router what matters before choosing it."""

from __future__ import annotations

from moe.routers import ROUTERS
from moe.routers.__main__ import listing


def test_every_router_has_a_row_and_leaking_settings_have_one_of_their_own() -> None:
    """H02: drop orders and groups change what routing depends on, so they are listed apart."""
    names, training, served, static, _, _ = (list(column.cells) for column in listing().columns)
    assert [name for name in names if not str(name).startswith(" ")] == list(ROUTERS)
    rows = dict(zip([str(name) for name in names], training, strict=False))
    assert (rows["expert_choice"], rows["threshold"], rows["token_choice"]) == ("leaks", "causal", "causal")
    start = names.index("token_choice")
    assert training[start + 1 : start + 3] == ["batch-dependent", "leaks"]
    assert set(served) == {"causal"}
    assert {name for name, yes in zip(names, static, strict=True) if yes and name in ROUTERS} == {
        "expert_choice",
        "mixture_of_depths",
        "soft",
        "dense",
    }
