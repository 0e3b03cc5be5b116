"""What the step needs of an optimizer, and the choice between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from colocate_grpo.config import Config
from colocate_grpo.train.masters import MasterAdamW
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.schedule import StepOutcome
from colocate_grpo.train.stochastic import StochasticAdamW


class Optimizer(Protocol):
    """What the step needs of an optimizer. All methods are collective."""

    def step(self, lr: float) -> StepOutcome:
        """Apply the reduced gradients of DDP's buffers; a non-finite norm leaves everything as it was."""

    def tensors(self) -> Iterator[Tensor]:
        """Every state tensor: moments, and masters where they are not the weights themselves."""

    def sharded_state_dict(self, model_state: dict[str, Any], loading: bool) -> Any:
        """State for dist_checkpointing, in the model's own shapes, loadable under another TP and DP."""

    def load(self, state: Any, read: Callable[[Any], Any]) -> None:
        """Take what `read` finds in the checkpoint for `state` of `sharded_state_dict`, whole or part by part."""


def build_optimizer(config: Config, ddp: DistributedDataParallel, parallel: Parallel) -> Optimizer:
    """The optimizer named by `train.optimizer.kind`, its state allocated."""
    kinds: dict[str, Callable[[Config, DistributedDataParallel, Parallel], Optimizer]] = {
        "adamw": MasterAdamW,
        "sr_adamw": StochasticAdamW,
    }
    return kinds[config.train.optimizer.kind](config, ddp, parallel)
