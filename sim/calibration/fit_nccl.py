"""`python -m sim.calibration.fit_nccl`: fits `sim/network/figures.yaml` to the sweeps of `data/collectives*.yaml`.

Every figure starts at the value NCCL's tuner or a datasheet gives (`data/nccl_priors.yaml`) and moves only as far as
the sweeps ask. With `--check`, whole sites are left out in turn and predicted from the others. With `--only NAME ...`
families of that name move alone, and all other figures stay what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sim.calibration.nccl.figures import Floats, Parameters, families
from sim.calibration.nccl.left_out import left_out
from sim.calibration.nccl.solver import influence, residuals, solve
from sim.calibration.nccl.sweeps import load, summary
from sim.network.figures import catalogue

FILE = Path(__file__).resolve().parents[1] / "network" / "figures.yaml"
ORIGINS = FILE.with_name("figures_origin.yaml")
_BY = "Written by `python -m sim.calibration.fit_nccl`; do not edit."
_HEAD = f"""# Measured figures of links, fabrics and NCCL's protocols; what each is and rests on: figures_origin.yaml.
# {_BY}
"""
_ORIGINS_HEAD = f"""# Where the figures of figures.yaml come from. {_BY}
# prior: where the fit began, and its source; sites: clusters of sim/calibration/data/collectives*.yaml whose sweeps the
# figure moves; confidence: high from 3 sites on, medium from 1, low without data (the family's shift of its prior).
"""


def write(parameters: Parameters, shifts: Floats, sites: dict[str, set[str]], path: Path = FILE) -> None:
    """Write `figures.yaml` to `path` and `figures_origin.yaml` beside it."""
    values = parameters.values(shifts)
    lines, origins = [_HEAD.rstrip()], [_ORIGINS_HEAD.rstrip()]
    for family in parameters.families:
        origins.append(f"# {family.name}: {family.about}")
        for member, prior in family.members.items():
            name = f"{family.name}.{member}"
            where = sorted(sites.get(name, ()))
            confidence = "high" if len(where) >= 3 else "medium" if where else "low"
            lines.append(f"{name}: {values[name]:.4g}")
            origins.append(f'{name}: {{unit: "{family.unit}", prior: {prior:g}, source: "{family.source}", '
                           f"confidence: {confidence}, sites: [{', '.join(where)}]}}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.with_name(ORIGINS.name).write_text("\n".join(origins) + "\n", encoding="utf-8")


def _standing(only: Sequence[str]) -> dict[str, float]:
    """What figures of other families than `only` are now; none where all move."""
    known = catalogue() if only else {}
    return {f"{family.name}.{member}": known[f"{family.name}.{member}"]
            for family in families() if family.name not in only for member in family.members if known}


def main() -> None:
    """Fit, write, and with `--check` cross-validate."""
    words = sys.argv[1:]
    only = [name for name in words[words.index("--only") + 1:] if not name.startswith("-")] if "--only" in words else []
    parameters = Parameters(_standing(only), only=only)
    zero = np.zeros(len(parameters.names))
    if not FILE.exists():
        write(parameters, zero, {})
    sweeps = load()
    shifts = solve(sweeps, parameters, zero, rounds=20)
    write(parameters, shifts, influence(sweeps, parameters, shifts))
    residuals(sweeps)
    for sweep in sorted(sweeps, key=lambda s: -s.error()):
        print(f"{100 * sweep.error():6.1f}% {sweep.id}")
    print(summary(sweeps))
    if "--check" in words:
        errors = left_out(sorted({s.site for s in sweeps}))
        for nodes, name in ((1, "one node"), (2, "several nodes")):
            found = [e for s, e in ((s, errors[s.id]) for s in sweeps) if min(s.nodes, 2) == nodes]
            print(f"left out, {name}: median {np.median(found):.3f}, 90th percentile {np.percentile(found, 90):.3f}")


if __name__ == "__main__":
    main()
