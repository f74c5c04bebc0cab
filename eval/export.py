"""Interchange with transformers (docs/interchange.md).

    python -m eval.export RUN --to hf [--family olmoe|mixtral|qwen3_moe|choir] [--output DIR]
    python -m eval.export FOLDER --from hf --to-run RUN [--corpus CORPUS] [--training.steps N ...]

The first writes a run as a checkpoint that `AutoModelForCausalLM.from_pretrained` reads, tokenizer included. The second
makes a run at step 0 of such a checkpoint; further flags are those of train.py, for training it further.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.command import run_command
from eval.interchange.families import EXPORTABLE
from training.run import Run


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.export",
        description="Write a run as a checkpoint of transformers, or make a run of one.",
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, help="the run's folder; with --from hf the checkpoint's")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to", choices=("hf",), help="export to transformers")
    direction.add_argument("--from", choices=("hf",), dest="origin", help="import from transformers")
    parser.add_argument("--family", choices=EXPORTABLE, help="--to: the model to write (default: the one that fits)")
    parser.add_argument("--output", type=Path, help="--to: the folder to make (default RUN/hf)")
    parser.add_argument("--overwrite", action="store_true", help="--to: replace an earlier export")
    parser.add_argument("--no-tokenizer", action="store_true", help="--to: weights only; needs no corpus")
    parser.add_argument("--no-check", action="store_true", help="--to: do not read the result back to compare logits")
    parser.add_argument("--to-run", type=Path, help="--from: the run's folder to make")
    parser.add_argument("--corpus", type=Path, help="--from: prepared corpus with the checkpoint's vocabulary")
    options, rest = parser.parse_known_args(arguments)
    _refuse_of_other_direction(parser, options, rest)
    if options.to:
        # Only what is used is imported, so that a wrong flag fails at once.
        from eval.interchange.to_hf import export

        output = options.output or options.source / "hf"
        run = Run.open(options.source)
        family = export(
            run, output, options.family, not options.no_tokenizer, not options.no_check, options.overwrite, log=print
        )
        remote = ", trust_remote_code=True" if family == "choir" else ""
        print(f'wrote {output}: AutoModelForCausalLM.from_pretrained("{output}"{remote})')
        return
    from eval.interchange.from_hf import import_checkpoint

    run = import_checkpoint(options.source, options.to_run, options.corpus, rest, log=print)
    print(f"wrote {run.folder}, a run at step 0")
    if options.corpus is None:
        print("it has no corpus: Run.open(...).model() takes token ids; --corpus names one to evaluate and train on")
    else:
        print(f"train it further: python train.py {run.folder}/config.toml --run.resume auto")


def _refuse_of_other_direction(parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]) -> None:
    """A flag that would do nothing is an error."""
    if options.to:
        useless = [flag for flag, value in (("--to-run", options.to_run), ("--corpus", options.corpus)) if value]
        useless += rest
    else:
        useless = [
            f"--{key.replace('_', '-')}"
            for key in ("family", "output", "overwrite", "no_tokenizer", "no_check")
            if getattr(options, key)
        ]
        if options.to_run is None:
            parser.error("--from hf needs --to-run RUN, the run's folder to make")
    if useless:
        parser.error(f"{' '.join(useless)}: no flag of --{'to' if options.to else 'from'} hf")


if __name__ == "__main__":
    run_command(main)
