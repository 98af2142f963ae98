"""The named precisions: seven dtypes each."""

from __future__ import annotations

from types import MappingProxyType

FIELDS = ("compute", "parameters", "master", "gradients", "optimizer", "gather", "reduce")


def _row(text: str) -> dict[str, str]:
    return dict(zip(FIELDS, text.split(), strict=True))


def _halves() -> dict[str, dict[str, str]]:
    """Policies that exist for both 16-bit types.

    Sources: autocast keeps fp32 parameters and communicates fp32 (torch.amp); FSDP MixedPrecision(param_dtype,
    reduce_dtype) casts what it gathers and reduces (torch.distributed.fsdp); DeepSpeed and Apex O2 keep 16-bit
    parameters and gradients beside an fp32 master (Rajbhandari et al., ZeRO, section 3.1); Megatron-LM accumulates
    gradients in fp32 with bf16 (`accumulate_allreduce_grads_in_fp32` is forced there), in fp16 otherwise.
    """
    rows: dict[str, dict[str, str]] = {}
    for half in ("fp16", "bf16"):
        rows[f"amp-{half}"] = _row(f"{half} fp32 none fp32 fp32 fp32 fp32")
        rows[f"fsdp-{half}"] = _row(f"{half} fp32 none fp32 fp32 {half} {half}")
        rows[f"mixed-{half}"] = _row(f"{half} {half} fp32 {half} fp32 {half} {half}")
        gradients = "fp32" if half == "bf16" else half
        rows[f"megatron-{half}"] = _row(f"{half} {half} fp32 {gradients} fp32 {half} {gradients}")
        rows[f"pure-{half}"] = _row(f"{half} {half} none {half} {half} {half} {half}")
    return rows


#: name -> the seven dtypes. The narrow formats of Blackwell share fp8's rest (Megatron-Bridge 0.3.1
#: training/mixed_precision.py: bf16_with_mxfp8_mixed, bf16_with_nvfp4_mixed); they are no names of the specification.
PRECISIONS = MappingProxyType(
    {
        "fp32": _row("fp32 fp32 none fp32 fp32 fp32 fp32"),
        "tf32": _row("tf32 fp32 none fp32 fp32 fp32 fp32"),
        **_halves(),
        **{narrow: _row(f"{narrow} bf16 fp32 fp32 fp32 bf16 fp32") for narrow in ("fp8", "mxfp8", "nvfp4")},
    }
)
