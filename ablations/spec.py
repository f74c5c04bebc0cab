"""An ablation as a TOML file: one question, the arms that answer it, and what would count as an answer.

    question = "Does a shared expert help?"      # in words
    base = "base.toml"                           # a configuration, beside this file or from the working folder
    baseline = "none"                            # the arm that the others are compared with
    seeds = 5

    [budget]
    rule = "flops"                               # or "tokens", "active_parameters": see ablations/budget.py

    [overrides]                                  # of the base, for all arms
    moe.router = "token_choice"

    [arms.none]                                  # an arm is what it changes
    [arms."shared 128"]
    moe = { shared_width = 128, experts_per_token = 1 }

    [grid]                                       # every combination; with arms, of every arm
    "moe.num_experts" = [8, 16]

    [[claims]]                                   # decided by the numbers: see ablations/claims.py
    says = "a shared expert helps"
    arm_better_than = ["shared 128", "none"]

Everything is checked before anything runs; a misspelt key is an error that names the right one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablations.budget import Budget
from ablations.claims import Claim
from moe.config import ConfigError, require
from training.config import Config
from training.load_config import checked_values, config_from_dict, read_toml

# What every arm must share: otherwise the held-out text, or the order of the data, would not be the same for all.
SHARED = ("data.corpus", "training.sequence_length", "eval.final_tokens", "run.seed", "data.mixture_exponent")


@dataclass(frozen=True)
class Halving:
    """Successive halving, for `python -m ablations.search`.

    Attributes:
        rungs: shares of a whole run at which arms are compared, rising, the last 1.
        keep: share of the arms that go on from each rung, rounded up.
    """

    rungs: tuple[float, ...] = (0.25, 0.5, 1.0)
    keep: float = 0.5

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in itertools.pairwise(self.rungs))
        require(
            bool(self.rungs) and rising and self.rungs[0] > 0 and self.rungs[-1] == 1,
            f"halving.rungs = {list(self.rungs)}: must rise from above 0 to 1.0, the whole run",
        )
        require(0 < self.keep < 1, f"halving.keep = {self.keep}: must be above 0 and below 1")


@dataclass(frozen=True)
class _File:
    """Keys of the TOML file, with the types that it gives them."""

    question: str = ""
    base: str = ""
    baseline: str = ""
    seeds: int = 3
    first_seed: int = 0
    leak_pairs: int = 0
    budget: dict = field(default_factory=dict)
    overrides: dict = field(default_factory=dict)
    arms: dict = field(default_factory=dict)
    grid: dict = field(default_factory=dict)
    claims: list = field(default_factory=list)
    halving: dict | None = None


@dataclass(frozen=True)
class Arm:
    """One way of doing it.

    Attributes:
        name: as in tables.
        config: of its runs; `run` is filled in for each seed.
        changes: of the base, as "section.key: value", sorted.
    """

    name: str
    config: Config
    changes: dict[str, Any]

    @property
    def slug(self) -> str:
        """The name as part of a folder's."""
        return re.sub(r"[^a-z0-9.=]+", "-", self.name.lower()).strip("-.")


@dataclass(frozen=True)
class Ablation:
    """A checked ablation.

    Attributes:
        name: of its file.
        path: of its file.
        question: in words.
        arms: in the order of the file; the steps are already those of the budget.
        baseline: name of the arm that the others are compared with.
        seeds: how many.
        first_seed: the first of them.
        budget: what the arms have in common.
        claims: to be decided.
        leak_pairs: pairs of batches for the leak in bits of each run; 0 measures none.
        halving: of a search; None in an ablation.
        quick: shrunken to see that it works; the numbers mean nothing.
    """

    name: str
    path: Path
    question: str
    arms: tuple[Arm, ...]
    baseline: str
    seeds: int
    first_seed: int
    budget: Budget
    claims: tuple[Claim, ...]
    leak_pairs: int = 0
    halving: Halving | None = None
    quick: bool = False

    @property
    def seed_list(self) -> list[int]:
        """The seeds of every arm."""
        return list(range(self.first_seed, self.first_seed + self.seeds))

    def arm(self, name: str) -> Arm:
        """An arm by its name."""
        return next(arm for arm in self.arms if arm.name == name)


