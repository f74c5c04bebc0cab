"""Energy and CO2 of a run: its recorded step times, times an assumed power, times the intensity of a grid.

Nothing here is measured but the time. Both other factors are assumptions that are printed with the result, which is
given to two digits: it is an order of magnitude.
"""

from __future__ import annotations

import json
import math
from typing import Any

from eval.report_tables import Table
from training.run import Run

# A data sheet's thermal design power over its cores: Intel Xeon Platinum 8380, 270 W and 40 cores.
CPU_WATTS_PER_CORE = 7.0
# Board power in NVIDIA's data sheet of the H100 SXM, also of the H200.
GPU_WATTS = 700.0
# World average of 2024: Ember, Global Electricity Review 2025.
GRID_GRAMS_PER_KWH = 473.0
GRID_SOURCE = "world average of 2024 (Ember, Global Electricity Review 2025)"


def audit_energy(
    run: Run,
    device: str | None = None,
    devices: int | None = None,
    watts: float | None = None,
    grid: float | None = None,
    overhead: float = 1.0,
) -> dict[str, Any]:
    """Estimate the energy of a run's training steps.

    Args:
        run: with metrics.
        device: "cpu" or "gpu"; None takes what the run's records say.
        devices: cores or GPUs of the whole job; None takes the threads of one process that the run recorded.
        watts: mean power of each of them; None takes a default for the device.
        grid: grams of CO2 equivalent a kWh; None takes the world average.
        overhead: energy of the building over that of the devices (power usage effectiveness).

    Returns:
        Plain data.

    Raises:
        ValueError: no step time is recorded, or a number is missing or out of range.
    """
    for name, value in (("--devices", devices), ("--watts", watts)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; allowed are numbers above 0")
    if grid is not None and not 0 <= grid < math.inf:
        raise ValueError(f"--grid is {grid}; allowed are 0 and above, in grams of CO2 equivalent a kWh")
    if not 1 <= overhead < math.inf:
        raise ValueError(f"--overhead is {overhead}; allowed are 1 and above")
    lines = [line for line in run.metrics() if "learning_rate" in line or "skipped" in line]
    timed = [line for line in lines if line.get("tokens_per_second")]
    if not timed:
        raise ValueError(f"{run.folder}: metrics.jsonl holds no step time; train the run first")
    # A step's rate is its tokens over its seconds.
    seconds = math.fsum(run.config.tokens_per_step / line["tokens_per_second"] for line in timed)
    path = run.folder / "environment.json"
    environment = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    device, device_label = _device(run, timed, environment, device)
    if devices is None:
        threads = environment.get("threads")
        if device == "gpu" or threads is None:
            raise ValueError(f"{run.folder}: how many devices the job had is not recorded; give --devices")
        devices, devices_label = int(threads), "assumed: one process, with a core for each thread that it recorded"
    else:
        devices_label = "given"
    watts_label = "given"
    if watts is None:
        watts = CPU_WATTS_PER_CORE if device == "cpu" else GPU_WATTS
        watts_label = "assumed: " + (
            "270 W over 40 cores, Intel Xeon Platinum 8380 data sheet"
            if device == "cpu"
            else "board power, NVIDIA H100 SXM data sheet"
        )
    grid_label = "given" if grid is not None else f"assumed: {GRID_SOURCE}"
    grid = GRID_GRAMS_PER_KWH if grid is None else grid
    kilowatt_hours = seconds * devices * watts * overhead / 3.6e6
    return {
        "steps_timed": len(timed),
        "steps_without_time": len(lines) - len(timed),
        "seconds": seconds,
        "device": device,
        "device_label": device_label,
        "devices": devices,
        "devices_label": devices_label,
        "watts_each": watts,
        "watts_label": watts_label,
        "overhead": overhead,
        "grid_grams_per_kwh": grid,
        "grid_label": grid_label,
        "kwh": kilowatt_hours,
        "kg_co2e": kilowatt_hours * grid / 1000,
    }


def energy_table(found: dict[str, Any]) -> Table:
    """The table of what `audit_energy` found."""
    rows = [
        (
            "time of the training steps",
            f"{found['seconds']:,.0f} s",
            f"measured, {found['steps_timed']:,} steps; {found['steps_without_time']} left-out steps have no time",
        ),
        ("devices", f"{found['devices']} ({found['device']})", f"{found['devices_label']}; {found['device_label']}"),
        ("power of each", f"{found['watts_each']:g} W", found["watts_label"]),
        ("overhead of the building", f"{found['overhead']:g}", "1 counts none"),
        ("grid", f"{found['grid_grams_per_kwh']:g} g/kWh", found["grid_label"]),
        ("all energy", f"{found['kwh']:.2g} kWh", "time x devices x power x overhead"),
        ("all CO2 equivalent", f"{found['kg_co2e']:.2g} kg", "energy x grid"),
    ]
    note = (
        "An estimate to an order of magnitude. Power is not measured: a device may draw less than its data sheet says, "
        "and memory, disks and network are not counted. Nor are validation, checkpoints, start-up, and steps that were "
        "taken again after a crash: their time is not recorded. Making the hardware is not counted either."
    )
    return Table("Energy and CO2 of the training", ("", "value", "where from"), rows, note, ("where from",))


def _device(run: Run, timed: list[dict[str, Any]], environment: dict[str, Any], given: str | None) -> tuple[str, str]:
    if given is not None:
        return given, "kind given"
    if any("mfu" in line for line in timed):
        return "gpu", "kind recorded"
    torch_version = str(environment.get("packages", {}).get("torch", ""))
    if run.config.training.device == "cpu" or torch_version.endswith("+cpu"):
        return "cpu", "kind recorded"
    if run.config.training.device == "cuda":
        return "gpu", "kind recorded"
    raise ValueError(f"{run.folder}: whether the run used GPUs is not recorded; give --device cpu or --device gpu")
