"""Attention as engines of inference were timed: the table is read, fitted by kernel and family, and comes out near."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.calibration import fit_kernels
from sim.calibration.kernels import row_fit
from sim.calibration.kernels.tables import Group, groups
from sim.measured.timing import reported_s


@pytest.fixture(scope="module")
def measured() -> list[Group]:
    return [group for group in groups() if group.file == "aic_attention"]


def test_every_row_is_a_forward_kernel_of_its_engine(measured: list[Group]) -> None:
    assert {group.op for group in measured} == {"sdp_fwd", "sdp_decode"}
    for group in measured:
        one = [kernel.shape[3] == 1 for kernel in group.kernels]
        assert all(one) if group.op == "sdp_decode" else not any(one)
        assert all(kernel.causal is (group.op == "sdp_fwd") for kernel in group.kernels)
    ragged = next(group for group in measured if group.gpu.name == "h100-80g-sxm")
    assert set(ragged.hosts) == {"planned"}


def test_each_kernel_of_a_family_is_a_fit_of_its_own(measured: list[Group]) -> None:
    keys = {fit_kernels.key_of(group) for group in measured}
    assert ("sdp_fwd", "hopper", "flash3") in keys and ("sdp_decode", "hopper", "") in keys
    # pages and writes to the cache are in A100's rows, and training's kernel has neither; B200's is another's kernel
    fitted = fit_kernels.by_key(measured)
    assert not {("sdp_fwd", "ga100", "flash2"), ("sdp_fwd", "blackwell", "flash2")} & set(fitted)
    assert ("sdp_fwd", "blackwell", "trtllm") in fitted and ("sdp_decode", "blackwell", "") in fitted


@pytest.mark.parametrize("op", ["sdp_fwd", "sdp_decode"])
def test_shipped_figures_are_near_what_they_were_fitted_to(measured: list[Group], op: str) -> None:
    for group in measured:
        if group.op == op and not fit_kernels.compared(group):
            errors = np.abs(row_fit.predict(group) / group.measured_s - 1)
            assert np.median(errors) < 0.1, group.name


def test_the_engines_loop_is_not_held_back_by_power(measured: list[Group]) -> None:
    group = max((group for group in measured if group.gpu.name == "h100-80g-sxm" and group.op == "sdp_fwd"),
                key=lambda group: len(group.kernels))
    free = reported_s(replace(group.gpu, power_limit_w=5000.0), group.timing, group.kernels, group.hosts)
    assert row_fit.predict(group) == pytest.approx(free)


def test_figures_of_decoding_come_back_from_their_own_times(measured: list[Group]) -> None:
    group = next(group for group in measured if group.op == "sdp_decode" and group.gpu.name == "l40s")
    few = group.pick(np.arange(0, len(group.kernels), 4))
    known = {"wait_s": 4e-6, "join_s": 2.5e-6, "block_start_s": 3e-6, "bandwidth_share": 0.75}
    own = Group(few.file, few.label, few.dtype, few.op, few.gpu, few.timing, few.kernels,
                row_fit.predict(few, row_fit.decoding_figures(known)), few.hosts)
    found = row_fit.fit_decoding([own], rounds=60)
    for name, value in known.items():
        assert found[name] == pytest.approx(value, rel=0.15)


def test_the_other_direction_stays_and_new_head_dimensions_take_the_nearest() -> None:
    other = {64: (0.5, 0.4), 128: (0.7, 0.6)}
    values = {"share_64": 0.55, "share_256": 0.65, "longest_share": 0.5, "balance": 1.2, "block_start_s": 2e-6}
    shaped = row_fit.attention_figures(values, False, other, "flash3")["attention"]
    assert shaped["flash3"][64] == [0.55, 0.4] and shaped["flash3"][256] == [0.65, 0.6]
    assert shaped["flash3"]["block_start_s"] == 2e-6 and "blocks" not in shaped
