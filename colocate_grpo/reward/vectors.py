"""Points, vectors and matrices: what they are after scaling and adding, and whether two have the same cells."""

from __future__ import annotations

from collections.abc import Callable

from colocate_grpo.reward.node import Node

_ROUND = (("(", ")"), ("<", ">"))


def combined(node: Node) -> Node:
    """`\\frac{1}{2}` times a matrix, and a sum of matrices of one shape, cell by cell."""
    if node.op == "mul":
        return _scaled(node)
    terms = [combined(term) for term in node.args] if node.op == "add" else []
    if not terms or any(term.op != "matrix" or term.args[:2] != terms[0].args[:2] for term in terms):
        return node
    sums = zip(*(term.args[2:] for term in terms), strict=True)
    return Node("matrix", (*terms[0].args[:2], *(Node("add", parts) for parts in sums)))


def _scaled(node: Node) -> Node:
    matrices = [factor for factor in node.args if factor.op == "matrix"]
    if len(matrices) != 1:
        return node
    scale = tuple(factor for factor in node.args if factor is not matrices[0])
    rows, columns, *cells = matrices[0].args
    return Node("matrix", (rows, columns, *(Node("mul", (*scale, cell)) for cell in cells)))


def same_vectors(pred: Node, gold: Node, same: Callable[[Node, Node], bool]) -> bool:
    """Whether two points, vectors or matrices have one shape and, by `same`, the same cells."""
    pred, gold = _unnamed(pred), _unnamed(gold)
    if "matrix" in (pred.op, gold.op):
        pred, gold = _rows(pred), _rows(gold)
    if not {pred.op, gold.op} <= {"tuple", "matrix"} or not _same_shape(pred, gold):
        return False
    left, right = pred.args[2:], gold.args[2:]
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


def _unnamed(node: Node) -> Node:
    """`A(1, 2)` is the point `(1, 2)`."""
    if node.op == "mul" and len(node.args) == 2 and node.args[0].op == "sym" and node.args[1].op == "tuple":
        return node.args[1] if node.args[0].args[0].isupper() else node
    return node


def _rows(node: Node) -> Node:
    """`[[1, 2], [3, 4]]` as a matrix."""
    rows = node.args[2:] if node.op == "tuple" and node.args[:2] == ("[", "]") else ()
    if not rows or any(row.op != "tuple" or len(row.args) != len(rows[0].args) for row in rows):
        return node
    return Node("matrix", (len(rows), len(rows[0].args) - 2, *(cell for row in rows for cell in row.args[2:])))


def _same_shape(pred: Node, gold: Node) -> bool:
    """Brackets must agree exactly, but a column vector may be written as a tuple."""
    if pred.op == gold.op == "matrix":
        return pred.args[:2] == gold.args[:2]
    if pred.op == gold.op:
        return pred.args[:2] == gold.args[:2] or (pred.args[:2] in _ROUND and gold.args[:2] in _ROUND)
    matrix, row = (pred, gold) if pred.op == "matrix" else (gold, pred)
    return 1 in matrix.args[:2] and row.args[:2] in _ROUND