def load_ablation(path: Path) -> Ablation:
    """Read and check an ablation.

    Raises:
        ConfigError: for anything wrong in it; names the arm and the key.
    """
    given = read_toml(path)
    file = _File(**checked_values(_File, given, "", str(path)))
    for key in ("question", "base", "baseline"):
        require(key in given, f"{path}: {key} is missing")
    require(file.seeds >= 1, f"{path}: seeds = {file.seeds}: must be at least 1")
    require(file.first_seed >= 0, f"{path}: first_seed = {file.first_seed}: must be 0 or more")
    require(file.leak_pairs == 0 or file.leak_pairs >= 2, f"{path}: leak_pairs = {file.leak_pairs}: must be 0 or >= 2")
    budget = Budget(**checked_values(Budget, file.budget, "budget.", str(path)))
    halving = None if file.halving is None else _halving(file.halving, path)
    arms = _arms(file, path)
    _require_comparable(arms, path)
    names = [arm.name for arm in arms]
    require(file.baseline in names, f"{path}: baseline = {file.baseline!r}: must be an arm: {', '.join(names)}")
    configs = budget.enforce({arm.name: arm.config for arm in arms}, file.baseline, str(path))
    arms = [dataclasses.replace(arm, config=configs[arm.name]) for arm in arms]
    claims = tuple(Claim.from_dict(values, names, bool(file.leak_pairs), str(path)) for values in file.claims)
    return Ablation(
        path.stem,
        path,
        file.question.strip(),
        tuple(arms),
        file.baseline,
        file.seeds,
        file.first_seed,
        budget,
        claims,
        file.leak_pairs,
        halving,
    )


def shrink(ablation: Ablation, steps: int = 6, seeds: int = 2) -> Ablation:
    """The same ablation in a few seconds a run: shows that it works, and nothing else."""

    def config(old: Config) -> Config:
        training = dataclasses.replace(old.training, steps=steps, warmup_steps=min(old.training.warmup_steps, 2))
        evaluation = dataclasses.replace(old.eval, every=0, tokens=512, final_tokens=512)
        log = dataclasses.replace(old.log, every=1)
        return dataclasses.replace(old, training=training, eval=evaluation, log=log)

    return dataclasses.replace(
        ablation,
        arms=tuple(dataclasses.replace(arm, config=config(arm.config)) for arm in ablation.arms),
        seeds=min(seeds, ablation.seeds),
        leak_pairs=min(2, ablation.leak_pairs),
        quick=True,
    )


def _halving(given: dict[str, Any], path: Path) -> Halving:
    return Halving(**checked_values(Halving, given, "halving.", str(path)))


def _arms(file: _File, path: Path) -> list[Arm]:
    """Arms times grid, each over base and overrides."""
    base_path = next((p for p in (path.parent / file.base, Path(file.base)) if p.is_file()), None)
    require(base_path is not None, f"{path}: base = {file.base!r}: no such file beside it or in the working folder")
    assert base_path is not None
    base = merge(read_toml(base_path), nested(file.overrides))
    plain = config_from_dict(base, f"{path}, base with overrides") if not (file.arms or file.grid) else None
    require(plain is None, f"{path}: give [arms.NAME] sections, or a [grid] of keys to lists of values")
    for name, arm in file.arms.items():
        require(isinstance(arm, dict), f"{path}: arms.{name} = {arm!r}: must be a section of changed keys")
    made = []
    for name, changes in file.arms.items() if file.arms else [("", {})]:
        for point in grid_points(file.grid, str(path)):
            full = " ".join(filter(None, [name, *(f"{key.split('.')[-1]}={value}" for key, value in point.items())]))
            values = merge(nested(changes), nested(point))
            where = f'{path}, arm "{full}"'
            try:
                config = config_from_dict(merge(base, values), where)
            except ConfigError as error:  # the checks of a section do not know which arm it is of
                raise ConfigError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
            made.append(Arm(full, config, dict(sorted(flat(values).items()))))
    slugs: dict[str, str] = {}
    for arm in made:
        require(bool(arm.slug), f"{path}: arm {arm.name!r}: needs a name with letters or digits")
        other = slugs.setdefault(arm.slug, arm.name)
        require(other is arm.name, f"{path}: arms {other!r} and {arm.name!r} would share the folder {arm.slug}: rename")
    return made


def _require_comparable(arms: list[Arm], path: Path) -> None:
    for key in SHARED:
        section, name = key.split(".")
        values = {arm.name: getattr(getattr(arm.config, section), name) for arm in arms}
        require(
            len(set(values.values())) == 1,
            f"{path}: {key} differs between arms ({', '.join(f'{arm}: {value}' for arm, value in values.items())}): "
            "they would not be scored on the same text, or not be trained in the same order; put it in [overrides]",
        )


def grid_points(grid: dict[str, Any], source: str) -> Iterator[dict[str, Any]]:
    """Every combination of a grid's values, by key; one empty combination where there is no grid."""
    lists = flat(nested(grid))
    for key, values in lists.items():
        require(
            isinstance(values, list) and len(values) > 0, f"{source}: grid.{key} = {values!r}: must be a list of values"
        )
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, the second over the first."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"moe.router": x} and {"moe": {"router": x}} alike as the latter."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        value = nested(value) if isinstance(value, dict) else value
        for part in reversed(key.split(".")):
            value = {part: value}
        found = merge(found, value)
    return found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"moe": {"router": x}} as {"moe.router": x}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
