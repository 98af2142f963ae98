"""Predicts one case and holds it against what was measured: one case in, one plain JSON record out.

A record is never skipped: what the simulator cannot express is `unsupported` with the reason, a fault of ours is
`failed` with the reason, and a single measurement that is not predicted is named under `unsupported_keys`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sim.errors import UserError
from sim.validation.cases.files import Case
from sim.validation.statistics import Record

#: Why a memory key is not compared while the result does not say that its memory is complete.
INCOMPLETE = "the predicted memory leaves out activations and workspace"


def predict(case: Case) -> Record:
    """The record of one case (specification of cases: file, id, quality, measured, predicted, error, status, reason).

    Never raises for anything but KeyboardInterrupt and SystemExit.
    """
    record: Record = {"file": case.file, "id": case.id, "line": case.line, "kind": case.kind, "quality": case.quality,
                      "measured": case.measured, "predicted": {}, "error": {}, "status": "ok", "reason": ""}
    if case.assumed:
        record["assumed"] = list(case.assumed)
    try:
        record.update(_BY_KIND[case.kind](case))
    except UserError as error:
        record.update(status="unsupported", reason="; ".join(_plain(f.field, f.message) for f in error.faults))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        record.update(status="failed", reason=f"{type(error).__name__} at {where}: {error}")
    return record


def _plain(field: str, message: str) -> str:
    return f"{field}: {message}" if field else message


def _training(case: Case) -> Record:
    from sim.api import run
    from sim.scenario import resolve

    result = run(resolve(case.given, case.path, case.sets, Path(case.path).parent))
    # not `to_json`: what would make it fit, and the step on an infinite network, are simulations of their own
    predicted = {"step_time_s": result.step_time_s, "memory": result.memory.to_json()}
    return {**compare(case.measured, predicted), "features": asdict(result.features),
            "cluster": result.scenario.cluster.topology.name}


def compare(measured: Mapping[str, Any], result: Mapping[str, Any]) -> Record:
    """Predicted values, errors and uncompared keys of a training case, from step time and memory of the result's JSON.

    `ratio` needs another case's step time and is filled in later (`settle_ratios`). A measured peak of unknown kind is
    right (error 0) anywhere between the predicted allocated and reserved peaks.
    """
    memory = result.get("memory") or {}
    predicted: dict[str, Any] = {"step_time_s": result["step_time_s"]}
    missing: dict[str, str] = {}
    missing_memory = memory_gap(memory)
    for key in measured:
        if key in ("step_time_s", "noise", "relative_to", "ratio"):
            continue
        value = _memory_value(key, memory) if missing_memory is None else None
        predicted[key] = value
        if value is None:
            missing[key] = missing_memory or "the result does not carry it"
    predicted["memory"] = memory
    errors = {k: e for k, m in measured.items() if (e := _error(k, m, predicted.get(k))) is not None}
    record: Record = {"predicted": predicted, "error": errors}
    if missing:
        record["unsupported_keys"] = missing
    compared = set(measured) - {"noise", "relative_to"} - set(missing)
    if not compared and not _is_reference(measured):
        record.update(status="unsupported", reason=next(iter(missing.values()), "nothing to compare"))
    return record


def memory_gap(memory: Mapping[str, Any]) -> str | None:
    """None when the result's memory is complete, else why its peaks are not compared."""
    if memory.get("complete") is True:
        return None
    return str(memory.get("incomplete") or INCOMPLETE)


def _is_reference(measured: Mapping[str, Any]) -> bool:
    """A case that only anchors others' ratios has nothing measured but its verdict; running it is what it is for."""
    return set(measured) <= {"oom", "noise"} and measured.get("oom") is False


def _memory_value(key: str, memory: Mapping[str, Any]) -> Any:
    if key == "oom":
        return None if memory.get("fits") is None else not memory["fits"]
    if key == "peak_unknown_bytes":
        bounds = [memory.get("peak_allocated_bytes"), memory.get("peak_reserved_bytes")]
        return None if None in bounds else bounds
    return memory.get(key)


def _error(key: str, measured: Any, predicted: Any) -> float | None:
    if predicted is None or key in ("oom", "noise", "relative_to"):
        return None
    if key == "peak_unknown_bytes":
        low, high = sorted(predicted)
        nearest = min(max(measured, low), high)
        return float(nearest / measured - 1)
    return float(predicted / measured - 1)


def settle(record: Record, step_times: Mapping[str, float]) -> None:
    """Last touches that need more than the case itself: ratios to other cases, and bounds.

    Args:
        record: a training record, changed in place.
        step_times: predicted step times of the record's file by id.
    """
    if record["kind"] != "training" or record["status"] != "ok":
        return
    measured, predicted = record["measured"], record["predicted"]
    other = measured.get("relative_to")
    if other is not None:
        if other in step_times:
            predicted["ratio"] = predicted["step_time_s"] / step_times[other]
            record["error"]["ratio"] = predicted["ratio"] / measured["ratio"] - 1
        else:
            record.update(status="unsupported", reason=f"its reference {other} is not predicted")
    if record["quality"] == "bound" and "step_time_s" in record["error"]:
        record["error"]["step_time_s"] = max(0.0, record["error"]["step_time_s"])


def _oracle(case: Case) -> Record:
    from sim.validation.cases.oracle import compare_exact

    return compare_exact(case)


def _collectives(case: Case) -> Record:
    from sim.validation.cases.micro import collective_rows

    return collective_rows(case)


def _kernels(case: Case) -> Record:
    from sim.validation.cases.micro import kernel_rows

    return kernel_rows(case)


_BY_KIND = {"training": _training, "oracle-traffic": _oracle, "oracle-flops": _oracle, "oracle-memory": _oracle,
            "collectives": _collectives, "kernels": _kernels}
