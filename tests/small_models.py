"""Small random models of every family, trajectories for them, and the loss written out in plain transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from colocate_grpo.config import Config
from colocate_grpo.trajectory import Trajectory, Verdict

VOCAB = 500  # no multiple of 64: the trainer pads it
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def build(family: str, **sizes: Any) -> PreTrainedModel:
    """A random fp32 model whose norms and biases are not trivial. Qwen3 and Qwen2 are tied, Llama is not."""
    settings = {**SIZES, **sizes}
    torch.manual_seed(7)
    if family == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**settings, tie_word_embeddings=True))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**settings, tie_word_embeddings=True))
    else:
        settings.setdefault("rope_parameters", LLAMA3_ROPE)
        model = LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=False))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                param.add_(torch.randn_like(param) * 0.2)
            else:
                param.mul_(3.0)
    return model


def write(family: str, directory: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    build(family, **sizes).to(dtype).save_pretrained(directory)
    return directory


def make_config(model_dir: Path, **sections: Any) -> Config:
    """A configuration for the trainer alone, on the CPU."""
    values: dict[str, Any] = {
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"train": "unused.jsonl"},
        "run": {"device": "cpu", "steps": 100, "threads": 1},
        "rollout": {"max_new_tokens": 2048},
        "train": {"recompute": False},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(values)


def make_trajectory(
    rng: random.Random, prompt: int, response: int, index: int = 0, group: int = 0, score: float | None = None
) -> Trajectory:
    """Random tokens; rollout log-probs near those of a uniform policy."""
    length = prompt + response
    return Trajectory(
        prompt_id=f"p{group}",
        group_id=group,
        sample_index=index,
        seed=0,
        token_ids=[rng.randrange(VOCAB) for _ in range(length)],
        loss_mask=[0] * prompt + [1] * response,
        rollout_logprobs=[0.0] * prompt + [-6.2 + rng.uniform(-0.3, 0.3) for _ in range(response)],
        weight_versions=[],
        status="completed",
        verdict=Verdict(rng.random() if score is None else score, "correct"),
    )


def make_batch(seed: int, groups: int = 4, size: int = 4, longest: int = 40) -> list[Trajectory]:
    rng = random.Random(seed)
    return [
        make_trajectory(rng, rng.randint(2, longest // 2), rng.randint(1, longest), i, g)
        for g in range(groups)
        for i in range(size)
    ]


def plain_logprobs(
    model: PreTrainedModel, trajectory: Trajectory, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens and the entropies there, one sequence alone, from full logits."""
    ids = torch.tensor([trajectory.token_ids])
    logits = model(ids).logits[0].float() / temperature
    log_p = F.log_softmax(logits, dim=-1)
    positions = torch.tensor(trajectory.loss_mask).nonzero().flatten()
    log_p = log_p[positions - 1]
    targets = ids[0, positions]
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_loss(
    model: PreTrainedModel,
    batch: Sequence[Trajectory],
    advantages: Sequence[float],
    aggregation: str = "token_mean",
    temperature: float = 1.0,
) -> torch.Tensor:
    """Clipped loss (0.2, 0.28) of a batch against the rollout's own log-probs, sequence by sequence."""
    tokens = sum(t.response_length for t in batch)
    total = torch.zeros(())
    for trajectory, advantage in zip(batch, advantages, strict=True):
        logprob, _ = plain_logprobs(model, trajectory, temperature)
        old = torch.tensor([p for p, m in zip(trajectory.rollout_logprobs, trajectory.loss_mask, strict=True) if m])
        ratio = (logprob - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        weight = {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (len(batch) * trajectory.response_length),
            "constant": 1 / (len(batch) * 2048),
        }[aggregation]
        total = total + loss.sum() * weight
    return total
