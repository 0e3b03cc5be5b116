"""The policy: Megatron's GPTModel built from a Hugging Face config, ending in the fused log-prob."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from colocate_grpo.config import Config
from colocate_grpo.train.attention import PackedCoreAttention, PackedSelfAttention, Segments
from colocate_grpo.train.logprob import VocabShard, token_logprobs
from colocate_grpo.train.mlp import GatedMLP
from colocate_grpo.train.parallel import Parallel
from colocate_grpo.train.shape import ModelShape
from colocate_grpo.weights.hf import entries

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that sequence parallelism may use: its weight is marked, so its gradient is summed over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Policy(GPTModel):
    """GPTModel over packed micro-batches. Its forward gives log-probs and entropies, never logits."""

    def __init__(self, transformer: TransformerConfig, shape: ModelShape, config: Config, parallel: Parallel) -> None:
        super().__init__(
            transformer,
            layer_spec(shape),
            vocab_size=shape.padded_vocab(parallel.tp),
            max_sequence_length=shape.max_positions,
            position_embedding_type="none",
            share_embeddings_and_output_weights=shape.tied,
            parallel_output=True,
        )
        self.shape = shape
        self.inverse_frequencies, self.rotary_scale = rotary_frequencies(shape, parallel.device)
        self.shard = VocabShard(
            group=parallel.tp_group,
            vocab=shape.vocab,
            sequence_parallel=transformer.sequence_parallel,
            chunk=config.train.logprob_chunk,
            temperature=config.rollout.temperature,
        )

    def hidden_states(self, tokens: Tensor, segments: Segments) -> Tensor:
        """tokens [t], t a multiple of TP -> final hidden states [t, h] (sequence parallel: [t / tp, h])."""
        embedded = self.embedding(input_ids=tokens[None], position_ids=None)
        rotary = self._rotary_table(segments.positions)
        out = self.decoder(embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=segments)
        return out.squeeze(1)

    def forward(self, tokens: Tensor, segments: Segments, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob of targets[i] after token rows[i], and the entropy there: two fp32 tensors [m]."""
        return token_logprobs(self.hidden_states(tokens, segments), self.output_weight, rows, targets, self.shard)

    def logits(self, tokens: Tensor, segments: Segments) -> Tensor:
        """Full logits of this rank's vocabulary shard, [t, padded vocabulary / tp]; for checks only."""
        hidden = self.hidden_states(tokens, segments)
        if self.shard.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.shard.group)
        return hidden @ self.output_weight.t()

    @property
    def output_weight(self) -> Tensor:
        return self.shared_embedding_or_output_weight() if self.shape.tied else self.output_layer.weight

    def _rotary_table(self, positions: Tensor) -> Tensor:
        """cos and sin [2, t, 1, head_dim] in the type of the activations."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        table = torch.stack((angles.cos(), angles.sin())) * self.rotary_scale
        return table[:, :, None, :].to(self.config.params_dtype)


def build_policy(shape: ModelShape, config: Config, parallel: Parallel) -> Policy:
    """A policy with undefined weights on this rank's device."""
    policy = Policy(transformer_config(shape, config, parallel), shape, config, parallel)
    _mark_sharded(policy, shape)
    return policy.to(parallel.device)


def _mark_sharded(policy: Policy, shape: ModelShape) -> None:
    """Megatron marks sharded parameters only when it also draws their values; unmarked ones would be counted as
    copies in the gradient norm, on TP rank 0 alone."""
    params = dict(policy.named_parameters())
    for entry in entries(shape):
        params[entry.param].tensor_model_parallel = entry.parts[0].dim is not None  # type: ignore[attr-defined]


def transformer_config(shape: ModelShape, config: Config, parallel: Parallel) -> TransformerConfig:
    dtype = DTYPES[config.model.dtype]
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel and parallel.tp > 1,
        use_cpu_initialization=parallel.device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        # Losses arrive divided by the global denominator: gradients are summed over DP, never averaged.
        calculate_per_token_loss=True,
        **(recompute if config.train.recompute else {}),  # type: ignore[arg-type]
    )


def layer_spec(shape: ModelShape) -> TransformerBlockSubmodules:
    """The one model spec of CPU and CUDA; needs neither transformer-engine nor apex."""
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm if shape.qk_norm else None,
            k_layernorm=RMSNorm if shape.qk_norm else None,
        ),
    )
    mlp = ModuleSpec(
        module=GatedMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * shape.layers, layer_norm=RMSNorm)


def rotary_frequencies(shape: ModelShape, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the scale of cos and sin, as transformers computes them."""
    if shape.rope["rope_type"] == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return (1.0 / shape.rope["rope_theta"] ** exponents).to(device), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Only the fields that the rotary functions read; Llama's class carries them for every family here.
    hf = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters=shape.rope,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[shape.rope["rope_type"]](hf, torch.device("cpu"))
    return frequencies.to(device), float(scale)
