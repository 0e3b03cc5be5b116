"""The demo's tokenizer: byte-level BPE whose merges spell the words of the task, so that nothing has to be learnt."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("user", "assistant", "system", "What", "Put", " is", " in", " the", " answer", " +", " \\boxed{", "\\boxed{")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")  # plain added tokens, as in Qwen3
PIECES = r"\d| ?\\boxed\{| ?\p{L}+| \+|\s|[^\s\p{L}\d]"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The same bytes every time: the vocabulary is written down, not trained."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges()
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    """Each word is spelt from its left: (W, h), (Wh, a), (Wha, t)."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        spelt = "".join(piece for piece, _ in byte_level.pre_tokenize_str(word))
        for end in range(1, len(spelt)):
            merges[spelt[:end], spelt[end]] = None
    return list(merges)
