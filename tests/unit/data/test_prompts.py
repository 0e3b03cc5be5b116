"""From rows to prompts: rendering, policies, overlap, fingerprints."""

from __future__ import annotations

import json

import pytest

from colocate_grpo.config import EvalSet
from colocate_grpo.data import eos_ids, load_eval_set, load_prompts, load_tokenizer
from colocate_grpo.errors import DataError

BOX = " Put it in \\boxed{}."


def test_a_prompt_is_rendered_by_the_chat_template_and_tokenised_as_it_stands(write, settings, tokenizer):
    loaded = load_prompts(settings(write({"problem": "1 + 1?", "answer": 2, "source": "s"})), tokenizer)
    (prompt,) = loaded.rows
    assert prompt.text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == prompt.token_ids[0]
    assert (prompt.label, prompt.metadata) == ("2", {"source": "s"})


def test_system_prompt_suffix_and_thinking_switch(write, settings, tokenizer):
    path = write(
        {"prompt": "plain", "label": 1},
        {"prompt": "has \\boxed{}", "label": 1},
        {"prompt": "ends with Answer: $Answer", "label": 1},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}], "label": 1},
    )
    config = settings(path, system="S", prompt_suffix=BOX, chat_template_kwargs={"enable_thinking": False})
    texts = [p.text for p in load_prompts(config, tokenizer).rows]
    start, end = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert texts == [
        f"{start}S<|im_end|>\n<|im_start|>user\nplain{BOX}{end}",
        f"{start}S<|im_end|>\n<|im_start|>user\nhas \\boxed{{}}{end}",
        f"{start}S<|im_end|>\n<|im_start|>user\nends with Answer: $Answer{end}",
        f"{start}own<|im_end|>\n<|im_start|>user\nu{BOX}{end}",
    ]


def test_the_suffix_goes_to_the_last_user_message(write, settings, tokenizer):
    turns = [("user", "first"), ("assistant", "reply"), ("user", "second")]
    path = write({"prompt": [{"role": r, "content": c} for r, c in turns], "label": 1})
    (prompt,) = load_prompts(settings(path, prompt_suffix=BOX), tokenizer).rows
    assert [m["content"] for m in prompt.messages] == ["first", "reply", "second" + BOX]


def test_duplicates_are_counted_and_keep_their_own_ids(write, settings, tokenizer):
    path = write(*[{"prompt": p, "label": 1} for p in ("a", "b", "a", " a\n", "a")])
    loaded = load_prompts(settings(path), tokenizer)
    assert len(loaded.rows) == 5
    assert loaded.duplicates == 3
    assert len({p.id for p in loaded.rows}) == 5


def test_overlong_prompts_are_refused_or_dropped_with_counts(write, settings, tokenizer):
    path = write(*[{"prompt": "x" * n, "label": 1} for n in (5, 80, 10, 90)])
    with pytest.raises(DataError, match=r"2 of 4 prompts are longer .* \(64\); line 2 has 88, the longest has 98"):
        load_prompts(settings(path, max_prompt_tokens=64), tokenizer)
    loaded = load_prompts(settings(path, max_prompt_tokens=64, overlong_prompts="drop"), tokenizer)
    assert (len(loaded.rows), loaded.dropped) == (2, 2)
    with pytest.raises(DataError, match="every prompt is longer"):
        load_prompts(settings(path, max_prompt_tokens=4, overlong_prompts="drop"), tokenizer)


def test_overlap_of_training_and_evaluation_is_refused_unless_allowed(write, settings, tokenizer, caplog):
    train = write(*[{"prompt": f"problem {i}", "label": i} for i in range(10)])
    test = write(*[{"prompt": f"problem  {i}\n", "label": i} for i in range(7, 12)], name="test.jsonl")
    spec = EvalSet.model_validate({"name": "t", "path": str(test)})
    config = settings(train)
    prompts = load_prompts(config, tokenizer)
    with pytest.raises(DataError, match=r"3 of 5 problems of evaluation set 't' .*allow_eval_overlap=true"):
        load_eval_set(spec, config, tokenizer, prompts)
    allowed = settings(train, allow_eval_overlap=True)
    assert len(load_eval_set(spec, allowed, tokenizer, prompts).rows) == 5
    assert "3 of 5 problems" in caplog.text


def test_the_fingerprint_follows_content_not_place(write, settings, tokenizer):
    def fingerprint(*rows, name="data.jsonl", **values):
        return load_prompts(settings(write(*rows, name=name), **values), tokenizer).fingerprint

    rows = [{"prompt": f"q{i}", "label": i} for i in range(4)]
    base = fingerprint(*rows)
    assert fingerprint(*rows, name="other.jsonl") == base
    assert fingerprint(*rows, limit=4) == base
    assert len({base, fingerprint(*rows, system="s"), fingerprint(*rows[::-1]), fingerprint(*rows, limit=3)}) == 4
    changed = [*rows[:3], {"prompt": "q3", "label": 4}]
    assert fingerprint(*changed) != base


def test_all_end_tokens_are_found(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_ids(tmp_path, tokenizer) == tuple(sorted({7, tokenizer.eos_token_id}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert eos_ids(tmp_path, tokenizer) == tuple(sorted({3, 7, 9, tokenizer.eos_token_id}))


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[2]]}'])
def test_a_broken_generation_config_is_one_line(tmp_path, tokenizer, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=r"generation_config\.json") as error:
        eos_ids(tmp_path, tokenizer)
    assert "\n" not in str(error.value)


def test_a_model_without_any_end_token_is_refused(tmp_path, tokenizer):
    class Endless:
        eos_token_id = None

    with pytest.raises(DataError, match="no end-of-sequence token"):
        eos_ids(tmp_path, Endless())


def test_a_directory_without_tokenizer(tmp_path):
    with pytest.raises(DataError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no directory"):
        load_tokenizer(tmp_path / "missing")


def test_without_chat_template_a_prompt_is_plain_text(write, settings, tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    base = load_tokenizer(tmp_path / "base")
    (prompt,) = load_prompts(settings(write({"prompt": "plain", "label": 1})), base).rows
    assert prompt.text == "plain"
    with pytest.raises(DataError, match="no chat template"):
        load_prompts(settings(write({"prompt": "plain", "label": 1}), system="s"), base)


def test_a_template_that_refuses_is_a_data_error(write, settings, tokenizer):
    refusing = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    refusing.chat_template = "{{ raise_exception('only one role here') }}"
    with pytest.raises(DataError, match="only one role here"):
        load_prompts(settings(write({"prompt": "q", "label": 1})), refusing)
