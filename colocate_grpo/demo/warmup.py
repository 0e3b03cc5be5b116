"""The demo's warm-up: supervised steps on a teacher's answers, first clean ones, then careless ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from colocate_grpo.demo.task import Problem, Teacher

VOCAB = 320
IGNORED = -100


@dataclass(frozen=True)
class WarmUp:
    """How the model is brought to a low, but not hopeless, accuracy."""

    clean_steps: int = 300
    careless_steps: int = 150
    batch: int = 32
    lr: float = 3e-3
    ramp: int = 50
    threads: int = 1  # the products are too small for more to be worth a fight over busy cores

    def teacher(self, step: int) -> Teacher:
        return Teacher() if step < self.clean_steps else Teacher(guess=0.5, slip=0.15)

    def lr_at(self, step: int) -> float:
        """Linear ramp, then a cosine down to a tenth."""
        decay = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return self.lr * min(1.0, (step + 1) / self.ramp) * decay

    @property
    def steps(self) -> int:
        return self.clean_steps + self.careless_steps


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 434,944 parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    seed: int,
    plan: WarmUp,
    on_step: Callable[[int, float], None],
) -> None:
    """Train in place; the same seed gives the same bits. `on_step(step, loss)` after each step."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.01, betas=(0.9, 0.95))
    model.train()
    for step, (ids, labels) in enumerate(_batches(tokenizer, problems, seed, plan)):
        optimizer.param_groups[0]["lr"] = plan.lr_at(step)
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, loss.item())
    torch.set_num_threads(before)


def _batches(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], seed: int, plan: WarmUp
) -> Iterator[tuple[Tensor, Tensor]]:
    rng = random.Random(seed)
    prompt_ids = {p: _prompt_ids(tokenizer, p) for p in problems}
    for step in range(plan.steps):
        chosen = [rng.choice(problems) for _ in range(plan.batch)]
        answers = [plan.teacher(step).answer(p, rng) + "<|im_end|>" for p in chosen]
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
        yield _padded([prompt_ids[p] for p in chosen], answer_ids, tokenizer.pad_token_id)


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    messages = [{"role": "user", "content": problem.prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _padded(prompts: list[list[int]], answers: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded ids [batch, longest], and labels with everything but the answers ignored."""
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), longest), pad)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels
