"""What Megatron takes of apex and of its own CUDA extensions, as tensors that come and go: nothing is computed.

Sources: apex csrc/megatron (as colossalai 0.2.8 has it): softmax makes one tensor, its backward writes over the
gradient it gets. From memory: contrib/layer_norm (output and two numbers a row; backward sums in fp32 for every SM),
optimizers/fused_adam.py (two states), csrc/multi_tensor_l2norm_kernel.cu (320 sums and one).
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

_SMS = 108  # of an A100


def _touch(x: torch.Tensor) -> torch.Tensor:
    """One launch, and nothing allocated."""
    x.detach().view(-1)[:1].zero_()
    return x


def _like(x: torch.Tensor) -> torch.Tensor:
    return _touch(torch.empty_like(x))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, *_: Any) -> Any:
        rows = x.numel() // x.size(-1)
        out, mean = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, mean, torch.empty_like(mean))
        return _touch(out)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, _, _ = ctx.saved_tensors
        made = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        parts = torch.empty(2, _SMS, weight.numel(), dtype=torch.float32, device=weight.device)
        _touch(made[0])
        _touch(parts)
        return (*made, None, None, None)


class _FastNorm:
    @staticmethod
    def forward(x: Any, weight: Any, bias: Any, epsilon: float, memory_efficient: bool = False) -> None:
        """Megatron looks for arguments here."""

    @staticmethod
    def apply(x: Any, weight: Any, bias: Any, epsilon: float, *_: Any) -> Any:
        return _Norm.apply(x, weight, bias)


class _Adam(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, betas: Any = (0.9, 0.999),
                 eps: float = 1e-8, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and not state:
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter.data) for _ in range(2))


def _l2norm(overflow: Any, lists: Any, per_tensor: bool = False) -> Any:
    torch.zeros(320, dtype=torch.float32, device="cuda")
    return _touch(torch.empty(1, dtype=torch.float32, device="cuda")), torch.empty(0)


class _Dropped(torch.autograd.Function):
    """Bias, dropout and sum as one compiled graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, bias: Any, residual: Any, share: float) -> Any:
        out, ctx.share = torch.empty_like(residual), share
        if share:
            ctx.save_for_backward(torch.empty(x.shape, dtype=torch.bool, device=x.device))
        return _touch(out)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        branch = _like(gradient) if ctx.share else gradient
        return branch, gradient.sum(dim=(0, 1)), gradient, None


def _module(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module


def before() -> None:
    """To be called before Megatron is imported."""
    def in_place(gradient: Any, *_: Any) -> Any:
        return _touch(gradient)
    _module("scaled_upper_triang_masked_softmax_cuda", forward=lambda x, _: _like(x), backward=in_place,
            get_batch_per_block=lambda *_: 4)
    _module("scaled_masked_softmax_cuda", get_batch_per_block=lambda *_: 4)
    _module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=lambda _i, _g, main: _touch(main),
            wgrad_gemm_accum_fp16=lambda _i, _g, main: _touch(main))
    _module("amp_C", multi_tensor_l2norm=_l2norm, multi_tensor_scale=lambda _o, lists, _s: _touch(lists[0][0]))
    for name in ("apex", "apex.contrib", "apex.contrib.layer_norm", "apex.normalization"):
        _module(name)
    _module("apex.multi_tensor_apply", multi_tensor_applier=lambda op, flag, lists, *rest: op(flag, lists, *rest))
    _module("apex.optimizers", FusedAdam=_Adam, FusedSGD=_Adam)
    _module("apex.contrib.layer_norm.layer_norm", FastLayerNormFN=_FastNorm)
    _module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=_Norm)
    torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)  # type: ignore[assignment]


def after() -> None:
    """To be called before layers are made: what would have been compiled."""
    import megatron.core.fusions.fused_bias_dropout as dropout
    import megatron.core.fusions.fused_bias_gelu as gelu
    gelu.bias_gelu = lambda _, x: _like(x)
    gelu.bias_gelu_back = lambda _g, _b, x: _like(x)
    dropout.bias_dropout_add_fused_train = lambda pair, residual, share: _Dropped.apply(*pair, residual, share)
