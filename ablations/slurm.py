"""An ablation as a Slurm array: one task a run, and a command that makes the table when all are done."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def sbatch_script(name: str, jobs: int, arguments: Sequence[str], threads: int) -> str:
    """The script; what it asks for besides is for its user to add.

    Args:
        name: of the ablation.
        jobs: runs.
        arguments: of `python -m ablations.run`, without --slurm.
        threads: CPUs of a task.
    """
    command = shlex.join(["python", "-m", "ablations.run", *arguments])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Submit from the repository's root, with its environment active. When all tasks are done:",
            f"#   {command} --collect",
            f"#SBATCH --job-name=ablation-{name}",
            f"#SBATCH --array=0-{jobs - 1}",
            "#SBATCH --ntasks=1",
            f"#SBATCH --cpus-per-task={threads}",
            "#SBATCH --time=01:00:00",
            "#SBATCH --requeue",
            "# Before its time is over a run saves and stops; submitted again, the array does what is left.",
            "#SBATCH --signal=USR1@120",
            f"#SBATCH --output=ablation-{name}-%a.log",
            "set -euo pipefail",
            'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"',
            f'srun {command} --threads "$SLURM_CPUS_PER_TASK" --job "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )
