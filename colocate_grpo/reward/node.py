"""The tree of a parsed answer: an operation and its arguments. Leaves hold exact fractions and names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple


class Node(NamedTuple):
    """`num` holds a Fraction or int, `sym` and `const` a name; every other operation holds nodes and options."""

    op: str
    args: tuple[Any, ...] = ()


def num(value: int | Fraction) -> Node:
    return Node("num", (value,))


ZERO, ONE, TWO, TEN, HALF = num(0), num(1), num(2), num(10), num(Fraction(1, 2))
INFINITY = Node("const", ("infty",))


def neg(node: Node) -> Node:
    """The negative, folded into numbers so that `-5` is a leaf."""
    if node.op == "num":
        return num(-node.args[0])
    return Node("mul", (num(-1), node))


def walk(node: Node) -> Iterator[Node]:
    """Every node of the tree, without recursion."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(arg for arg in top.args if isinstance(arg, Node))


def rebuild(node: Node, change: Callable[[Node], Node | None]) -> Node:
    """The tree with every node replaced for which `change` gives another one."""
    changed = change(node)
    if changed is not None:
        return changed
    return Node(node.op, tuple(rebuild(arg, change) if isinstance(arg, Node) else arg for arg in node.args))


def symbols(node: Node) -> set[str]:
    """Names of the free symbols; bound variables of sums count too, which does no harm."""
    return {top.args[0] for top in walk(node) if top.op == "sym"}


def has(node: Node, *ops: str) -> bool:
    """Whether any of the operations occurs in the tree."""
    return any(top.op in ops for top in walk(node))


def plus_minus(node: Node) -> list[Node]:
    """Both readings of a tree with `\\pm`; all signs of one tree go together, `\\mp` the other way."""
    if not has(node, "pm", "mp"):
        return [node]
    return [rebuild(node, partial(_signed, sign=sign)) for sign in (1, -1)]


def _signed(node: Node, sign: int) -> Node | None:
    if node.op not in ("pm", "mp"):
        return None
    inner = rebuild(node.args[0], partial(_signed, sign=sign))
    return inner if (sign == 1) == (node.op == "pm") else neg(inner)
