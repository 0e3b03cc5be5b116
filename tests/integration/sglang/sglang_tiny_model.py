"""A tiny Qwen3 with random weights, and a weight source over it in place of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from colocate_grpo.weights.hf import tensor_checksum

EOS = 1
VOCABULARY = 300  # no multiple of SGLang's padding
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}


def build(seed: int, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Random weights, large enough that different seeds give different texts."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(dtype).eval()


def save(directory: Path) -> Path:
    """A model directory as a user has it. Its weights (seed 0) are none of those that tests push."""
    build(0).save_pretrained(directory)
    return directory


class Source:
    """`hf_buckets` and `checksums` of a model, as the trainer gives them."""

    def __init__(self, model: Qwen3ForCausalLM):
        self.tensors = {n: p.detach() for n, p in model.named_parameters()}

    def hf_buckets(self, max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        bucket: list[tuple[str, torch.Tensor]] = []
        for item in self.tensors.items():
            if bucket and sum(t.nbytes for _, t in [*bucket, item]) > max_bytes:
                yield bucket
                bucket = []
            bucket.append(item)
        yield bucket

    def checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}
