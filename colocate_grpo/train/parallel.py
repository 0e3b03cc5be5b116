"""Processes, groups and devices of the trainer, and the waiting that needs no collective."""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from colocate_grpo.config import Config, RunConfig
from colocate_grpo.errors import ConfigError
from colocate_grpo.nvidia import has_nvidia_card
from colocate_grpo.train import shim

POLL_SECONDS = 5.0
_generation = itertools.count()


def pick_device(config: Config) -> torch.device:
    """The device of this rank; `auto` is the CPU only where there is no NVIDIA device at all."""
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not has_nvidia_card()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"run.device: {wanted}, but torch {torch.__version__} cannot use a CUDA device here")
    if config.model.dtype == "float32":
        raise ConfigError("model.dtype: float32, but the packed attention of a GPU has bfloat16 only; set bfloat16")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@dataclass
class Parallel:
    """Where this rank stands. `control` is a gloo group over all ranks for host-side messages."""

    rank: int
    local_rank: int
    world: int
    tp: int
    dp: int
    tp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    control: dist.ProcessGroup
    device: torch.device
    store: dist.Store

    @classmethod
    def initialise(cls, config: Config) -> Parallel:
        """Join the process group (torchrun's environment, or one process) and build Megatron's groups.

        Raises ConfigError when the number of processes is not `parallel.tp * parallel.dp`.
        """
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world != config.parallel.world_size:
            raise ConfigError(
                f"parallel: tp={config.parallel.tp} x dp={config.parallel.dp} needs {config.parallel.world_size} "
                f"processes, but {world} were started"
            )
        device = pick_device(config)
        _set_device(device, config.run, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        shim.install(device)
        store = _open_store(rank, world, config.run.start_timeout)
        generation = next(_generation)  # keys of groups that this process left must not be met again
        _meet(dist.PrefixStore(f"meet/{generation}", store), rank, world, config.run.start_timeout)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"groups/{generation}", store),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=config.run.dist_timeout),
        )
        _initialise_megatron(config, device)
        control = dist.new_group(backend="gloo")
        assert isinstance(control, dist.ProcessGroup)
        return cls(
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world=world,
            tp=config.parallel.tp,
            dp=config.parallel.dp,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_group=parallel_state.get_data_parallel_group(),
            control=control,
            device=device,
            store=dist.PrefixStore(f"control/{generation}", store.clone()),
        )

    @property
    def is_main(self) -> bool:
        """True on global rank 0."""
        return self.rank == 0

    def announce(self, key: str, value: str = "1") -> None:
        """Let `wait_for(key)` return `value` on every rank. A key is announced once."""
        self.store.set(key, value)

    def wait_for(self, key: str, timeout: float) -> str:
        """Block until `key` was announced, with no collective outstanding.

        Every poll is a round trip to the store, so that a lost store ends the wait within seconds.
        Raises TimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"rank {self.rank} waited {timeout:.0f} s for {key!r}, which nobody announced")
            try:
                self.store.wait([key], datetime.timedelta(seconds=min(POLL_SECONDS, left)))
            except dist.DistStoreError:  # not announced yet: poll again
                continue
        return self.store.get(key).decode()

    def shutdown(self) -> None:
        """Leave all groups."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _set_device(device: torch.device, run: RunConfig, local_ranks: int) -> None:
    torch.set_num_threads(run.threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)


def _open_store(rank: int, world: int, timeout: float) -> dist.TCPStore:
    """The TCPStore of torchrun's agent, or our own when this is the only process."""
    limit = datetime.timedelta(seconds=timeout)
    if "MASTER_PORT" not in os.environ:
        assert world == 1, "more than one process needs torchrun's MASTER_ADDR and MASTER_PORT"
        return dist.TCPStore("127.0.0.1", _free_port(), is_master=True, timeout=limit)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=rank == 0 and not hosted, timeout=limit)


def _meet(store: dist.Store, rank: int, world: int, timeout: float) -> None:
    """Wait until every rank is here: what they load first takes different times, a collective's time-out is short."""
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(world)], datetime.timedelta(seconds=timeout))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _initialise_megatron(config: Config, device: torch.device) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tp,
        distributed_timeout_minutes=max(1, round(config.run.dist_timeout / 60)),
    )
    # Its "inference" tracker is the one that needs no CUDA generator; there is no dropout to draw for.
    tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed, inference_rng_tracker=device.type == "cpu")
