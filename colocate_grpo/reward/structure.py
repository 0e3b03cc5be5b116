"""The grammar of answers: lists, tuples, sets, intervals, relations, ratios, quantities, multiple choice."""

from __future__ import annotations

from itertools import pairwise

from colocate_grpo.reward.atoms import AtomParser
from colocate_grpo.reward.expression import MAX_DEPTH
from colocate_grpo.reward.node import Node, num
from colocate_grpo.reward.tokens import ParseError, Token, tokenize, words
from colocate_grpo.reward.units import build_unit

MAX_ITEMS = 4_000

_RELATION_OPS = {"=": "=", "<": "<", ">": ">"}
_RELATION_CMDS = {"le": "<=", "ge": ">=", "ne": "!=", "<": "<", ">": ">", "approx": "~", "equiv": "==", "in": "in"}
_RELATION_CMDS |= {"sim": "sim", "cong": "cong", "notin": "notin", "to": "to", "rightarrow": "to", "mapsto": "to"}
_RELATION_CMDS |= {"subset": "subset", "subseteq": "subset", "parallel": "parallel", "perp": "perp", "iff": "iff"}
_RELATION_CMDS |= {"implies": "implies", "Rightarrow": "implies", "propto": "propto", "doteq": "~", "simeq": "~"}
_SETS = {"cup": "union", "cap": "intersection", "setminus": "minus", "bigcup": "union", "backslash": "minus"}
_SEPARATORS = {"land": "and", "wedge": "and", "lor": "or", "vee": "or"}
_CLOSING = {"(": (")", "]"), "[": ("]", ")", "["), "{": ("}",), "\\{": ("\\}", "}"), "]": ("[", "]")}
_CHOICES = set("ABCDEFGHIJ")
_DEGREE_WORDS = {"degree", "degrees", "deg", "度"}
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# After a number these words are no unit: they change what is said.
_STOP_WORDS = words(
    "and or if for where with when is not mod to approximately approx maybe perhaps possibly roughly about nearly"
    " almost plus minus times over squared cubed factorial more less fewer than least most except but"
    " either nor vs versus"
)


def parse_answer(text: str) -> Node:
    """Tree of a cleaned answer; ParseError when it is outside the grammar."""
    parser = AnswerParser(tokenize(text))
    return parser.answer()


