"""Prompts in: rendered and checked once, then handed out in an order that survives a restart."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocate_grpo.config import DataConfig, EvalSet
from colocate_grpo.data_file import Message, Row, good_rows
from colocate_grpo.errors import DataError
from colocate_grpo.hub import resolve_data

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A rendered problem. `text` is what `token_ids` spells; `id` is unique in its set and stable between runs."""

    id: str
    token_ids: tuple[int, ...]
    label: str
    text: str
    messages: tuple[Message, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """What is asked, blanks normalised: the key of duplicates and of overlap between sets."""
        return " ".join(" ".join(m["content"] for m in self.messages if m["role"] != "system").split())


@dataclass(frozen=True)
class PromptSet:
    """All usable prompts of a file, and what was counted on the way."""

    path: str
    rows: tuple[Prompt, ...]
    duplicates: int
    dropped: int
    fingerprint: str


def load_tokenizer(model_dir: str | Path) -> Any:
    """The tokenizer of a model directory. Raises DataError when there is none."""
    from transformers import AutoTokenizer

    if not Path(model_dir).is_dir():
        raise DataError(f"model.path: no directory {model_dir}")
    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (
        OSError,
        ValueError,
        KeyError,
    ) as error:  # the ways in which transformers says that files are missing or odd
        raise DataError(f"model.path: {model_dir} has no usable tokenizer ({str(error).splitlines()[0]})") from error


def eos_ids(model_dir: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: of generation_config.json, of config.json and of the tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        found.update(_eos_ids_of(path) if path.is_file() else [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise DataError(f"model.path: {model_dir} names no end-of-sequence token, so no answer could ever end")
    return tuple(sorted(found))


def _eos_ids_of(path: Path) -> list[int]:
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise DataError(f"model.path: {path} is not JSON ({error})") from error
    value = settings.get("eos_token_id") if isinstance(settings, dict) else settings
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not isinstance(settings, dict) or not all(type(i) is int for i in ids):
        raise DataError(f"model.path: {path}: eos_token_id: {value!r} must be a token id or a list of them")
    return ids


def load_prompts(settings: DataConfig, tokenizer: Any) -> PromptSet:
    """The training prompts. Raises DataError for a file, a row or a prompt that cannot be used."""
    return _load(settings.train, settings.limit, settings, tokenizer)


def load_eval_set(spec: EvalSet, settings: DataConfig, tokenizer: Any, train: PromptSet) -> PromptSet:
    """An evaluation set, rendered as the training data. Refuses problems that are trained on, unless allowed."""
    loaded = _load(spec.path, spec.limit, settings, tokenizer)
    refuse_overlap(spec.name, loaded, train, settings.allow_eval_overlap)
    return loaded


def refuse_overlap(name: str, evaluation: PromptSet, train: PromptSet, allowed: bool) -> None:
    """Raise DataError (or warn, where it is allowed) when problems of an evaluation set are trained on."""
    trained = {prompt.question for prompt in train.rows}
    shared = [prompt for prompt in evaluation.rows if prompt.question in trained]
    if not shared:
        return
    message = (
        f"data.train: {len(shared)} of {len(evaluation.rows)} problems of evaluation set {name!r} "
        f"({evaluation.path}) are among the training prompts of {train.path}, for example {shared[0].question[:60]!r}"
    )
    if not allowed:
        raise DataError(f"{message}; remove them, or set data.allow_eval_overlap=true")
    logger.warning(message)


def messages_of(row: Row, settings: DataConfig) -> list[Message]:
    """The conversation of a row: system prompt first, the suffix added where nothing asks for an answer's form."""
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else [*row.prompt]
    if settings.prompt_suffix and not asks_for_form(messages):
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[last] = {**messages[last], "content": messages[last]["content"] + settings.prompt_suffix}
    if settings.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": settings.system})
    return messages


def asks_for_form(messages: Iterable[Message]) -> bool:
    """Does the conversation ask for a box or for `Answer:`?"""
    return any("\\boxed" in m["content"] or "Answer:" in m["content"] for m in messages)


def render(messages: Sequence[Message], tokenizer: Any, settings: DataConfig) -> str:
    """The text that the model continues. Raises DataError when the chat template refuses."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        if len(messages) > 1:
            raise DataError("model.path: the tokenizer has no chat template, so prompts must be plain text")
        return messages[0]["content"]
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **settings.chat_template_kwargs
        )
    except TemplateError as error:
        raise DataError(f"the chat template refuses the prompt: {error}") from error


def _load(path: str, limit: int | None, settings: DataConfig, tokenizer: Any) -> PromptSet:
    rows = good_rows(str(resolve_data(path)), settings.prompt_key, settings.label_key)[:limit]
    conversations = [messages_of(row, settings) for row in rows]
    texts = [render(messages, tokenizer, settings) for messages in conversations]
    ids = tokenize(texts, tokenizer)
    fits = [len(i) <= settings.max_prompt_tokens for i in ids]
    if not all(fits):
        _overlong(path, rows, ids, settings)
    seen: Counter[str] = Counter()
    rendered = zip(rows, conversations, texts, ids, fits, strict=True)
    prompts = [_prompt(row, messages, text, tokens, seen) for row, messages, text, tokens, fit in rendered if fit]
    if not prompts:
        raise DataError(f"{path}: every prompt is longer than data.max_prompt_tokens ({settings.max_prompt_tokens})")
    duplicates = len(prompts) - len({prompt.question for prompt in prompts})
    if duplicates:
        logger.warning("%s: %d of %d prompts are duplicates", path, duplicates, len(prompts))
    return PromptSet(path, tuple(prompts), duplicates, len(rows) - len(prompts), _fingerprint(prompts))


def tokenize(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of rendered prompts; a chat template has written its special tokens already."""
    return tokenizer(list(texts), add_special_tokens=not tokenizer.chat_template)["input_ids"]


def _overlong(path: str, rows: Sequence[Row], ids: Sequence[Sequence[int]], settings: DataConfig) -> None:
    limit = settings.max_prompt_tokens
    long = [(row.line, len(i)) for row, i in zip(rows, ids, strict=True) if len(i) > limit]
    message = (
        f"{path}: {len(long)} of {len(rows)} prompts are longer than data.max_prompt_tokens ({limit}); "
        f"line {long[0][0]} has {long[0][1]}, the longest has {max(n for _, n in long)}"
    )
    if settings.overlong_prompts == "error":
        raise DataError(f"{message}; raise the limit, or set data.overlong_prompts=drop")
    logger.warning("%s; dropped", message)


def _prompt(row: Row, messages: list[Message], text: str, ids: list[int], seen: Counter[str]) -> Prompt:
    digest = hashlib.sha256(json.dumps([text, row.label]).encode()).hexdigest()[:16]
    seen[digest] += 1
    repeat = f"-{seen[digest]}" if seen[digest] > 1 else ""
    return Prompt(digest + repeat, tuple(ids), row.label, text, tuple(messages), row.metadata)


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    """Hash of what is trained on: rendered prompts and labels, in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.token_ids, prompt.label]).encode())
    return digest.hexdigest()[:16]


class Cursor:
    """Hands out prompts epoch after epoch, in an order that depends on the seed alone."""

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool) -> None:
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.by_id = {prompt.id: prompt for prompt in prompts.rows}
        self.epoch = 0
        self.next_index = 0
        self.returned: list[str] = []
        self._order = self._epoch_order()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts: those handed back first; an epoch's end is no gap."""
        taken = [self.by_id[name] for name in self.returned[:count]]
        self.returned = self.returned[count:]
        while len(taken) < count:
            if self.next_index == len(self._order):
                self.epoch, self.next_index = self.epoch + 1, 0
                self._order = self._epoch_order()
            taken.append(self.prompts.rows[self._order[self.next_index]])
            self.next_index += 1
        return taken

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Prompts that were taken and not used; they come first next time, in this order."""
        self.returned = [prompt.id for prompt in prompts] + self.returned

    def state(self) -> dict[str, Any]:
        """JSON state for `restore`."""
        return {
            "epoch": self.epoch,
            "next_index": self.next_index,
            "returned": list(self.returned),
            "seed": self.seed,
            "fingerprint": self.prompts.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError when the data is not the same."""
        if state["fingerprint"] != self.prompts.fingerprint:
            raise DataError(
                f"data.train: {self.prompts.path} has changed since the checkpoint "
                f"(fingerprint {state['fingerprint']} then, {self.prompts.fingerprint} now)"
            )
        assert state["seed"] == self.seed, "the seed is part of a run's identity"
        self.epoch, self.next_index = state["epoch"], state["next_index"]
        self.returned = list(state["returned"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        """Indices sorted by a hash: the same on every machine and with every version of Python."""
        size = len(self.prompts.rows)
        if not self.shuffle:
            return list(range(size))
        return sorted(range(size), key=lambda i: hashlib.sha256(f"{self.seed}/{self.epoch}/{i}".encode()).digest())
