"""What a search over requests found, in words: its tables' columns and titles, and what they leave unsaid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.report.units import seconds
from sim.scenario.fields.schema import Inference
from sim.sizing.wish import EXCESS

if TYPE_CHECKING:
    from sim.sizing.size import Sizing

Row = Mapping[str, Any]
#: The field that only rows of requests have.
BATCH = "training.mode.inference.batch"
_GIB = 2.0**30
_J_PER_KWH, _MILLION = 3.6e6, 1e6
#: Share of its latency by which a dearer row of the front is to be faster, to be shown.
_APART = 0.05
#: The column that an objective is about; more of a throughput is better.
_COLUMN = {"time": "step_time_s", "latency": "time_per_token_s", "first-token": "prompt_time_s", "cost": "cost",
           "throughput": "tokens_per_second", "energy": "energy_kwh", "gpus": "gpus"}


def figure(value: float) -> str:
    """A figure of a table."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def covered(found: Sizing) -> str:
    """How many rows there are."""
    return f"{found.covered:,} ways to serve were looked at: layouts, batches, and what weights and cache are stored in"


def titles(found: Sizing) -> tuple[str, str]:
    """Of the tables of the best and of the front."""
    proven = "no other way looked at beats them in latency, GPUs and cost" if found.front_proven else (
        "of those simulated, by latency, GPUs and cost")
    within = " within the limits" if found.wish.served_limits else ""
    left_out = len(found.front) - len(apart(found.front))
    less = f"; {left_out} left out that are less than {100 * _APART:.0f}% faster than a cheaper one shown"
    return (f"best by {found.wish.objective}{within} (tokens/s of all replicas; GPU-hours and cost of a million "
            "tokens; memory of the fullest GPU)", f"Pareto front{within} ({proven}{less * bool(left_out)})")


def apart(front: Sequence[Row]) -> list[Row]:
    """Of the front what differs enough to choose from, the cheapest first kept; in the front's order."""
    name = "time_per_token_s" if any(row["time_per_token_s"] for row in front) else "step_time_s"
    kept: list[int] = []
    for i in sorted(range(len(front)), key=lambda i: float(front[i]["cost"])):
        if not any(front[k]["gpus"] <= front[i]["gpus"] and front[k][name] <= (1 + _APART) * front[i][name]
                   for k in kept):
            kept.append(i)
    return [front[i] for i in sorted(kept)]


def columns(found: Sizing, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of requests; without tokens behind the first the request is all there is."""
    further = any(row["time_per_token_s"] for row in [*rows, *found.rows])
    of: dict[str, Callable[[Row], str]] = {
        "per token": lambda row: seconds(row["time_per_token_s"]),
        "first token": lambda row: seconds(row["prompt_time_s"]),
        "request": lambda row: seconds(row["step_time_s"]),
        "tokens/s": lambda row: figure(row["tokens_per_second"]),
        "GPUs": lambda row: f"{row['gpus']:,}",
        "replicas": lambda row: f"{row['replicas']:,}",
        "GPU-hours/M": lambda row: figure(row["gpu_hours"]),
        "J/token": lambda row: figure(row["energy_kwh"] * _J_PER_KWH / _MILLION),
        "USD/M": lambda row: "–" if row["usd"] is None else figure(row["usd"]),
        "memory": lambda row: f"{row['device_used_bytes'] / _GIB:.1f} GiB"}
    unsaid = {*(["request"] if further else ["per token", "first token"]),
              *([] if any(row["replicas"] > 1 for row in rows) else ["replicas"]),
              *([] if any(row["usd"] is not None for row in rows) else ["USD/M"])}
    heads = [head for head in of if head not in unsaid]
    return heads, [[of[head](row) for head in heads] for row in rows]


def latencies(row: Row) -> str:
    """A row's figures in words."""
    if not row["time_per_token_s"]:
        return f"{seconds(row['step_time_s'])} a request, {figure(row['tokens_per_second'])} tokens/s"
    return (f"{seconds(row['time_per_token_s'])} a token, {seconds(row['prompt_time_s'])} to the first, "
            f"{figure(row['tokens_per_second'])} tokens/s")


def layout(sets: Mapping[str, Any]) -> str:
    """A row's fields in words: the batch always, what is off or one else left out."""
    found = [f"{name}={sets[f'parallel.{name}']}" for name in ("tensor", "pipeline", "expert")
             if sets[f"parallel.{name}"] > 1]
    if sets["parallel.strategy"] != "ddp":
        found.append(f"strategy={sets['parallel.strategy']} sharding_factor={sets['parallel.sharding_factor']}")
    weights, compute = (sets.get(f"training.precision.{name}") for name in ("parameters", "compute"))
    if weights is not None:
        narrow = compute == weights and weights not in ("bf16", "fp16", "fp32")
        found.append(f"weights={weights}{'-products' if narrow else ''}")
    if (cache := sets.get("training.mode.inference.kv_cache", "same")) != "same":
        found.append(f"cache={cache}")
    if (place := sets.get("parallel.offload.parameters", "none")) != "none":
        found.append(f"offload.parameters={place}")
    return " ".join([*found, f"batch={sets[BATCH]}"])


def notes(found: Sizing) -> Iterator[str]:
    """What the table's rows have in common, and where the best lies at the edge of what was tried."""
    mode = found.winner.training.mode if found.winner is not None else None
    in_flight = isinstance(mode, Inference) and mode.inference.batching == "continuous"
    yield "\na replica is tensor × pipeline GPUs and takes a batch of its own, " + (
        "always as many requests as that: how they arrive and wait for a replica is not simulated" if in_flight else
        "all its sequences in step; under load, as engines batch: --set training.mode.inference.batching=continuous")
    if not found.wish.priced and len({row["cluster"] for row in found.rows}) > 1:
        yield "not every cluster has a known price, so GPU-hours of all count alike: --price A=2.5,B=1.2 says it"
    best, tried = found.best[0]["set"][BATCH], found.batches
    if best == max(tried) and len(tried) > 1:
        yield f"the best has the largest batch that was tried; larger ones: --only batch={2 * best},{4 * best}"
    elif len(tried) > 1:
        yield f"batches tried: {', '.join(f'{one:,}' for one in tried)}; others: --only batch=…"


def broken(found: Sizing, row: Row) -> list[str]:
    """Limits that a row breaks, in words."""
    wish = found.wish
    said = [(wish.latency_s, row["time_per_token_s"], "latency"), (wish.first_token_s, row["prompt_time_s"],
                                                                   "first token")]
    found_broken = [f"{name} {seconds(value)}, limit {seconds(most)}" for most, value, name in said
                    if most is not None and value > most]
    if wish.throughput is not None and row["tokens_per_second"] < wish.throughput:
        found_broken.append(f"{figure(row['tokens_per_second'])} tokens/s, limit {figure(wish.throughput)}")
    return found_broken


def behind(found: Sizing, row: Row, best: Row | None) -> str:
    """How far the scenario's own row is behind the best, or the limits it breaks."""
    if breaks := broken(found, row):
        return f"; it breaks the limits: {'; '.join(breaks)}"
    name = _COLUMN.get(found.wish.objective, "gpus")
    if best is None or name == "gpus":
        return ""
    return f"; {name.replace('_', ' ').removesuffix(' s')} x{row[name] / best[name]:.3g} of the best's"


def nearest_title(found: Sizing, row: Row) -> str:
    """Of the table of what comes nearest to the limits."""
    return f"nothing keeps the limits; nearest to them ({'; '.join(broken(found, row)) or EXCESS})"
