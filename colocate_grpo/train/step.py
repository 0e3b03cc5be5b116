"""The trainer of one rank: from trajectories to new weights. All methods are collective."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from colocate_grpo.algorithm.loss import Denominators
from colocate_grpo.checkpoint.state import load_state, save_state
from colocate_grpo.config import Config
from colocate_grpo.memory.saver import Saver, SaverTag
from colocate_grpo.train.batch import MicroBatch, Sample, denominators, make_sample, make_samples, split_updates
from colocate_grpo.train.model import Policy, build_policy
from colocate_grpo.train.objective import Measures, objective
from colocate_grpo.train.optimizer import Optimizer, build_optimizer
from colocate_grpo.train.packing import CostModel, plan
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.peak import peak_bytes
from colocate_grpo.train.reference import Reference
from colocate_grpo.train.schedule import StepOutcome, learning_rate
from colocate_grpo.train.shape import ModelShape, read_hf_config, validate_model
from colocate_grpo.trajectory import Trajectory
from colocate_grpo.weights.hf import buckets, hf_tensors, load_hf, tensor_checksum


class Trainer:
    """Model, optimizer and the GRPO update of one rank."""

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        saver: Saver,
        shape: ModelShape,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        reference: Reference | None,
    ) -> None:
        self.config, self.parallel, self.saver, self.shape = config, parallel, saver, shape
        self.ddp, self.optimizer, self.reference = ddp, optimizer, reference
        self.cost = CostModel.of(shape)
        self.activation_peak = 0

    @classmethod
    def build(cls, config: Config, parallel: Parallel, saver: Saver, model_dir: Path) -> Trainer:
        """Model and optimizer on this rank's device, filled from a Hugging Face directory.

        Raises ConfigError or DataError when the model cannot be trained under this configuration.
        """
        shape = validate_model(config, read_hf_config(model_dir))
        policy = build_policy(shape, config, parallel)
        load_hf(policy, shape, model_dir, parallel.tp_rank, parallel.tp)
        ddp = wrap(policy, fp32_gradients=config.train.optimizer.kind == "adamw")
        del policy
        with saver.region("optimizer"):
            optimizer = build_optimizer(config, ddp, parallel)
        reference = Reference(ddp.buffers) if config.algorithm.kl.coef > 0 else None
        trainer = cls(config, parallel, saver, shape, ddp, optimizer, reference)
        saver.register("weights", trainer.weight_buffers)
        saver.register("gradients", trainer.grad_buffers, backup=False)
        saver.register("optimizer", trainer.optimizer_tensors)
        return trainer

    @property
    def policy(self) -> Policy:
        return self.ddp.module

    # -- the step ---------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[Trajectory] | None, step: int) -> dict[str, float]:
        """Train on a rollout; global rank 0 passes the whole batch, the others None.

        `train.updates_per_rollout` optimizer steps. Returns the same metrics on every rank; those of tokens are
        means over what was evaluated, which leaves out samples that were skipped for their advantage of 0.
        """
        samples = self._share(make_samples(batch, self.config) if batch is not None else [])
        started = time.monotonic()
        self._fill_old_logprobs(samples)
        logprob_time = time.monotonic() - started
        count = self.config.train.updates_per_rollout
        total, outcomes = Measures(), []
        for update, part in enumerate(split_updates(samples, count)):
            total.add(self.accumulate(part))
            lr = self.learning_rate(step * count + update)
            outcomes.append(self.optimizer.step(lr))
        metrics = self._metrics(total, outcomes, lr) | {"perf/log_probs_time": logprob_time}
        metrics["train/tokens"] = float(sum(len(s.rows) for s in samples))
        metrics["perf/train_tokens_per_s"] = total.packed_tokens / (time.monotonic() - started)
        return self._same_everywhere(metrics)

    def learning_rate(self, update: int) -> float:
        updates = self.config.run.steps * self.config.train.updates_per_rollout
        return learning_rate(self.config.train.optimizer, update, updates)

    def accumulate(self, samples: Sequence[Sample]) -> Measures:
        """Forward and backward of one optimizer step's samples; leaves the reduced gradient in DDP's buffers.

        Samples with advantage 0 are left out where nothing but the advantage makes a gradient; the
        denominators count them all the same. With nothing left, the forward pass alone is measured.
        """
        sizes = denominators(samples, self.config)
        algorithm = self.config.algorithm
        needed = [s for s in samples if s.advantage != 0.0 or algorithm.kl.coef > 0 or algorithm.entropy_coef > 0]
        self.ddp.zero_grad_buffer()
        total = Measures()
        for micro in self._microbatches(needed or samples, sizes):
            total.add(self._run_watched(micro, trains=bool(needed)))
        finalize_model_grads([self.ddp])
        return self._over_ranks(total)

    def _run(self, micro: MicroBatch, trains: bool) -> Measures:
        """Forward and backward of one micro-batch; the gradient is added to DDP's buffers."""
        with torch.set_grad_enabled(trains):
            logprob, entropy = self.ddp(micro.tokens, micro.segments, micro.rows, micro.targets)
            loss, sums = objective(self.config.algorithm, micro, logprob, entropy)
        if trains:
            loss.backward()
        return Measures.of(sums, micro)

    def _run_watched(self, micro: MicroBatch, trains: bool) -> Measures:
        """Run, and keep the peak of activations: on CUDA of every micro-batch, on CPU (slow) of the first one."""
        if self.parallel.device.type != "cuda" and self.activation_peak:
            return self._run(micro, trains)
        found: list[Measures] = []
        peak = peak_bytes(lambda: found.append(self._run(micro, trains)), self.parallel.device)
        self.activation_peak = max(self.activation_peak, peak)
        return found[0]

    def logprobs(self, batch: Sequence[Trajectory] | None) -> list[np.ndarray]:
        """Log-probs of the sampled tokens of every trajectory, in batch order, on every rank.

        Global rank 0 passes the batch. No gradient, at the temperature of the rollout.
        """
        samples = self._share([make_sample(t, i, 0.0) for i, t in enumerate(batch)] if batch is not None else [])
        return self._forward_logprobs(samples)

    def _microbatches(self, samples: Sequence[Sample], sizes: Denominators) -> Iterator[MicroBatch]:
        """This DP rank's share of `samples`, packed."""
        cap, parallel = self.config.train.max_tokens_per_microbatch, self.parallel
        shares = plan([s.length for s in samples], cap, parallel.dp, self.cost)
        for indices in shares[parallel.dp_rank]:
            members = [samples[i] for i in indices]
            yield MicroBatch.of(members, sizes, self.config.algorithm.aggregation, parallel.tp, parallel.device)

    @torch.no_grad()
    def _forward_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        mine: dict[int, np.ndarray] = {}
        for micro in self._microbatches(samples, denominators(samples, self.config)):
            logprob, _ = self.ddp(micro.tokens, micro.segments, micro.rows, micro.targets)
            mine |= {s.index: part for s, part in zip(micro.samples, micro.split(logprob), strict=True)}
        everyone: list[dict[int, np.ndarray]] = [{}] * self.parallel.world
        dist.all_gather_object(everyone, mine, group=self.parallel.control)
        found = {index: part for share in everyone for index, part in share.items()}
        return [found[s.index] for s in samples]

    def _fill_old_logprobs(self, samples: list[Sample]) -> None:
        """Old and reference log-probs, only where the algorithm needs them.

        One update a rollout: the policy is its own old one, so no pass. Several: computed before the first.
        Partial rollouts: the engine's own, since no one set of weights sampled the whole answer.
        """
        if self.config.rollout.partial.enabled:
            for sample in samples:
                sample.old_logprobs = sample.rollout_logprobs
        elif self.config.train.updates_per_rollout > 1:
            for sample, values in zip(samples, self._forward_logprobs(samples), strict=True):
                sample.old_logprobs = values
        if self.reference:
            with self.reference.in_place():
                for sample, values in zip(samples, self._forward_logprobs(samples), strict=True):
                    sample.reference_logprobs = values

    # -- between ranks ----------------------------------------------------------------------------------------

    def _share(self, samples: list[Sample]) -> list[Sample]:
        box = [samples]
        if self.parallel.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.parallel.control)
        return box[0]

    def _over_ranks(self, measures: Measures) -> Measures:
        values = measures.as_tensor().to(self.parallel.device)
        dist.all_reduce(values, group=self.parallel.dp_group)
        return Measures.from_tensor(values)

    def _same_everywhere(self, metrics: dict[str, float]) -> dict[str, float]:
        box = [metrics]
        if self.parallel.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.parallel.control)
        return box[0]

    def _metrics(self, total: Measures, outcomes: list[StepOutcome], lr: float) -> dict[str, float]:
        tokens = max(1.0, total.tokens)
        metrics = {
            "train/loss": total.loss / len(outcomes),
            "train/pg_clipfrac": total.clipped / tokens,
            "train/ppo_kl": total.ppo_kl / tokens,
            "train/entropy_loss": total.entropy / tokens,
            "train/train_rollout_logprob_abs_diff": total.rollout_difference / tokens,
            "train/grad_norm": sum(o.grad_norm for o in outcomes) / len(outcomes),
            "train/lr": lr,
            "train/skipped": float(sum(not o.applied for o in outcomes)),
            "train/packed_tokens": total.packed_tokens,
            "train/microbatches": total.microbatches,
        }
        metrics |= {f"memory/train/{name}_gib": size / 2**30 for name, size in self.memory_bytes().items()}
        if self.reference:
            metrics["train/kl_loss"] = total.reference_kl / tokens
        if self.config.algorithm.correction != "none":
            metrics["train/correction_mean"] = total.correction / tokens
            metrics["train/correction_frac"] = total.correction_changed / tokens
        return metrics

    # -- weights ----------------------------------------------------------------------------------------------

    def hf_buckets(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights under Hugging Face names, in lists of at most `max_bytes`, on every rank."""
        return buckets(self._hf_tensors(), max_bytes)

    def checksums(self) -> dict[str, str]:
        """Checksum of every full weight by Hugging Face name."""
        return {name: tensor_checksum(tensor) for name, tensor in self._hf_tensors()}

    def _hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return hf_tensors(dict(self.policy.named_parameters()), self.shape, self.parallel.tp_group)

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state; loadable under another TP and DP."""
        save_state(directory, self.policy, self.optimizer)

    def load(self, directory: Path) -> None:
        """Continue from `save`, bit for bit under the same TP and DP."""
        load_state(directory, self.policy, self.optimizer)

    # -- memory -----------------------------------------------------------------------------------------------

    def weight_buffers(self) -> list[Tensor]:
        """DDP's flat parameter buffers: every weight is a view into them."""
        return [buffer.param_data for buffer in self.ddp.buffers]

    def grad_buffers(self) -> list[Tensor]:
        """DDP's flat gradient buffers."""
        return [buffer.grad_data for buffer in self.ddp.buffers]

    def optimizer_tensors(self) -> list[Tensor]:
        """Moments, and fp32 masters where the weights are bf16."""
        return list(self.optimizer.tensors())

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank by tensor class; activations are the peak of one micro-batch seen so far."""
        owners = {"weights": self.weight_buffers, "gradients": self.grad_buffers, "optimizer": self.optimizer_tensors}
        sizes = {name: sum(tensor.nbytes for tensor in tensors()) for name, tensors in owners.items()}
        return sizes | {"activations_peak": self.activation_peak}

    def sleep(self, tags: Sequence[SaverTag]) -> None:
        """Give back the memory of `tags` (of weights, optimizer, gradients)."""
        for tag in tags:
            self.saver.pause(tag)

    def wake(self, tags: Sequence[SaverTag]) -> None:
        """Take it again, contents as before (gradients: zero)."""
        for tag in tags:
            self.saver.resume(tag)


def wrap(policy: Policy, fp32_gradients: bool) -> DistributedDataParallel:
    """Megatron's DDP: flat parameter and gradient buffers, gradients summed over DP."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32_gradients, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    return DistributedDataParallel(policy.config, settings, policy)
