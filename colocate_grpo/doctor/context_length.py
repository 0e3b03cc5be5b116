"""The longest prompt and answer, of training and evaluation, against the model's positions."""

from __future__ import annotations

from colocate_grpo.doctor.finding import Context, Finding, fail, ok
from colocate_grpo.errors import UserError
from colocate_grpo.train.shape import ModelShape


def check(context: Context) -> Finding:
    config = context.required_config
    found = context.model_config
    if isinstance(found, UserError):
        return ok("not compared: the model's shape is not known (see memory_plan)")
    positions = ModelShape.from_hf(found).max_positions
    prompt, answer = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    lengths = {"rollout.max_new_tokens": prompt + answer} | {
        f"eval.sets.{i}.max_new_tokens": prompt + (s.max_new_tokens or answer) for i, s in enumerate(config.eval.sets)
    }
    limit = config.rollout.sglang.get("context_length") or positions
    over = [f"{key}: {length:,}" for key, length in lengths.items() if length > min(limit, positions)]
    if over:
        return fail(
            f"longer than the context of {min(limit, positions):,} tokens with {prompt:,} of prompt: {'; '.join(over)}",
            f"at most {min(limit, positions) - prompt:,} new tokens, or a smaller data.max_prompt_tokens",
        )
    return ok(f"longest sequence {max(lengths.values()):,} of {min(limit, positions):,} positions")
