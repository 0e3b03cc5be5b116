"""Names in front of answers: `x = 5`, `f(n) = n^2`, `m + n = 10`, `x = 5 + 6 = 11`."""

from __future__ import annotations

from collections.abc import Callable

from colocate_grpo.reward.evaluate import Undecided
from colocate_grpo.reward.node import ZERO, Node, has, rebuild, symbols, walk
from colocate_grpo.reward.scalar import STRUCTURES, same_scalar

_NAME_OPS = {"sym", "app", "const", "tuple"}


def drop_approximations(node: Node) -> Node:
    """`\\frac{1}{3} \\approx 0.333` is `\\frac{1}{3}`: what follows the sign is not exact."""
    if node.op != "rel" or "~" not in node.args[0]:
        return node
    count = node.args[0].index("~")
    members = node.args[1 : count + 2]
    if node.args[0] == ("~",) and members[0].op in ("sym", "app"):
        return Node("rel", (("=",), *node.args[1:]))
    return members[0] if count == 0 else Node("rel", (node.args[0][:count], *members))


def without_domain(pred: Node, gold: Node) -> tuple[Node, Node]:
    """`k\\pi, k \\in \\mathbb{Z}` without the domain of `k`, where the other side does not name it."""
    kept = [_values_of(node) for node in (pred, gold)]
    named = [values != node for values, node in zip(kept, (pred, gold), strict=True)]
    return (pred, gold) if named[0] == named[1] else (kept[0], kept[1])


def _values_of(node: Node) -> Node:
    if node.op != "list":
        return node
    values = [item for item in node.args[1:] if not is_membership(item)]
    domains = [item for item in node.args[1:] if is_membership(item)]
    used = set().union(*map(symbols, values))
    if not values or not all(symbols(domain.args[1]) <= used for domain in domains):
        return node
    return values[0] if len(values) == 1 else Node("list", (node.args[0], *values))


def assigned(node: Node) -> tuple[Node | None, Node]:
    """(name, value) of an equation that names a value, else (None, the node itself)."""
    if node.op != "rel":
        return None, node
    ops, members = node.args[0], node.args[1:]
    if is_membership(node) or (ops == ("==",) and members[0].op == "sym"):
        return members[0], members[1]
    value = members[-1]
    if set(ops) == {"="} and all(member.op == "sym" for member in members[:-1]) and not symbols(value):
        return members[0], value  # also `x = y = 2`
    if set(ops) == {"="} and _computes(members):
        return None, value
    if set(ops) != {"="} or not _consistent(members[1:]):
        return None, node
    if _names(members[0], value):
        return members[0], value
    # `2 = x`
    if len(members) == 2 and value.op == "sym" and not symbols(members[0]):
        return value, members[0]
    return None, node


def _computes(members: tuple[Node, ...]) -> bool:
    """`\\sqrt{12} = 2\\sqrt{3}`: two forms of one number; `0 = 0` computes nothing."""
    if len(set(members)) == 1 or any(_free_symbols(member) or has(member, *STRUCTURES) for member in members):
        return False
    return _consistent(members)


def _free_symbols(node: Node) -> set[str]:
    return symbols(node) - {top.args[1] for top in walk(node) if top.op in ("sum", "prod", "int", "lim")}


def is_membership(node: Node) -> bool:
    """`x \\in S`, which says no more than `S`; `1 + x \\in S` says something else."""
    if node.op != "rel" or node.args[0] != ("in",):
        return False
    left = node.args[1]
    return left.op == "sym" or (left.op == "tuple" and all(part.op == "sym" for part in left.args[2:]))


def _consistent(values: tuple[Node, ...]) -> bool:
    try:
        return all(value.op == values[-1].op == "tuple" or same_scalar(value, values[-1]) for value in values[:-1])
    except Undecided:
        return False


def _names(left: Node, value: Node) -> bool:
    """Whether the left side of an equation is a name of the right side, not half of an equation."""
    if left.op == "lim" or _is_derivative(left):
        return True
    if left.op in ("sum", "int") or (left.op == "mul" and len(left.args) == 2 and left.args[1].op == "rel"):
        return (bool(_free_symbols(left)) or has(left, "app")) and not symbols(value)  # `P(X = 2) = \\frac{1}{2}`
    if left.op == "mul" and len(left.args) == 2 and left.args[1].op == "tuple":  # `u(x, y) = x + y`
        return all(part.op == "sym" for part in (left.args[0], *left.args[1].args[2:]))
    if left.op == "mul" and len(left.args) == 2 and all(part.op == "sym" for part in left.args):
        return left.args[1].args[0] in symbols(value) or not symbols(value)  # `P(x) = x^2`, `AB = 5`
    if left.op in ("sym", "app"):
        return left not in (value,) and not (left.op == "sym" and left.args[0] in symbols(value))
    if left.op == "tuple":
        return value.op in ("tuple", "matrix") and all(part.op in _NAME_OPS for part in left.args[2:])
    if not symbols(left) or symbols(value) or value == ZERO or value.op in ("list", "set", "tuple"):
        return False
    return _unit_combination(left)


def _is_derivative(left: Node) -> bool:
    """`\\frac{dy}{dx}`"""
    if left.op != "mul" or len(left.args) != 2 or left.args[1].op != "inv":
        return False
    parts = (left.args[0], left.args[1].args[0])
    return all(part.op == "mul" and part.args[0] == Node("sym", ("d",)) and len(part.args) == 2 for part in parts)


def _unit_combination(left: Node) -> bool:
    """`m + n`, `\\frac{a}{b}`, `AB`, `\\sin x`: a quantity without constants of its own."""
    if left.op == "add":
        return all(_unit_combination(term) for term in left.args)
    return not has(left, "num", "rel") or left.op == "fn"


def compatible_names(pred: Node, gold: Node) -> Callable[[Node], Node] | None:
    """How to rename the value of `pred` so that it is comparable with the value of `gold`; None if not at all."""
    if pred == gold:
        return lambda value: value
    if pred.op == gold.op == "app" and pred.args[0] == gold.args[0]:
        return _renaming(pred.args[1], gold.args[1])
    kinds = {pred.op, gold.op}
    if kinds == {"sym", "app"} and Node("sym", ("y",)) in (pred, gold):
        return lambda value: value
    return None


def _renaming(old: Node, new: Node) -> Callable[[Node], Node] | None:
    if old.op != "sym" or new.op != "sym":
        return None
    return lambda value: rebuild(value, lambda top: new if top == old else None)
