"""The demo's recipe: nothing leaks, nothing is random, and a clean teacher is always right."""

from __future__ import annotations

import json
import random

import pytest

from colocate_grpo.config import DataConfig, EvalSet
from colocate_grpo.data import load_eval_set, load_prompts, load_tokenizer
from colocate_grpo.demo.recipe import make_demo
from colocate_grpo.demo.task import HELD_OUT, Problem, Teacher, split
from colocate_grpo.demo.tokenizer import build_tokenizer
from colocate_grpo.demo.warmup import WarmUp
from colocate_grpo.reward.grade import grade_response

SHORT = WarmUp(clean_steps=2, careless_steps=2, batch=4)


def graded(problem: Problem, teacher: Teacher, rng: random.Random) -> bool:
    return grade_response(teacher.answer(problem, rng), problem.label, answer_scope="after_think").score == 1.0


def test_held_out_sums_are_never_trained_on_in_either_order():
    training, held_out = split()
    assert len(held_out) == len(set(held_out)) == HELD_OUT
    assert len(training) == len(set(training)) == 7593
    seen = {frozenset((p.a, p.b)) for p in training}
    assert not seen & {frozenset((p.a, p.b)) for p in held_out}


def test_teachers():
    rng = random.Random(0)
    problems = split()[0][:400]
    assert all(graded(p, Teacher(), rng) for p in problems)
    guesses = sum(graded(p, Teacher(guess=1.0), rng) for p in problems) / 400
    slips = sum(graded(p, Teacher(slip=0.15), rng) for p in problems) / 400
    assert 0.1 < guesses < 0.3  # 2 of 10 guesses are right
    assert 0.65 < slips < 0.8  # 0.85 ** 2 = 0.72


def test_the_tokenizer_spells_a_whole_conversation_in_few_tokens():
    tokenizer = build_tokenizer()
    problem = Problem(47, 85)
    messages = [{"role": "user", "content": problem.prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = Teacher().answer(problem, random.Random(0))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer(answer)["input_ids"], skip_special_tokens=True) == answer
    assert (len(tokenizer(text)["input_ids"]), len(tokenizer(answer)["input_ids"])) == (26, 28)
    strange = "naïve 日本 \U0001d54f\n\t<think>"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return [make_demo(tmp_path_factory.mktemp(name), seed, SHORT) for name, seed in (("a", 3), ("b", 3), ("c", 4))]


def test_the_same_seed_gives_the_same_bytes(made):
    def content(paths):
        files = [*sorted(paths.model.iterdir()), paths.train, paths.evaluation]
        return {f.name: f.read_bytes() for f in files}

    first, again, other = map(content, made)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(first)
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_its_files_are_what_the_product_reads(made):
    paths = made[0]
    settings = DataConfig.model_validate({"train": str(paths.train)})
    tokenizer = load_tokenizer(paths.model)
    train = load_prompts(settings, tokenizer)
    spec = EvalSet.model_validate({"name": "held_out", "path": str(paths.evaluation)})
    held_out = load_eval_set(spec, settings, tokenizer, train)
    assert (len(train.rows), len(held_out.rows), train.duplicates) == (7593, HELD_OUT, 0)
    assert json.loads((paths.model / "config.json").read_text())["model_type"] == "qwen3"
    assert not list(paths.model.parent.glob("*.partial"))