class AnswerParser(AtomParser):
    """Statements: what may stand alone in a box."""

    def answer(self) -> Node:
        choice = self._choice()
        if choice is not None:
            return choice
        items, separators = [self.relation()], []
        while self.token.kind != "end":
            separators.append(self._separator())
            items.append(self.relation())
            if len(items) > MAX_ITEMS:
                raise ParseError("too many items")
        return items[0] if len(items) == 1 else Node("list", (frozenset(separators), *items))

    def _choice(self) -> Node | None:
        """`(C) 12`, `A. 5`: a letter with its text."""
        first, second, third = self.token, self.peek(), self.peek(2)
        if first.text == "(" and second.text in _CHOICES and third.text == ")":
            letter, length = second.text, 3
        elif first.text in _CHOICES and second.text in (".", ")", ":") and second.kind == "op":
            letter, length = first.text, 2
        else:
            return None
        rest = self.tokens[self.at + length :]
        if not rest and second.text == ")":
            return Node("choice", (letter, None))
        if not rest or (rest[0].kind == "op" and rest[0].text not in ("(", "-", "[", "{", "\\{", "$", "\\$")):
            return None
        if rest[0].text.lower() in ("and", "or") or _names_choice(rest):
            return None
        return Node("choice", (letter, _quietly(rest)))

    def _separator(self) -> str:
        kind = None
        while True:
            if self.is_op(",", ";", "&", "\\&"):
                self.next()
                kind = kind or ","
            elif self.is_word("and", "or"):
                kind = "and" if self.next().text.lower() == "and" else "or"
            elif self.token.kind == "cmd" and self.token.text in _SEPARATORS:
                kind = _SEPARATORS[self.next().text]
            elif kind is None:
                raise ParseError(f"unexpected {self.token.text!r}")
            else:
                return kind

    # -- relations ---------------------------------------------------------------------------------------------
    def relation(self) -> Node:
        """`a = b`, `a < b \\le c`; a leading `=` or `\\approx` has no left side and is dropped."""
        if self._relation_sign() in ("=", "~"):
            self.next()
        members, ops = [self.operand()], []
        while True:
            sign = self._relation_sign()
            if sign is None:
                break
            self.next()
            ops.append(sign)
            members.append(self.operand())
        if "implies" in ops:  # what follows from it is the answer
            last = len(ops) - ops[::-1].index("implies")
            ops, members = ops[last:], members[last:]
        return members[0] if not ops else Node("rel", (tuple(ops), *members))

    def _relation_sign(self) -> str | None:
        token = self.token
        if token.kind == "op":
            return _RELATION_OPS.get(token.text)
        return _RELATION_CMDS.get(token.text) if token.kind == "cmd" else None

    def operand(self) -> Node:
        """Unions and differences of sets around ratios."""
        node = _difference(self._ratio())
        while self.token.kind == "cmd" and self.token.text in _SETS:
            op = _SETS[self.next().text]
            node = Node(op, (node, self._ratio()))
        return node

    def _ratio(self) -> Node:
        parts = [self._quantity()]
        while self.is_op(":") or self.is_cmd("colon") or self.is_word("to"):
            self.next()
            parts.append(self._quantity())
        if len(parts) == 1:
            return parts[0]
        if parts[-1].op == "quantity":  # `2:37 pm`: the word belongs to the whole
            last, suffix = parts[-1].args
            half = suffix[0][0].lower()
            if half in ("am", "pm"):
                return Node("clock", (half, *parts[:-1], last))
            return Node("quantity", (Node("ratio", (*parts[:-1], last)), suffix))
        return Node("ratio", tuple(parts))

    # -- units -------------------------------------------------------------------------------------------------
    def _quantity(self) -> Node:
        node = self.expr()
        if self.accept("\\%", "%"):
            return self._percent(node)
        if node.op == "num" and self.accept("\\$"):
            return Node("quantity", (node, (("dollar", 1),)))
        if self._accept_modulus():
            return Node("cong", (node, self._modulus()))
        if self.is_op("(", "[") and self.peek().kind == "word":
            return self._unit_in_brackets(node)
        if self.token.kind != "word" or self.token.text.lower() in _STOP_WORDS:
            return node
        if self.token.text.lower() in _MULTIPLIERS:
            node = _times(node, _MULTIPLIERS[self.next().text.lower()])
            if self.token.kind != "word" or self.token.text.lower() in _STOP_WORDS:
                return node
        if self.is_word("percent", "百分之"):
            self.next()
            return self._percent(node)
        if self.is_word("per") and self.peek().text.lower() == "cent":
            self.at += 2
            return self._percent(node)
        if self.is_word("in") and self.peek().text.lower() == "base":
            self.next()
        if self.is_word("base"):
            return self._base_suffix(node)
        factors = self._unit_factors()
        if node.op == "mul" and all(factor.op == "sym" for factor in node.args):
            raise ParseError("words")  # `odd function` is no product with a unit
        if all(word.lower() in _DEGREE_WORDS for word, _ in factors):
            return Node("deg", (node,))
        return self._compound(node, factors)

    def _percent(self, node: Node) -> Node:
        """`25\\%`, and what it is of or by: `25\\% increase`."""
        percent = Node("percent", (node,))
        if self.token.kind != "word" or self.token.text.lower() in _STOP_WORDS:
            return percent
        return Node("quantity", (percent, tuple(self._unit_factors())))

    def _compound(self, node: Node, factors: list[tuple[str, int]]) -> Node:
        """`5 ft 6 in` in feet: smaller units of the same measure are added."""
        shape, size, _ = build_unit(factors)
        while self.token.kind == "num" and self.peek().kind == "word":
            other = build_unit([(self.peek().text, 1)])
            if not shape or other[0] != shape or other[1] >= size:
                break
            part = self._number(self.next().text)
            self.next()
            node = Node("add", (node, Node("mul", (num(other[1] / size), part))))
        return Node("quantity", (node, tuple(factors)))

    def _unit_in_brackets(self, node: Node) -> Node:
        self.next()
        if self.is_word("base"):
            node = self._base_suffix(node)
            self.expect(")")
            return node
        factors = self._unit_factors()
        self.expect(")", "]")
        return Node("quantity", (node, tuple(factors)))

    def _base_suffix(self, node: Node) -> Node:
        self.next()
        if node.op != "num" or self.token.kind != "num":
            raise ParseError("base")
        return Node("based", (str(node.args[0]), int(self.next().text[:3])))

    def _unit_factors(self) -> list[tuple[str, int]]:
        """(word, exponent) pairs of `km/h`, `square cm`, `m^2`, `dollars per hour`."""
        factors: list[tuple[str, int]] = []
        sign, power = 1, 1
        while self.token.kind == "word" or self.is_op("/") or self._multiplies_units():
            if self.accept("/") or self.is_word("per"):
                sign = -1
                self.at += self.is_word("per")
            word = self.token.text
            if self.token.kind != "word" or word.lower() in _STOP_WORDS:
                break
            self.next()
            if word.lower() in ("square", "sq", "cubic", "平方", "立方"):
                power = 3 if word.lower() in ("cubic", "立方") else 2
                self.accept(".")
                continue
            factors.append(self._unit_power(word, sign * power))
            sign, power = 1, 1
        return factors

    def _multiplies_units(self) -> bool:
        """`m \\cdot s^{-1}`"""
        if not self.is_cmd("cdot", "times") or self.peek().kind != "word":
            return False
        self.next()
        return True

    def _unit_power(self, word: str, power: int) -> tuple[str, int]:
        for prefix, exponent in (("平方", 2), ("立方", 3)):
            if word.startswith(prefix):
                word, power = word[2:], power * exponent
        if self.accept("^"):
            exponent_node = self.exponent()
            if exponent_node.op != "num" or exponent_node.args[0] not in (-2, -1, 1, 2, 3):
                raise ParseError("power of a unit")
            power *= int(exponent_node.args[0])
        self.accept(".")
        return word, power

    def _accept_modulus(self) -> bool:
        if self.is_cmd("pmod", "mod", "bmod"):
            self.next()
            return True
        if self.is_op("(") and (self.peek().text in ("bmod", "mod")):
            self.at += 2
            self._closes_modulus = True
            return True
        return False

    _closes_modulus = False

    def _modulus(self) -> Node:
        if self._closes_modulus:
            self._closes_modulus = False
            node = self.expr()
            self.expect(")")
            return node
        return self.argument() if self.is_op("{") else self.expr()

    def _starts_factor(self, token: Token) -> bool:
        if token.text == "[" and token is self.token:
            after = self.peek()
            if self._closes_interval(after) or (after.kind == "word" and len(after.text) > 1):
                return False
        if token.text == "(" and token is self.token:
            after = self.peek()
            if after.text in ("bmod", "mod") or (after.kind == "word" and len(after.text) > 1):
                return False
        return super()._starts_factor(token)

    @staticmethod
    def _closes_interval(after: Token) -> bool:
        """`[2, 5[`: a bracket with nothing to open."""
        return after.kind == "end" or after.text in (")", ",", ";", "cup", "cap", "]", "}")

    # -- brackets ----------------------------------------------------------------------------------------------
    def group(self) -> Node:
        """A bracketed part: a grouped expression, a tuple, an interval or a set."""
        opening = self.next().text
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")
        bars, self.bars = self.bars, 0
        if opening == "\\{" and self._skips_bound_variable():
            node = self._conditions()
            self.depth -= 1
            self.bars = bars
            return node
        items = self.items()
        closing = self.next().text
        if closing not in _CLOSING[opening]:
            raise ParseError(f"{opening} closed by {closing}")
        self.depth -= 1
        self.bars = bars
        # `]2, 5[` is the open interval.
        return self._grouped("(" if opening == "]" else opening, ")" if closing == "[" else closing, items)

    def _skips_bound_variable(self) -> bool:
        """`\\{x : x > 2\\}` is what its condition says."""
        length = 1 + self._real_domain()
        mark = self.peek(length)
        if self.token.kind != "let" or not ((mark.text in (":", "|") and mark.kind == "op") or mark.text == "mid"):
            return False
        self.at += length + 1
        return True

    def _real_domain(self) -> int:
        """Length of `\\in \\mathbb{R}` after the variable of a set, else 0."""
        ahead = [self.peek(offset).text for offset in range(1, 6)]
        if ahead[:3] == ["in", "mathbb", "R"]:
            return 3
        return 5 if ahead == ["in", "mathbb", "{", "R", "}"] else 2 if ahead[:2] == ["in", "R"] else 0

    def _conditions(self) -> Node:
        items, separators = [self.relation()], []
        while not self.is_op("\\}", "}"):
            separators.append(self._separator())
            items.append(self.relation())
        self.next()
        return items[0] if len(items) == 1 else Node("list", (frozenset(separators), *items))

    @staticmethod
    def _grouped(opening: str, closing: str, items: list[Node]) -> Node:
        if opening in ("\\{", "{") and (opening == "\\{" or len(items) > 1):
            return Node("set", tuple(items))
        if len(items) == 1 and (opening, closing) in (("(", ")"), ("[", "]"), ("{", "}")):
            return items[0]
        if not items:
            raise ParseError("empty brackets")
        return Node("tuple", (opening, closing, *items))

    def items(self) -> list[Node]:
        """Comma separated operands up to a closing bracket."""
        items: list[Node] = []
        if self.is_op("\\}", ")", "}", "]"):
            return items
        items.append(self.relation())
        while self.accept(",", ";"):
            items.append(self.relation())
            if len(items) > MAX_ITEMS:
                raise ParseError("too many items")
        return items


def _times(node: Node, factor: int) -> Node:
    if node.op == "quantity":
        return Node("quantity", (_times(node.args[0], factor), node.args[1]))
    return Node("mul", (node, num(factor)))


def _difference(node: Node) -> Node:
    """`\\mathbb{R} - \\{0\\}` as a difference of sets."""
    if node.op != "add" or node.args[0].op not in ("numbers", "set", "tuple"):
        return node
    removed = [term.args[1] for term in node.args[1:] if term.op == "mul" and term.args[0] == num(-1)]
    if len(node.args) != 2 or len(removed) != 1 or removed[0].op != "set":
        return node
    return Node("minus", (node.args[0], removed[0]))


def _names_choice(tokens: list[Token]) -> bool:
    """Whether a further choice is named: `(A) 5, (B) 6` chooses nothing."""
    return any(
        token.text in _CHOICES and after.text in (")", ".", ":") and after.kind == "op"
        for token, after in pairwise(tokens)
    )


def _quietly(tokens: list[Token]) -> Node | None:
    """The tree of the text of a choice, or None: the letter alone decides then."""
    try:
        return AnswerParser(tokens).answer()
    except ParseError:
        return None
