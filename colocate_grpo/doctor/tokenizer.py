"""The tokenizer: all EOS ids, what its chat template does with earlier reasoning, and the thinking mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colocate_grpo.data import eos_ids, load_tokenizer, render
from colocate_grpo.doctor.finding import Context, Finding, fail, ok, warn
from colocate_grpo.errors import DataError

# Without any of them transformers makes an empty tokenizer up from the model's family, and says nothing.
FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
MEND = "copy tokenizer.json and tokenizer_config.json of the model"
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
    if not any((directory / name).is_file() for name in FILES):
        return fail(f"{directory} has none of {', '.join(FILES)}", MEND)
    try:
        tokenizer = load_tokenizer(directory)
        eos = eos_ids(directory, tokenizer)
        notes = _template_notes(tokenizer, context)
    except DataError as error:  # a finding, not the end of the other checks
        return fail(str(error), MEND)
    names = dict(zip(eos, tokenizer.convert_ids_to_tokens(list(eos)), strict=True))
    unknown = [i for i, name in names.items() if name is None or i >= vocabulary(directory)]
    if unknown:
        return fail(f"EOS ids {unknown} are outside the vocabulary", "the tokenizer belongs to another model")
    what = f"EOS ids {list(eos)} ({', '.join(names.values())}); {'; '.join(notes)}"
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
