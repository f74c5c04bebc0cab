"""A run's folder: made by train.py, read by everything else.

`config.toml` (resolved), `environment.json` (versions, commit, corpus), `metrics.jsonl` (one line a step),
`routing/steps.jsonl` (what the routers did), `tb/`, `checkpoints/`, `eval/`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from data.atomic import write_atomically
from data.corpus import Corpus
from moe.initialization import build_model
from moe.model import Transformer
from training.checkpoint import MODEL, Checkpoint, load_model, newest_checkpoint
from training.config import Config
from training.device import choose_device, compute_dtype
from training.job import Job
from training.load_config import config_from_dict, config_to_toml, differences, read_toml

fcntl: Any = None
with contextlib.suppress(ImportError):  # not on Windows, where nothing keeps a second process off
    fcntl = importlib.import_module("fcntl")

SEE_S = 30.0  # after which a network file system shows on one machine what another wrote


class RunError(RuntimeError):
    """A run folder that is missing, incomplete or taken."""


class Run:
    """A run on disk.

    Attributes:
        folder: the run's folder.
        config: as trained.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.config = config

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a finished or interrupted run.

        Raises:
            RunError: if there is none.
        """
        folder = Path(folder)
        path = folder / "config.toml"
        if not path.is_file():
            raise RunError(f"{folder}: not a run folder (no config.toml); train.py makes one, e.g. runs/quickstart")
        return cls(folder, config_from_dict(read_toml(path), str(path)))

    @classmethod
    def create(cls, config: Config, job: Job) -> tuple[Run, Checkpoint | None]:
        """Make the folder of a new run, or continue an existing one; the main process does it for all.

        Returns:
            The run, and the checkpoint to continue from.

        Raises:
            RunError: if the folder exists and may not be continued, and nothing is changed then; or if some process
                does not see it.
        """
        run = cls(Path(config.run.folder) / config.run.name, config)
        checkpoint, token = job.on_main(lambda: (run._create(), run._sign()))
        blind = [rank for rank, sees in enumerate(job.gather(run._sees(token))) if not sees]
        if blind:
            raise RunError(
                f"{run.folder.absolute()}: processes {blind} do not see what process 0 wrote there; each writes its "
                "part of a checkpoint, so put --run.folder on a file system that all machines share"
            )
        return run, checkpoint

    def _sign(self) -> str:
        token = uuid.uuid4().hex
        (self.folder / ".lock").write_text(token)
        return token

    def _sees(self, token: str) -> bool:
        deadline = time.monotonic() + SEE_S
        while True:
            with contextlib.suppress(OSError):
                if (self.folder / ".lock").read_text() == token:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def _create(self) -> Checkpoint | None:
        folder, config = self.folder, self.config
        folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        # A hidden file is a lock, or what a kill left of an unfinished write: not a run.
        if not any(path for path in folder.iterdir() if not path.name.startswith(".")):
            self._write_config()
            return None
        existing = self.open(folder).config
        changed = differences(existing, config, ignore=("run", "eval", "log", "parallel"))
        if existing.run.seed != config.run.seed:
            changed.append(f"run.seed: {existing.run.seed} -> {config.run.seed}")
        if changed:
            raise RunError(
                f"{folder} holds a run with another configuration ({'; '.join(changed)}): choose another --run.name, "
                "or remove the folder"
            )
        if config.run.resume != "auto" and (self.metrics() or self.checkpoints.exists()):
            raise RunError(
                f"{folder} exists: continue it with --run.resume auto, choose another --run.name, or remove the folder"
            )
        checkpoint = newest_checkpoint(self.checkpoints)
        self._write_config()
        return checkpoint

    def _lock(self) -> None:
        """Keep other processes off the folder while this one lives; the system releases it, whatever the end."""
        if fcntl is None:
            return
        self._lock_file = (self.folder / ".lock").open("a")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.folder}: another process is training this run; wait for it, or choose another --run.name"
            raise RunError(message) from None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.folder / "checkpoints"

    def corpus(self) -> Corpus:
        """The corpus the run was trained on.

        Raises:
            RunError: if the folder holds another one by now.
        """
        corpus = Corpus.open(self.config.data.corpus)
        corpus.require_model_vocabulary(self.config.model.vocabulary_size)
        self.require_same_corpus(corpus)
        return corpus

    def require_same_corpus(self, corpus: Corpus) -> None:
        """Refuse a corpus other than the one the run began with."""
        path = self.folder / "environment.json"
        recorded = json.loads(path.read_text(encoding="utf-8")).get("corpus_sha256") if path.is_file() else None
        if recorded is not None and recorded != corpus.sha256:
            raise RunError(
                f"{self.config.data.corpus} is not the corpus of this run (sha256 {corpus.sha256[:12]}, the run read "
                f"{recorded[:12]}): rebuild that corpus or train anew"
            )

    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint, its model's files checked.

        Raises:
            RunError: if nothing has been saved yet.
        """
        checkpoint = newest_checkpoint(self.checkpoints, parts=(MODEL,))
        if checkpoint is None:
            raise RunError(f"{self.folder}: no checkpoint yet; train further with --run.resume auto")
        return checkpoint

    def model(self, device: str = "auto", checkpoint: Checkpoint | None = None) -> Transformer:
        """The model of a checkpoint; of the newest one where none is given."""
        config, where = self.config, choose_device(device)
        dtype = compute_dtype(config.training.precision, where)
        model = build_model(config.model, config.moe, config.run.seed, where, dtype)
        load_model(checkpoint or self.checkpoint(), [model])
        return model.eval()

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, a dictionary a step."""
        return read_json_lines(self.folder / "metrics.jsonl")

    def routing_records(self) -> list[dict[str, Any]]:
        """Lines of routing/steps.jsonl: "step", "threshold_phase", and what `training/routing_telemetry.py` defines."""
        return read_json_lines(self.folder / "routing" / "steps.jsonl")

    def write_environment(self, corpus: Corpus | None) -> None:
        """Record what the numbers depend on besides the configuration; without a corpus, none is required later."""
        packages = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "einops")
        environment = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: importlib.metadata.version(name) for name in packages},
            "commit": _commit(),
            "command": sys.argv,
            "threads": torch.get_num_threads(),
            "corpus_sha256": None if corpus is None else corpus.sha256,
        }
        with write_atomically(self.folder / "environment.json") as file:
            file.write(json.dumps(environment, indent=1).encode())

    def _write_config(self) -> None:
        with write_atomically(self.folder / "config.toml") as file:
            file.write(config_to_toml(self.config).encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSON-lines file; a last line that a crash cut off is left out. Empty where no file is."""
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number}: not JSON ({error}); mend or remove the line") from None
    return records


def _commit() -> str | None:
    """The source tree's git commit, where it is a checkout."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
