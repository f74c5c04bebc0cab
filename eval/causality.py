"""Which routers can be trusted: a certificate of causality for a run or a configuration.

    python -m eval.causality RUN
    python -m eval.causality CONFIG.toml [--moe.group chunk ...]
    python -m eval.causality --all

prints the audits A1 to A6 and two verdicts, one for the training router and one for the evaluation router: causal,
batch-dependent (other sequences of the batch matter, the future does not) or leaks. The verdicts are measured, never
read from the registry. A run is audited with its own weights on its held-out text, its leak is measured in bits, and
RUN/eval/causality.json is written. A configuration is audited with a small untrained model. `--all` prints the
measured verdicts of every router and policy as a Markdown table.

Exit status: 0 certified; 1 an error, or a router that sees more than it declares; 2 wrong usage; 3 the evaluation
router is not causal, or the training router needs `moe.allow_leak` and lacks it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from data.atomic import write_atomically
from eval.canary import STEPS
from eval.causality_certificate import PAIRS, Certificate, certify_config, certify_run
from eval.causality_presets import markdown_table
from eval.causality_report import audit_table, notes, to_json, verdict_lines
from eval.command import run_command, terminal
from moe.config import ConfigError
from training.config import Config
from training.load_config import load_config
from training.run import Run, RunError

EXIT_NOT_CAUSAL = 3
PROGRAM = "python -m eval.causality"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; raises SystemExit with the status where that is not 0."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Certify which routers see the future. Keys of a configuration can be set as in train.py "
        "(--section.key value).",
        allow_abbrev=False,
    )
    parser.add_argument("target", nargs="?", help="a run's folder, or a configuration (.toml)")
    parser.add_argument(
        "--all", action="store_true", help="print the table of every router and policy, and nothing else"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    parser.add_argument("--canary-steps", type=int, default=STEPS, help=f"0 skips the canary (default {STEPS})")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help=f"draws of the leak in bits, runs only (default {PAIRS})"
    )
    options, overrides = parser.parse_known_args(arguments)
    if options.pairs < 2:
        raise ValueError(f"--pairs {options.pairs}: must be at least 2, or there is no standard error")
    if options.json and options.json.is_dir():
        raise ValueError(f"--json {options.json}: is a folder; name a file in it")
    if options.all == (options.target is not None):
        parser.error("give a run or a configuration, or --all")
    if options.all:
        if overrides or options.json:
            parser.error(f"--all takes nothing else: {' '.join([*overrides, *(['--json'] if options.json else [])])}")
        print(markdown_table())
        return
    console = terminal(160)
    target = Path(options.target)
    with console.status("opening") as status:
        if target.is_dir():
            if overrides:
                parser.error(f"{target} is a run, whose configuration is fixed: {' '.join(overrides)}")
            path = target / "config.toml"
            if not path.is_file():
                raise RunError(f"{target}: not a run folder (no config.toml); give a run's folder or a configuration")
            config, allow_leak = load([str(path)])
            run = Run(target, config)
            certificate = certify_run(run, allow_leak, options.canary_steps, options.pairs, status.update)
        else:
            config, allow_leak = load([str(target), *overrides])
            certificate = certify_config(config, allow_leak, str(target), options.canary_steps, status.update)
    console.print(audit_table(certificate))
    for note in notes(certificate):
        console.print(note, style="dim", highlight=False)
    for line in verdict_lines(certificate):
        console.print(line, style="bold", highlight=False, soft_wrap=True)
    written = [*([target / "eval" / "causality.json"] if target.is_dir() else []), options.json]
    write(certificate, written)
    for file in filter(None, written):
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    certificate.require_honest_registry()
    if not certificate.certified:
        sys.exit(EXIT_NOT_CAUSAL)


def load(arguments: list[str]) -> tuple[Config, bool]:
    """Read a configuration also where it is refused for lack of `moe.allow_leak`.

    Args:
        arguments: CONFIG.toml [--section.key value ...].

    Returns:
        The configuration, with `moe.allow_leak` set if it must be, and whether it was given.

    Raises:
        ConfigError: anything else is wrong with it.
    """
    try:
        config = load_config(arguments, PROGRAM)
    except ConfigError:
        return load_config([*arguments, "--moe.allow-leak"], PROGRAM), False
    return config, config.moe.allow_leak


def write(certificate: Certificate, paths: Sequence[Path | None]) -> None:
    """Write the findings to each path, complete or not at all."""
    content = (json.dumps(to_json(certificate), indent=1) + "\n").encode()
    for path in paths:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as file:
                file.write(content)


if __name__ == "__main__":
    run_command(main)
