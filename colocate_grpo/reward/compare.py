"""Whether two parsed answers say the same: lists, tuples, sets, intervals, relations; single values in scalar.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from colocate_grpo.reward import realset
from colocate_grpo.reward.assignment import (
    assigned,
    compatible_names,
    drop_approximations,
    is_membership,
    without_domain,
)
from colocate_grpo.reward.equal import constant_ratio
from colocate_grpo.reward.evaluate import Undecided
from colocate_grpo.reward.node import INFINITY, Node, has, neg, plus_minus, symbols
from colocate_grpo.reward.scalar import STRUCTURES, same_scalar
from colocate_grpo.reward.vectors import combined, same_vectors

MAX_UNSORTED = 60  # items of an unordered list that are matched pair by pair

Item = tuple[Node | None, Node]  # name and value of `x = 1`; no name for `1`


def same_answer(pred: Node, gold: Node) -> bool:
    """Whether `pred` gives what `gold` asks for. Raises `Undecided` over the bounds of the evaluation."""
    pred, gold = without_domain(drop_approximations(pred), drop_approximations(gold))
    if pred == gold or _same_letters(pred, gold):
        return True
    if "choice" in (pred.op, gold.op) or _letter(gold):
        verdict = _same_choice(pred, gold)
        if verdict is not None:
            return verdict
    if _both_sets_of_reals(pred, gold):
        sets = realset.from_tree(_as_set(pred)), realset.from_tree(_as_set(gold))
        if sets[0] is not None and sets[1] is not None:
            return realset.same_set(sets[0], sets[1])
    if "rel" in (pred.op, gold.op) and (described := _describes(pred, gold)) is not None:
        return described
    return _same_items(pred, gold)


# -- multiple choice -------------------------------------------------------------------------------------------
def _letter(node: Node) -> str | None:
    """`C`, `(C)` and `c` name a choice; a symbol such as `x_1` or `n` does not."""
    if node.op == "choice":
        return node.args[0]
    name = node.args[0] if node.op in ("sym", "const") else ""
    return name if len(name) == 1 and name in "ABCDEFGHIJ" else None


def _same_choice(pred: Node, gold: Node) -> bool | None:
    wanted, given = _letter(gold), _letter(pred)
    if pred.op in ("sym", "const") and len(pred.args[0]) == 1 and pred.args[0] in "abcdefghij":
        given = pred.args[0].upper()
    if wanted and given:
        return wanted == given
    if gold.op == "choice" and gold.args[1] is not None:
        return same_answer(pred, gold.args[1])
    if pred.op == "choice" and pred.args[1] is not None:
        return same_answer(pred.args[1], gold)
    return None


def _same_letters(pred: Node, gold: Node) -> bool:
    """`A, C` are the choices `AC`."""
    kinds = {"list", "mul"}
    letters = [[_letter(part) if isinstance(part, Node) else "" for part in node.args] for node in (pred, gold)]
    if {pred.op, gold.op} != kinds or None in letters[0] + letters[1]:
        return False
    chosen = [sorted(filter(None, names)) for names in letters]
    return chosen[0] == chosen[1] and len(set(chosen[0])) == len(chosen[0])


# -- sets of real numbers --------------------------------------------------------------------------------------
_SET_OPS = {"union", "intersection", "minus", "numbers"}


def _is_inequality(node: Node) -> bool:
    return node.op == "rel" and any(op in ("<", "<=", ">", ">=", "!=") for op in node.args[0])


def _as_set(node: Node) -> Node:
    """A set as it may be written: `x \\in S`, or inequalities joined by `and` / `or`."""
    if is_membership(node):
        return _as_set(node.args[2])
    if node.op == "list" and _lists_sets(node):
        op = "union" if "or" in node.args[0] else "intersection" if _is_inequality(node.args[1]) else "union"
        result = node.args[1]
        for item in node.args[2:]:
            result = Node(op, (result, item))
        return result
    if node.op == "rel" and node.args[0] == ("!=",) and len(readings := plus_minus(node)) > 1:
        return Node("intersection", tuple(readings))
    return node


def _lists_sets(node: Node) -> bool:
    if all(_is_inequality(item) for item in node.args[1:]):
        return True
    return "or" in node.args[0] and all(item.op != "list" and _set_like(item) for item in node.args[1:])


def _set_like(node: Node) -> bool:
    node = _as_set(node)
    if node.op == "tuple":
        return len(node.args) == 4 and (node.args[:2] != ("(", ")") or (has(node, "const") and _unbounded(node)))
    return node.op in _SET_OPS or _is_inequality(node)


def _unbounded(node: Node) -> bool:
    return any(end in (INFINITY, neg(INFINITY)) for end in node.args[2:])


def _both_sets_of_reals(pred: Node, gold: Node) -> bool:
    if not (_set_like(pred) or _set_like(gold)):
        return False
    if _is_inequality(pred) and _is_inequality(gold) and symbols(pred) != symbols(gold):
        return False
    return all(_set_like(node) or _as_set(node).op in ("tuple", "set") for node in (pred, gold)) and _settled(
        pred, gold
    )


def _settled(pred: Node, gold: Node) -> bool:
    """Sets with symbolic ends are compared part by part instead."""
    try:
        return all(realset.from_tree(_as_set(node)) is not None for node in (pred, gold))
    except Undecided:
        return False


def _describes(pred: Node, gold: Node) -> bool | None:
    """Whether an inequality that is not linear, such as `x^2 < 4`, describes the set on the other side."""
    for relation, other in ((pred, gold), (gold, pred)):
        described = _set_of(other) if _is_inequality(relation) and not _other_variable(relation, other) else None
        if described is not None:
            return realset.describes(relation, described)
    return None


def _other_variable(relation: Node, other: Node) -> bool:
    return _is_inequality(other) and symbols(relation) != symbols(other)


def _set_of(node: Node) -> realset.RealSet | None:
    if not _set_like(node) and node.op != "tuple":
        return None
    try:
        return realset.from_tree(_as_set(node))
    except Undecided:
        return None


# -- lists -----------------------------------------------------------------------------------------------------
def items_of(node: Node) -> list[Item]:
    """The values that an answer lists, with their names, plus-minus expanded."""
    if node.op == "list":
        return [item for part in node.args[1:] for item in items_of(part)]
    if is_membership(node) and node.args[2].op == "set":
        return items_of(node.args[2])
    name, value = assigned(node)
    if value.op == "list":
        return items_of(value)
    if value.op == "set":
        return [(name, value)]
    return [(name, reading) for reading in _distinct(plus_minus(value))]


def _distinct(readings: list[Node]) -> list[Node]:
    if len(readings) == 2 and not has(readings[0], "sym") and _quiet(same_one, readings[0], readings[1]):
        return readings[:1]
    return readings


def _quiet(same: Callable[[Node, Node], bool], pred: Node, gold: Node) -> bool:
    try:
        return same(pred, gold)
    except Undecided:
        return False


def _same_items(pred: Node, gold: Node) -> bool:
    if pred.op == "rel" and gold.op == "rel":
        return _same_relations(pred, gold)
    left, right = items_of(pred), items_of(gold)
    if len(left) == len(right) == 1:
        return _same_single(left[0], right[0])
    if len(right) == 1 and pred.op == "list" and "or" in pred.args[0] and _all_same(left):
        return _same_single(left[0], right[0])
    if len(left) == 1 or len(right) == 1:
        return _list_against_one(left, right)
    if len(left) != len(right):
        return False
    return _same_lists(left, right)


def _all_same(items: list[Item]) -> bool:
    """`\\frac{1}{2} \\text{ or } 0.5` is one answer."""
    return all(name == items[0][0] and _quiet(same_one, value, items[0][1]) for name, value in items)


def _same_single(pred: Item, gold: Item) -> bool:
    if pred[0] is not None and gold[0] is not None and not compatible_names(pred[0], gold[0]):
        return False
    return same_one(pred[1], gold[1])


def _list_against_one(left: list[Item], right: list[Item]) -> bool:
    """`x = 1, y = 2` and `1, 2` are the tuple `(1, 2)`, and the list `1, 2` is the set `{1, 2}`."""
    many, one = (left, right[0][1]) if len(right) == 1 else (right, left[0][1])
    if one.op == "set":
        values = [value for _, value in many]
        return _same_multiset(values, _expanded(list(one.args)))
    if one.op == "tuple" and one.args[:2] == ("(", ")") and len(one.args) - 2 == len(many):
        parts = list(one.args[2:])
        return _same_ordered([value for _, value in many], parts)
    return False


def _same_lists(left: list[Item], right: list[Item]) -> bool:
    left_names, right_names = _distinct_names(left), _distinct_names(right)
    if left_names and right_names and set(left_names) == set(right_names):
        wanted = dict(zip(right_names, right, strict=True))
        return all(same_one(item[1], wanted[item[0]][1]) for item in left if item[0] is not None)
    values = [value for _, value in left], [value for _, value in right]
    if left_names and right_names:
        return False
    if left_names or right_names or any(value.op == "ellipsis" for value in values[0] + values[1]):
        return _same_ordered(*values)
    return _same_multiset(*values)


def _distinct_names(items: list[Item]) -> list[Node]:
    names = [name for name, _ in items if name is not None]
    return names if len(names) == len(items) == len(set(names)) else []


def _same_ordered(left: list[Node], right: list[Node]) -> bool:
    return len(left) == len(right) and all(same_one(a, b) for a, b in zip(left, right, strict=True))


def _same_multiset(left: list[Node], right: list[Node]) -> bool:
    if len(left) != len(right):
        return False
    common = Counter(left) & Counter(right)
    left, right = list((Counter(left) - common).elements()), list((Counter(right) - common).elements())
    if len(left) > MAX_UNSORTED:
        raise Undecided("long list")
    for value in left:
        match = next((other for other in right if _quiet(same_one, value, other)), None)
        if match is None:
            return False
        right.remove(match)
    return True


def _expanded(parts: list[Node]) -> list[Node]:
    return [value for part in parts for _, value in items_of(part)]


# -- one value against one value -------------------------------------------------------------------------------
def same_one(pred: Node, gold: Node) -> bool:
    """One value of a list against another."""
    pred, gold = combined(pred), combined(gold)
    if pred == gold:
        return True
    if pred.op == "set" and gold.op == "set":
        return _same_sets(pred, gold)
    if "set" in (pred.op, gold.op):
        one, other = (pred, gold) if pred.op == "set" else (gold, pred)
        return (
            len(one.args) == 1 and (other.op == "tuple" or other.op not in STRUCTURES) and same_one(one.args[0], other)
        )
    if _has_part(pred, gold, "tuple", "matrix"):
        return same_vectors(pred, gold, same_one) or _same_choose(pred, gold)
    if pred.op in _SET_OPS or gold.op in _SET_OPS:
        return _same_set_expressions(pred, gold)
    if "rel" in (pred.op, gold.op):
        return pred.op == gold.op and _same_relations(pred, gold)
    return same_scalar(pred, gold)


def _has_part(pred: Node, gold: Node, *ops: str) -> bool:
    """Whether one of the two is a vector or a product with one."""
    return any(
        node.op in ops or (node.op == "mul" and any(part.op in ops for part in node.args)) for node in (pred, gold)
    )


def _same_choose(pred: Node, gold: Node) -> bool:
    """`C(10, 3)` is a point with a name, and a number of combinations."""
    for point, value in ((pred, gold), (gold, pred)):
        head = point.args[0] if point.op == "mul" and len(point.args) == 2 else None
        if head == Node("sym", ("C",)) and point.args[1].op == "tuple" and len(point.args[1].args) == 4:
            return value.op not in STRUCTURES and same_scalar(Node("fn", ("binom", *point.args[1].args[2:])), value)
    return False


def _same_sets(pred: Node, gold: Node) -> bool:
    return _same_multiset(_unique(_expanded(list(pred.args))), _unique(_expanded(list(gold.args))))


def _unique(values: list[Node]) -> list[Node]:
    kept: list[Node] = []
    for value in dict.fromkeys(values):
        if len(kept) > MAX_UNSORTED or not any(_quiet(same_one, value, other) for other in kept):
            kept.append(value)
    return kept


def _same_set_expressions(pred: Node, gold: Node) -> bool:
    if pred.op != gold.op or pred.op == "numbers":
        return False
    if pred.op == "minus":
        return same_one(pred.args[0], gold.args[0]) and same_one(pred.args[1], gold.args[1])
    return _same_multiset(_parts(pred, pred.op), _parts(gold, gold.op))


def _parts(node: Node, op: str) -> list[Node]:
    return [part for arg in node.args for part in _parts(arg, op)] if node.op == op else [node]


# -- relations -------------------------------------------------------------------------------------------------
_FLIPPED = {">": "<", ">=": "<="}


def _oriented(node: Node) -> Node:
    """`a > b` as `b < a`."""
    if all(op in _FLIPPED for op in node.args[0]):
        return Node("rel", (tuple(_FLIPPED[op] for op in reversed(node.args[0])), *reversed(node.args[1:])))
    return node


def _same_relations(pred: Node, gold: Node) -> bool:
    pred, gold = _oriented(pred), _oriented(gold)
    if pred.args[0] == gold.args[0] and all(
        _quiet(same_one, a, b) for a, b in zip(pred.args[1:], gold.args[1:], strict=True)
    ):
        return True
    left, right = assigned(pred), assigned(gold)
    if left[0] is not None and right[0] is not None:
        renamed = compatible_names(left[0], right[0])
        if renamed:
            return _same_named(renamed(left[1]), right[1])
    return _proportional(pred, gold)


def _same_named(pred: Node, gold: Node) -> bool:
    """Values of the same name; `x = \\pm 2` has two."""
    return _same_multiset(_expanded([pred]), _expanded([gold]))


def _proportional(pred: Node, gold: Node) -> bool:
    """Two equations (or inequalities) whose differences of sides are in a constant (positive) ratio."""
    ops = pred.args[0]
    if ops != gold.args[0] or len(ops) != 1 or ops[0] not in ("=", "!=", "<", "<="):
        return False
    left, right = (Node("add", (node.args[1], neg(node.args[2]))) for node in (pred, gold))
    if any(has(side, *STRUCTURES, "ellipsis") for side in (left, right)):
        return False
    ratio = constant_ratio(left, right)
    return ratio is not None and (ops[0] in ("=", "!=") or ratio > 0)
