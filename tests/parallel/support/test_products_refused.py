"""Products in dtypes that are not simulated are refused where the scenario says so."""

from __future__ import annotations

import pytest

from sim.errors import UserError
from sim.parallel import lower
from sim.scenario import resolve


@pytest.mark.parametrize(("dtype", "message"), [
    ("fp64", "compute in fp64 is understood but not simulated yet"), ("int4", "int4 is understood but not simulated"),
    ("nvfp4", "no tensor cores for nvfp4")])
def test_a_dtype_of_products_is_refused_at_its_field(dtype: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        lower(resolve({"name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt2"},
                       "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128,
                                    "precision": {"name": "pure-bf16", "compute": dtype}},
                       "parallel": {"strategy": "ddp"}}))
    (fault,) = caught.value.faults
    assert message in fault.message
    assert fault.field == "training.precision"
