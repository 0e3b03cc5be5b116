"""What Megatron really allocates for a whole model on one rank: on the meta device, in groups that exist by name only.

Arguments: output file, then `model tp dp optimizer` for each case. One process, seconds, no memory.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colocate_grpo.config import Config
from colocate_grpo.train import shim

META = torch.device("meta")
shim.guard_imports()
shim.install(torch.device("cpu"))
torch.cuda.current_device = lambda: META  # type: ignore[assignment,return-value]

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from colocate_grpo.plan.model_shape import read_model_config  # noqa: E402
from colocate_grpo.train.model import build_policy  # noqa: E402
from colocate_grpo.train.optimizer import build_optimizer  # noqa: E402
from colocate_grpo.train.parallel import Parallel  # noqa: E402
from colocate_grpo.train.shape import ModelShape  # noqa: E402
from colocate_grpo.train.step import wrap  # noqa: E402


def main(out: Path, cases: list[str]) -> None:
    # The optimizer asks for gloo twins of its groups, which it only uses to save.
    parallel_state.get_data_parallel_group_gloo = lambda *args, **kwargs: parallel_state.get_data_parallel_group()
    parallel_state.get_expert_data_parallel_group_gloo = parallel_state.get_data_parallel_group_gloo
    # It also asks for CUDA types by name, which meta tensors do not have.
    names = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    plain = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *args: names.get(tensor.dtype) or plain(tensor, *args)  # type: ignore
    results = {case: measure(*case.split(" ")) for case in cases}
    out.write_text(json.dumps(results))


def measure(name: str, tp: str, dp: str, kind: str) -> dict[str, int]:
    config = Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": f"hf:{name}", "dtype": "bfloat16" if kind != "fp32" else "float32"},
            "data": {"train": "unused"},
            "parallel": {"tp": int(tp), "dp": int(dp)},
            "train": {"optimizer": {"kind": "sr_adamw" if kind == "sr_adamw" else "adamw"}},
        }
    )
    parallel = join(config)
    shape = ModelShape.from_hf(read_model_config(config.model.path))
    policy = build_policy(shape, config, dataclasses.replace(parallel, device=META))
    ddp = wrap(policy, fp32_gradients=config.train.optimizer.kind == "adamw")
    optimizer = build_optimizer(config, ddp, parallel)
    sizes = {
        "weights": sum(b.param_data.nbytes for b in ddp.buffers),
        "gradients": sum(b.grad_data.nbytes for b in ddp.buffers),
        "optimizer": sum(t.nbytes for t in optimizer.tensors()),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return sizes


def join(config: Config) -> Parallel:
    """Rank 0 of a world whose other ranks do not exist: its collectives return at once."""
    world = config.parallel.world_size
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(config.parallel.tp, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    group: Any = dist.group.WORLD
    fields = {
        "rank": 0, "local_rank": 0, "world": world, "tp": config.parallel.tp, "dp": config.parallel.dp,
        "tp_rank": 0, "dp_rank": 0, "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "dp_group": parallel_state.get_data_parallel_group(), "control": group, "device": torch.device("cpu"),
        "store": FakeStore(),
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(Parallel)} == set(fields)
    return Parallel(**fields)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
