"""The peer of test_step.py: `trl_steps.py MODEL TRAIN_JSONL OUT_JSON STEPS SEED`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from colocate_grpo.reward.grade import grade_response

PROMPTS, GROUP = 32, 8
PEAK_LR, WARM_UP, HORIZON, FLOOR = 1e-3, 5, 60, 0.1


def rewards(completions, label, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    texts = [text.removesuffix("<|im_end|>") for text in texts]
    return [grade_response(t, gold, answer_scope="whole").score or 0.0 for t, gold in zip(texts, label, strict=True)]


class Clock(TrainerCallback):
    """Wall-clock seconds and mean reward of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.rows.append({"seconds": time.perf_counter() - self.started, "reward": 0.0})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            self.rows[-1]["reward"] = logs["reward"]


def lr_factor(step: int) -> float:
    """Linear warm-up, then linear decay to a tenth, as configs/demo.yaml."""
    done = min(1.0, max(0, step - WARM_UP) / (HORIZON - WARM_UP))
    return min(1.0, (step + 1) / WARM_UP) * (1 - (1 - FLOOR) * done)


def main(model_dir: str, train: str, out: str, steps: int, seed: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = [json.loads(line) for line in Path(train).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": r["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for r in rows
    ]
    data = Dataset.from_dict({"prompt": prompts, "label": [r["label"] for r in rows]})
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    settings = GRPOConfig(
        output_dir=str(Path(out).parent / "trl"), per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        steps_per_generation=1, max_completion_length=48, temperature=1.0, max_steps=steps, beta=0.0, epsilon=0.2,
        epsilon_high=0.28, loss_type="dapo", max_grad_norm=1.0, use_cpu=True, bf16=False, report_to=[],
        logging_steps=1, save_strategy="no", gradient_checkpointing=False, seed=seed, disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=model, reward_funcs=rewards, args=settings, train_dataset=data, processing_class=tokenizer,
        optimizers=(optimizer, schedule), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    Path(out).write_text(json.dumps(clock.rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
