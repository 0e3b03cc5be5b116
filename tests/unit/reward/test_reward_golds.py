"""Every gold of the public data sets equals itself and its rewritings, and not itself + 1."""

from __future__ import annotations

import re

import pytest
from reward_data import rows

from colocate_grpo.reward.grade import grade

FILES = ["math500.jsonl", "gsm8k_test200.jsonl", "dapo_math_sample.jsonl"]


def golds(name: str) -> list[str]:
    return sorted({row["answer"] for row in rows(f"math/{name}")})


def rewritings(gold: str) -> dict[str, str]:
    """Other spellings of the same answer."""
    forms = {
        "same": gold,
        "dollars": f"${gold}$",
        "display": f"$${gold}$$",
        "parentheses": rf"\({gold}\)",
        "brackets": rf"\[{gold}\]",
        "full stop": gold + ".",
        "spaces": f"  {gold} \n",
        "boxed": rf"\boxed{{{gold}}}",
        "dfrac": gold.replace(r"\frac", r"\dfrac"),
        "tfrac": gold.replace(r"\frac", r"\tfrac"),
        "displaystyle": r"\displaystyle " + gold,
        "negative spaces": gold.replace(",", r",\!") if re.fullmatch(r"[\d,]+", gold) else gold,
    }
    if re.fullmatch(r"-?\d+", gold):
        forms |= {
            "decimal": gold + ".0",
            "named": f"x = {gold}",
            "unit": gold + r"\text{ cm}",
            "text": rf"\text{{{gold}}}",
            "empty group": f"{{}}{gold}",
            "computed": f"{int(gold) - 3} + 3 = {gold}",
            "price": rf"\${gold}",
            "half of twice": rf"\frac{{{2 * int(gold)}}}{{2}}",
        }
    if r"\left" not in gold:
        forms["left right"] = gold.replace("(", r"\left(").replace(")", r"\right)")
    return forms


@pytest.mark.parametrize("name", FILES)
def test_gold_equals_itself_and_its_rewritings(name: str) -> None:
    failed = [
        (gold, form)
        for gold in golds(name)
        for form, text in rewritings(gold).items()
        if grade(text, gold).score != 1.0
    ]
    assert failed == []


@pytest.mark.parametrize("name", FILES)
def test_gold_does_not_equal_itself_plus_one(name: str) -> None:
    for gold in golds(name):
        for other in (f"{gold}+1", f"1+{gold}", f"({gold})+1", f"{gold} + 1"):
            assert grade(other, gold).score == 0.0, (other, gold)


@pytest.mark.parametrize("name", FILES)
def test_golds_are_told_apart(name: str) -> None:
    """Neighbours in sorted order, which look alike, are only equal when they are one number in two spellings."""
    texts = golds(name)
    plain = [re.sub(r"\^\\circ|,|\\!|\\(text|mbox)\{.*", "", text) for text in texts]
    pairs = [(texts[i], texts[i + 1]) for i in range(len(texts) - 1) if plain[i] != plain[i + 1]]
    assert len(pairs) > 30
    assert [pair for pair in pairs if grade(*pair).score == 1.0] == []


def test_integers_are_exact_whatever_their_type() -> None:
    assert grade("27", 27.0).score == 1.0
    assert grade("9007199254740993", 9007199254740992).score == 0.0
    assert grade("0.1", 0.1).score == 1.0
    assert grade("0.00001", 1e-05).score == 1.0
