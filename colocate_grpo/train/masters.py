"""AdamW with fp32 masters: Megatron's distributed optimizer, with the faults of 0.16.1 put right."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from colocate_grpo.config import Config
from colocate_grpo.train import shim
from colocate_grpo.train.gather import STATES, gather_states, own_storage, room_for_states
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.schedule import StepOutcome


class MasterAdamW:
    """Megatron's distributed optimizer (fp32 masters and moments sharded over DP), with 0.16.1's faults fixed."""

    def __init__(self, config: Config, ddp: DistributedDataParallel, parallel: Parallel) -> None:
        self.config, self.device = config.train.optimizer, parallel.device
        settings = _megatron_config(config)
        with shim.cuda_means_cpu(self.device):
            chained = get_megatron_optimizer(
                settings, [ddp], config_overrides=get_standard_config_overrides(settings), use_gloo_process_groups=True
            )
        (self.inner,) = chained.chained_optimizers
        assert isinstance(self.inner, DistributedOptimizer)
        _use_fused_kernel(self.inner.optimizer)
        _create_moments(self.inner.optimizer)

    def step(self, lr: float) -> StepOutcome:
        with shim.cuda_means_cpu(self.device):
            self.inner.prepare_grads()
            norm = self.inner.get_grad_norm()
            if not math.isfinite(norm):
                self._drop_gradients()
                return StepOutcome(False, norm)
            _clip(self.inner.get_parameters(), self.config.grad_clip, norm)
            for group in self.inner.param_groups:
                group["lr"] = lr
                # Megatron applies wd_mult in its own scheduler only, which is not used here.
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
            self.inner.step_with_ready_grads()
            self._drop_gradients()
        return StepOutcome(True, norm)

    def tensors(self) -> Iterator[Tensor]:
        for group in self.inner.shard_fp32_from_float16_groups:
            yield from group
        for state in self.inner.optimizer.state.values():
            yield state["exp_avg"]
            yield state["exp_avg_sq"]

    def sharded_state_dict(self, model_state: dict[str, Any], loading: bool) -> Any:
        with shim.cuda_means_cpu(self.device):
            states = room_for_states if loading else gather_states
            self.inner.get_parameter_state_dp_zero = lambda **_: states(self.inner)
            state = self.inner.sharded_state_dict(model_state, is_loading=loading, metadata=CHECKPOINT_METADATA)
            del self.inner.get_parameter_state_dp_zero
        if not loading:
            own_storage(state["param_state"])
        return state

    def load(self, state: Any, read: Callable[[Any], Any]) -> None:
        values = state.pop("param_state")
        with shim.cuda_means_cpu(self.device):
            self.inner.load_state_dict(read(state))
            self.inner._set_main_param_and_optimizer_states = self._copy_states
            for name in STATES:
                part = {index: {name: of_param.pop(name)} for index, of_param in values.items()}
                self.inner.load_parameter_state_from_fully_reshardable(read({"param_state": part})["param_state"])
                del part
                gc.collect()  # torch's planners hold a state in cycles, each of which is gigabytes
            del self.inner._set_main_param_and_optimizer_states
        # Megatron gives every parameter the same step tensor, which would then advance once per parameter.
        for slot in self.inner.optimizer.state.values():
            slot["step"] = slot["step"].clone()

    @torch.no_grad()
    def _copy_states(self, model_param: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
        """Megatron's own version asks the checkpoint for a `step` tensor, which it never holds."""
        group, order = self.inner.model_param_group_index_map[model_param]
        main_param = self.inner.optimizer.param_groups[group]["params"][order]
        for name, values in tensors.items():
            (main_param if name == "param" else self.inner.optimizer.state[main_param][name]).copy_(values)

    def _drop_gradients(self) -> None:
        for param in self.inner.get_parameters():
            param.grad = None


# `fully_reshardable` gathers each state in the model's own shape on DP rank 0, over gloo, through host memory.
CHECKPOINT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def _megatron_config(config: Config) -> MegatronOptimizerConfig:
    wanted, bf16 = config.train.optimizer, config.model.dtype == "bfloat16"
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=wanted.lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.betas[0],
        adam_beta2=wanted.betas[1],
        adam_eps=wanted.eps,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=wanted.grad_clip,
    )


def _use_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """One pass over memory instead of a dozen, on CPU and CUDA; the arithmetic is the same."""
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the state now, where the saver can see it, rather than in the first step or load."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def _clip(params: list[Tensor], limit: float, norm: float) -> None:
    """Scale gradients so that the global norm is at most `limit` (0: no limit)."""
    if limit > 0 and norm > limit:
        torch._foreach_mul_([p.grad for p in params if p.grad is not None], limit / (norm + 1e-6))
