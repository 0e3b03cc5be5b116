"""The tokenizer: all EOS ids, what its chat template does with earlier reasoning, and the thinking mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colocate_grpo.data import eos_ids, load_tokenizer, render
from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.errors import DataError

PROBE = "reasoning-of-the-first-turn"
DIALOGUE = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": f"<think>\n{PROBE}\n</think>\n\nfirst answer"},
    {"role": "user", "content": "second question"},
]


def check(context: Context) -> Finding:
    directory = context.model_dir
    if directory is None:
        return ok(f"{context.required_config.model.path} is not here yet")
    try:
        tokenizer = load_tokenizer(directory)
        eos = eos_ids(directory, tokenizer)
        notes = _template_notes(tokenizer, context)
    except DataError as error:  # a finding, not the end of the other checks
        return fail(str(error), "copy tokenizer.json and tokenizer_config.json of the model")
    out_of_range = [i for i in eos if i >= vocabulary(directory)]
    if out_of_range:
        return fail(f"EOS ids {out_of_range} are outside the vocabulary", "the tokenizer belongs to another model")
    what = f"EOS ids {list(eos)} ({', '.join(tokenizer.convert_ids_to_tokens(list(eos)))}); {'; '.join(notes)}"
    if tokenizer.pad_token_id is not None and [tokenizer.pad_token_id] == list(eos):
        return warn(what, "padding and end of text are the same token: never mask by the padding id")
    return ok(what)


def vocabulary(directory: Path) -> int:
    return json.loads((directory / "config.json").read_text())["vocab_size"]


def _template_notes(tokenizer: Any, context: Context) -> list[str]:
    if not tokenizer.chat_template:
        return ["no chat template: prompts are plain text"]
    settings = context.required_config.data
    drops = PROBE not in render(DIALOGUE, tokenizer, settings)
    notes = [f"template {'drops' if drops else 'keeps'} earlier reasoning"]
    plain = settings.model_copy(update={"chat_template_kwargs": {}})
    modes = [
        render(DIALOGUE[:1], tokenizer, plain.model_copy(update={"chat_template_kwargs": {"enable_thinking": on}}))
        for on in (True, False)
    ]
    if modes[0] == modes[1]:
        return [*notes, "no thinking switch"]
    now = render(DIALOGUE[:1], tokenizer, settings)
    return [*notes, f"thinking {'on' if now == modes[0] else 'off' if now == modes[1] else 'set by the template'}"]
