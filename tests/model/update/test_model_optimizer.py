"""Bytes and launches of the optimizer step and of clipping."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sim.model import clip_kernels, gradient_dtype, gradient_kernels, optimizer_kernels

FP32 = SimpleNamespace(compute="fp32", parameters="fp32", master="none", gradients="fp32", optimizer="fp32")
MIXED = SimpleNamespace(compute="bf16", parameters="bf16", master="fp32", gradients="fp32", optimizer="fp32")
HALF = SimpleNamespace(compute="fp16", parameters="fp16", master="fp32", gradients="fp16", optimizer="fp32")
AMP = SimpleNamespace(compute="fp16", parameters="fp32", master="none", gradients="fp32", optimizer="fp32")
PURE = SimpleNamespace(compute="bf16", parameters="bf16", master="none", gradients="bf16", optimizer="bf16")
N = 1_000_000


def per_parameter(precision: SimpleNamespace, optimizer: str, kernel: str, clip: bool = False) -> float:
    return sum(k.bytes for k in optimizer_kernels(N, 10, precision, optimizer, kernel, clip)) / N


@pytest.mark.parametrize(("optimizer", "kernel", "expected"), [
    ("adamw", "fused", 28), ("adamw", "foreach", 80), ("adamw", "loop", 88), ("adam", "fused", 28),
    ("adamw-8bit", "fused", 16.0625), ("adamw-8bit", "foreach", 16.0625), ("sgd", "foreach", 12),
    ("sgd-momentum", "fused", 20),
    ("sgd-momentum", "loop", 32), ("none", "fused", 0)])
def test_accesses_in_fp32(optimizer: str, kernel: str, expected: float) -> None:
    assert per_parameter(FP32, optimizer, kernel) == expected


def test_half_states_move_half_the_bytes() -> None:
    assert per_parameter(PURE, "adamw", "fused") == 14
    assert per_parameter(PURE, "adamw", "foreach") == 40


def test_master_copies_are_written_back_in_half() -> None:
    assert per_parameter(MIXED, "adamw", "fused") == 28 + 2 + 4  # a copy behind it
    assert per_parameter(MIXED, "adamw", "foreach") == 80 + 2 + 4


def test_an_optimizer_on_the_cpu_writes_half_parameters_itself() -> None:
    (only, written) = optimizer_kernels(N, 10, MIXED, "adamw", "fused", False, on_cpu=True)
    assert (only.bytes, written.bytes, written.launches) == (28 * N, 2 * N, 0)


@pytest.mark.parametrize(("precision", "unscaling", "clip", "expected"), [
    (FP32, "apart", True, []), (MIXED, "apart", True, []),  # nothing is narrower, no loss is scaled
    (HALF, "apart", True, [2 + 4, 8]), (HALF, "copied", True, [2 + 4]), (HALF, "clipped", True, [2 + 4]),
    (HALF, "clipped", False, [2 + 4, 8]), (AMP, "copied", True, [8]), (AMP, "clipped", True, [])])
def test_gradients_are_copied_wide_and_unscaled_before_the_norm(
    precision: SimpleNamespace, unscaling: str, clip: bool, expected: list[int],
) -> None:
    kernels = gradient_kernels(N, 10, precision, unscaling, clip)
    assert [k.bytes / N for k in kernels] == expected
    assert not gradient_kernels(0, 0, precision, unscaling, clip)


def test_copies_of_gradients_are_launched_tensor_by_tensor_and_divisions_by_list() -> None:
    copied, unscaled = gradient_kernels(N, 500, HALF, "apart", True)
    assert (copied.launches, unscaled.launches) == (500, 5)  # 110 tensors to a launch


def test_the_optimizer_reads_gradients_as_wide_as_its_parameters() -> None:
    """Megatron's fp16 step by hand, bytes per parameter: copy 6, unscale 8, norm 4, clip 8, Adam 28, half copy 6."""
    assert (gradient_dtype(HALF), gradient_dtype(MIXED), gradient_dtype(PURE)) == ("fp32", "fp32", "bf16")
    before = sum(k.bytes for k in gradient_kernels(N, 10, HALF, "apart", True)) / N
    assert before + per_parameter(HALF, "adam", "fused", clip=True) == 6 + 8 + 4 + 8 + 28 + 6


def test_clipping_reads_twice_and_writes_once() -> None:
    norm, scale = clip_kernels(N, 10, "fp32", "fused")
    assert (norm.bytes, scale.bytes) == (4 * N, 8 * N)
    assert per_parameter(FP32, "adamw", "fused", clip=True) == 28 + 12


def test_launches_by_implementation() -> None:
    loop, foreach, fused = (optimizer_kernels(N, 100, FP32, "adamw", k, False)[0] for k in ("loop", "foreach", "fused"))
    assert loop.launches == 9 * 100
    assert fused.launches == 3  # 36 tensors to a launch with four lists
    assert fused.launches < foreach.launches < loop.launches
    assert {k.category for k in (loop, foreach, fused)} == {"optimizer"}


def test_adafactor_by_hand() -> None:
    """torch/optim/_adafactor.py, _single_tensor_adafactor in fp32: norms of parameter and update read 4 + 4, decay
    writes 8, norms of rows and columns read 8, the estimate is written (4), divided, bounded and rooted (24),
    multiplied (12) and added (12)."""
    assert per_parameter(FP32, "adafactor", "loop") == 4 + 8 + 8 + 4 + 24 + 12 + 4 + 12


def test_every_optimizer_has_every_implementation() -> None:
    for optimizer in ("adamw", "adam", "adamw-8bit", "sgd", "sgd-momentum", "adafactor", "lamb"):
        for kernel in ("loop", "foreach", "fused"):
            assert per_parameter(FP32, optimizer, kernel) >= 12
