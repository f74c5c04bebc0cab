"""From a TOML file and command-line flags to a checked `Config`, and back to TOML."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import tyro

from moe.config import ConfigError
from training.config import Config


def load_config(arguments: Sequence[str], program: str = "train.py") -> Config:
    """Read `CONFIG.toml [--section.key value ...]`.

    Args:
        arguments: the command line without the program's name.
        program: shown in the usage line.

    Returns:
        The checked configuration. Flags override the file, the file overrides the defaults.

    Raises:
        ConfigError: for anything wrong in the file, or for values that cannot work together.
        SystemExit: with status 2 for a bad flag (tyro prints what was meant) and 0 for --help.
    """
    arguments = list(arguments)
    base: dict[str, Any] = {}
    source = "the command line"
    if arguments and not arguments[0].startswith("-"):
        source = arguments.pop(0)
        base = read_toml(Path(source))
    # The checks that span keys must see file and flags together: a flag may mend what the file alone gets wrong.
    # So the flags are parsed over unchecked defaults first, and the checked dataclasses are built from the result.
    values = {section.name: _section_values(section, base, source) for section in dataclasses.fields(Config)}
    refuse_unknown(base, [f.name for f in dataclasses.fields(Config)], "", source)
    parsed = tyro.cli(
        _unchecked(Config),
        args=arguments,
        default=_unchecked(Config)(**{name: _unchecked(_section_type(name))(**v) for name, v in values.items()}),
        prog=f"{program} CONFIG.toml",
        description="Train one model. Every key of the TOML file is a flag; flags override the file.",
    )
    return config_from_dict(dataclasses.asdict(parsed), source)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; a `ConfigError` names the file and line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; configurations are in configs/") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def config_from_dict(values: dict[str, Any], source: str = "configuration") -> Config:
    """Build a checked `Config` from nested dictionaries, with defaults for what is missing."""
    refuse_unknown(values, [f.name for f in dataclasses.fields(Config)], "", source)
    sections = {}
    for section in dataclasses.fields(Config):
        sections[section.name] = _section_type(section.name)(**_section_values(section, values, source))
    return Config(**sections)


def config_to_toml(config: Config) -> str:
    """The configuration with all defaults resolved, as TOML; keys whose value is None are left out."""
    nested = dataclasses.asdict(config)
    present = {name: {k: v for k, v in section.items() if v is not None} for name, section in nested.items()}
    return tomli_w.dumps(present)


def config_values(config: Config, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """Values by "section.key"; `ignore` names whole sections."""
    nested = dataclasses.asdict(config)
    return {f"{s}.{key}": value for s, keys in nested.items() if s not in ignore for key, value in keys.items()}


def differences(old: Config, new: Config, ignore: Sequence[str] = ()) -> list[str]:
    """Keys in which two configurations differ, as "section.key: old -> new"; `ignore` names whole sections."""
    before, after = config_values(old, ignore), config_values(new, ignore)
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]


def _section_type(name: str) -> type:
    return typing.get_type_hints(Config)[name]


def _section_values(section: dataclasses.Field[Any], base: dict[str, Any], source: str) -> dict[str, Any]:
    """Values of one section of the file over its defaults, each checked for its type."""
    given = base.get(section.name, {})
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: {section.name} = {given!r}: must be a section, written [{section.name}]")
    cls = _section_type(section.name)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    return defaults | checked_values(cls, given, f"{section.name}.", source)


def checked_values(cls: type, given: dict[str, Any], prefix: str, source: str) -> dict[str, Any]:
    """The given values of a dataclass' fields, each known and of the type that its field is annotated with.

    Args:
        cls: the dataclass.
        given: as read from TOML.
        prefix: of the keys in messages, such as "moe.".
        source: the file, for messages.

    Raises:
        ConfigError: names the key, and the right one where it is misspelt.
    """
    hints = typing.get_type_hints(cls)
    refuse_unknown(given, [f.name for f in dataclasses.fields(cls)], prefix, source)
    return {key: _check_type(f"{prefix}{key}", value, hints[key], source) for key, value in given.items()}


def refuse_unknown(given: dict[str, Any], allowed: list[str], prefix: str, source: str) -> None:
    """A key that nothing reads is an error that names the nearest key, in any section."""
    for key in given:
        if key in allowed:
            continue
        everywhere = {f"{prefix}{name}": name for name in allowed} | {
            f"{s.name}.{f.name}": f.name
            for s in dataclasses.fields(Config)
            for f in dataclasses.fields(_section_type(s.name))
        }
        # The right name in the wrong section, and only then a misspelt one.
        full = [path for path, name in everywhere.items() if name == key]
        full += [prefix + name for name in difflib.get_close_matches(key, allowed, 1, 0.5)]
        if not full:
            close = difflib.get_close_matches(key, list(everywhere.values()), 1, 0.6)
            full = [path for path, name in everywhere.items() if close and name == close[0]]
        hint = f"did you mean {full[0]}?" if full else f"known: {', '.join(prefix + name for name in allowed)}"
        raise ConfigError(f"{source}: unknown key {prefix}{key}; {hint}")


def _check_type(key: str, value: Any, hint: Any, source: str) -> Any:
    """Match a TOML value with a field's annotation; whole numbers are accepted where a float is wanted."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            if value in typing.get_args(option) and isinstance(value, str):
                return value
        elif typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, list | tuple) and all(type(entry) is item for entry in value):
                return tuple(value)
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if abs(value) < 1e300 else value  # a longer whole number has no float
        elif option is not type(None) and type(value) is option:
            return value
        elif option is type(None) and value is None:
            return None
    raise ConfigError(f"{source}: {key} = {value!r}: must be {_describe(options)}")


def _describe(options: tuple[Any, ...]) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    parts = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            parts.append("one of " + ", ".join(repr(choice) for choice in typing.get_args(option)))
        elif typing.get_origin(option) is tuple:
            parts.append("a list of " + {int: "whole numbers", str: "texts"}[typing.get_args(option)[0]])
        elif option is not type(None):
            parts.append(names[option])
    return " or ".join(parts)


_TWINS: dict[type, type] = {}


def _unchecked(cls: type) -> type:
    """A twin of a configuration dataclass without `__post_init__`, for parsing flags before checking."""
    if cls not in _TWINS:
        hints = typing.get_type_hints(cls)
        fields: list[tuple[str, Any, Any]] = []
        for f in dataclasses.fields(cls):
            hint = hints[f.name]
            twin = _unchecked(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else hint
            default = f.default if f.default is not dataclasses.MISSING else dataclasses.MISSING
            if default is dataclasses.MISSING and twin is not hint:
                fields.append((f.name, twin, dataclasses.field(default_factory=twin)))
            else:
                fields.append((f.name, twin, dataclasses.field(default=default)))
        made = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
        made.__doc__ = cls.__doc__
        made.__module__ = cls.__module__
        _TWINS[cls] = made
    return _TWINS[cls]
