"""The smallest parts of an expression: numbers, symbols, functions, fractions, brackets, sums, matrices."""

from __future__ import annotations

from colocate_grpo.reward.expression import _ALIASES, _FUNCTIONS, _GREEK, _INVERSE, ExpressionParser
from colocate_grpo.reward.node import HALF, INFINITY, ONE, Node, num, rebuild
from colocate_grpo.reward.tokens import ParseError, Token

_VARIANTS = {"varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta"}
_ELLIPSIS = {"ldots", "dots", "cdots", "dotsc", "dotsb", "vdots"}
_NUMBER_SETS = {"R", "Z", "N", "Q", "C"}
_NAMED_FUNCTIONS = {"f", "g", "h", "F", "G"}
_MATRICES = {"pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix", "psmallmatrix"}
_ACCENTS = {"bar", "hat", "widehat", "tilde", "widetilde", "overrightarrow", "dot", "vec"}
_PREFIXES = {"angle", "triangle", "square", "measuredangle", "odot"}
_CURRENCY_WORDS = {"usd", "eur", "euro", "rupees", "dollars"}
_CURRENCY = {"euro": "euro", "pounds": "pounds_sterling", "yen": "yen"}


class AtomParser(ExpressionParser):
    """Atoms; what stands between brackets is read by `group` of the subclass."""

    def atom(self) -> Node:
        token = self.token
        if token.kind == "num":
            return self.number()
        if token.kind == "let":
            return self._symbol(self.next())
        if token.kind == "op":
            return self._bracketed(token)
        if token.kind == "cmd":
            return self._command(self.next().text)
        if token.kind == "word" and len(token.text) == 1 and token.text.isascii():
            return self._symbol(self.next())
        if token.kind == "word":
            return self._named_quantity()
        raise ParseError(f"unexpected {token.text!r}")

    def _named_quantity(self) -> Node:
        """`area = 12`: words before an equals sign are a name."""
        words = []
        while self.token.kind == "word":
            words.append(self.next().text.lower())
        if words[-1] in _CURRENCY_WORDS and self.token.kind == "num":
            return Node("quantity", (self.factor(), ((words[-1], 1),)))
        if not self.is_op("="):
            raise ParseError(f"word {words[0]}")
        return Node("sym", (" ".join(words),))

    # -- symbols -----------------------------------------------------------------------------------------------
    def _symbol(self, token: Token) -> Node:
        name = token.text
        if self.is_op("_"):
            return self._subscripted(name)
        if name in _NAMED_FUNCTIONS and self.is_op("("):
            return Node("app", (name, self.group()))
        if name in _NAMED_FUNCTIONS and self.is_op("'") and self.peek().text == "(":
            self.next()
            return Node("app", (name + "'", self.group()))
        if name in _NAMED_FUNCTIONS and self._accept_inverse():
            return Node("app", (name + "^-1", self.group()))
        if name == "i":
            return Node("const", ("i",))
        return Node("const", ("e",)) if name == "e" else Node("sym", (name,))

    def _accept_inverse(self) -> bool:
        """`f^{-1}(x)`"""
        ahead = [self.peek(offset).text for offset in range(6)]
        if ahead != ["^", "{", "-", "1", "}", "("]:
            return False
        self.at += 5
        return True

    def _subscripted(self, name: str) -> Node:
        self.next()
        index = self.subscript()
        # `A_{16}` may be a hexadecimal digit or an indexed symbol: the base is settled in the comparison.
        if name in ("C", "A", "P") and index.isdigit() and self.is_op("^") and (chosen := self._chosen(name, index)):
            return chosen
        return Node("sym", (f"{name}_{index}",))

    def _chosen(self, name: str, index: str) -> Node | None:
        """`C_{10}^3` and `A_5^2`: combinations and permutations."""
        ahead = [self.peek(offset) for offset in (1, 2, 3)]
        braced = ahead[0].text == "{" and ahead[2].text == "}"
        count = ahead[1] if braced else ahead[0]
        if count.kind != "num" or not count.text.isdigit() or not 0 < int(count.text[:4]) <= int(index[:4]):
            return None
        self.at += 4 if braced else 2
        top, bottom = self._number(index), self._number(count.text)
        chosen = Node("fn", ("binom", top, bottom))
        return chosen if name == "C" else Node("mul", (chosen, Node("fn", ("factorial", bottom))))

    # -- brackets ----------------------------------------------------------------------------------------------
    def _bracketed(self, token: Token) -> Node:
        if token.text in ("(", "[", "{", "\\{", "]"):
            return self.group()
        if token.text in ("|", "\\|"):
            return self._absolute(token.text)
        if token.text in ("\\$", "$"):
            self.next()
            return Node("quantity", (self._signed_factor(), (("dollar", 1),)))
        raise ParseError(f"unexpected {token.text!r}")

    def _absolute(self, bar: str) -> Node:
        self.next()
        self.bars += 1
        inner = self.expr()
        self.bars -= 1
        self.expect(bar)
        if inner.op == "matrix" and inner.args[0] == inner.args[1]:
            return Node("fn", ("determinant", num(inner.args[0]), *inner.args[2:]))
        return Node("fn", ("abs", inner))

    def _enclosed(self, name: str, closing: str) -> Node:
        inner = self.expr()
        if not self.is_cmd(closing):
            raise ParseError(f"expected {closing}")
        self.next()
        return Node("fn", (name, inner))

    def group(self) -> Node:
        raise NotImplementedError

    # -- commands ----------------------------------------------------------------------------------------------
    def _command(self, name: str) -> Node:
        if name in _NUMBER_SETS:
            return self._number_set(name)
        name = _VARIANTS.get(name, name)
        if name in _GREEK:
            return self._symbol(Token("let", "\\" + name))
        if name in _FUNCTIONS:
            return self._function(_ALIASES.get(name, name))
        handler = getattr(self, "_cmd_" + name, None)
        if handler is not None:
            return handler()
        if name in _ELLIPSIS:
            return Node("ellipsis")
        if name in _ACCENTS:
            return Node("app", ("accent", self.argument()))
        if name in _PREFIXES:
            return Node("app", (name, self.term()))
        if name in _CURRENCY:
            return Node("quantity", (self.factor(), ((_CURRENCY[name], 1),)))
        raise ParseError(f"command {name}")

    def argument(self) -> Node:
        """Argument of a command: a brace group, or one token (one digit of a number, as TeX does)."""
        if self.is_op("{"):
            return self.group()
        if self.token.kind == "num" and len(self.token.text) > 1:
            token = self.token
            self.tokens[self.at] = Token("num", token.text[1:])
            return self._number(token.text[0])
        if self.token.kind == "num":
            return self._number(self.next().text)
        self.depth += 1
        if self.depth > 40:
            raise ParseError("nested too deeply")
        node = self.atom()
        self.depth -= 1
        return node

    def _cmd_frac(self) -> Node:
        if self.accept("("):
            self.at -= 1
        top = self.argument()
        return Node("mul", (top, Node("inv", (self.argument(),))))

    def _cmd_binom(self) -> Node:
        return Node("fn", ("binom", self.argument(), self.argument()))

    def _cmd_sqrt(self) -> Node:
        degree = None
        if self.accept("["):
            degree = self.expr()
            self.expect("]")
        radicand = self.number() if self.token.kind == "num" else self.argument()
        if degree is None:
            return Node("pow", (radicand, HALF))
        return Node("fn", ("root", radicand, degree))

    def _cmd_cbrt(self) -> Node:
        return Node("fn", ("root", self.argument(), num(3)))

    def _cmd_Pr(self) -> Node:
        return self._symbol(Token("let", "P"))

    def _cmd_infty(self) -> Node:
        return INFINITY

    def _cmd_pi(self) -> Node:
        return self._symbol(Token("let", "\\pi")) if self.is_op("_") else Node("const", ("pi",))

    def _cmd_emptyset(self) -> Node:
        return Node("set", ())

    _cmd_varnothing = _cmd_emptyset

    def _cmd_mathbb(self) -> Node:
        braced = self.accept("{")
        name = self.next().text
        if braced:
            self.expect("}")
        return self._number_set(name)

    def _number_set(self, name: str) -> Node:
        if name not in _NUMBER_SETS:
            raise ParseError(f"set {name}")
        suffix = ""
        while self.is_op("^", "_"):
            suffix += self.next().text + self.subscript()
        return Node("numbers", (name + suffix,))

    def _cmd_overline(self) -> Node:
        return Node("app", ("segment", self.argument()))

    def _cmd_lfloor(self) -> Node:
        return self._enclosed("floor", "rfloor")

    def _cmd_lceil(self) -> Node:
        return self._enclosed("ceil", "rceil")

    def _cmd_lvert(self) -> Node:
        return self._enclosed("abs", "rvert")

    def _cmd_vert(self) -> Node:
        return self._enclosed("abs", "vert")

    def _cmd_langle(self) -> Node:
        items = self.items()
        if not self.is_cmd("rangle"):
            raise ParseError("expected rangle")
        self.next()
        return Node("tuple", ("<", ">", *items))

    def items(self) -> list[Node]:
        raise NotImplementedError

    # -- functions ---------------------------------------------------------------------------------------------
    def _function(self, name: str) -> Node:
        """`\\sin^2 x`, `\\log_2 8`, `\\gcd(12,18)`, `\\sin 2x`; the power belongs to the value."""
        base, power = None, None
        for _ in range(2):
            if self.is_op("_"):
                self.next()
                base = self.argument() if self.token.kind != "num" else self._number(self.next().text)
            elif self.is_op("^"):
                self.next()
                power = self.exponent()
        if power == num(-1) and name in _INVERSE:
            name, power = _INVERSE[name], None
        arguments = self._function_arguments()
        if name == "cis":
            turn = Node("mul", (Node("const", ("i",)), Node("fn", ("sin", *arguments))))
            return Node("add", (Node("fn", ("cos", *arguments)), turn))
        node = Node("fn", (name, *arguments)) if base is None else Node("fn", ("log", *arguments, base))
        return node if power is None else Node("pow", (node, power))

    def _function_arguments(self) -> list[Node]:
        if self.is_op("(", "\\{", "[", "{"):
            inner = self._postfix_free_group()
            return list(inner.args[2:]) if inner.op == "tuple" else list(inner.args) if inner.op == "set" else [inner]
        factors = [self.factor()]
        while self._continues_argument():
            factors.append(self.factor())
        return [factors[0] if len(factors) == 1 else Node("mul", tuple(factors))]

    def _postfix_free_group(self) -> Node:
        return self.group()

    def _continues_argument(self) -> bool:
        """`\\sin 2x` and `\\log n^2`: the argument goes on until an operator, a bracket or another function."""
        token = self.token
        if token.kind == "let":
            return True
        return token.kind == "cmd" and (token.text in _GREEK or token.text in ("pi", "frac", "sqrt"))

    # -- sums, products, integrals, limits ---------------------------------------------------------------------
    def _bounds(self) -> tuple[str, Node | None, Node | None]:
        """Variable, lower and upper bound of `\\sum_{k=1}^{n}`; the variable is empty for an integral."""
        name, low, high = "", None, None
        for _ in range(2):
            if self.accept("_"):
                braced = self.accept("{")
                if self.peek().text == "=":
                    name = self.next().text
                    self.next()
                low = self.expr() if braced else self.argument()
                if braced:
                    self.expect("}")
            elif self.accept("^"):
                high = self.group() if self.is_op("{") else self.exponent()
        return name, low, high

    def _series(self, kind: str) -> Node:
        name, low, high = self._bounds()
        body = self.term()
        if not name or low is None or high is None:
            raise ParseError(f"{kind} without bounds")
        if name in ("i", "e"):
            constant, index = Node("const", (name,)), Node("sym", (name,))
            body = rebuild(body, lambda top: index if top == constant else None)
        return Node(kind, (body, name, low, high))

    def _cmd_lim(self) -> Node:
        """`\\lim_{x \\to a}`"""
        self.expect("_")
        self.expect("{")
        name = self.next().text
        if not self.is_cmd("to", "rightarrow"):
            raise ParseError("limit")
        self.next()
        point = self.expr()
        self.expect("}")
        return Node("lim", (self.term(), name, point))

    def _cmd_sum(self) -> Node:
        return self._series("sum")

    def _cmd_prod(self) -> Node:
        return self._series("prod")

    def _cmd_int(self) -> Node:
        _, low, high = self._bounds()
        body = self.expr()
        name = self._differential(body)
        return Node("int", (name[0], name[1], *(() if low is None or high is None else (low, high))))

    @staticmethod
    def _differential(body: Node) -> tuple[Node, str]:
        """Split `f(x) d x` into the integrand and the variable."""
        factors = list(body.args) if body.op == "mul" else [body]
        if len(factors) < 2 or factors[-2] != Node("sym", ("d",)) or factors[-1].op != "sym":
            raise ParseError("integral without differential")
        rest = factors[:-2]
        return (Node("mul", tuple(rest)) if len(rest) > 1 else rest[0] if rest else ONE), factors[-1].args[0]

    # -- matrices ----------------------------------------------------------------------------------------------
    def _cmd_begin(self) -> Node:
        name = self._environment()
        if name == "array" and self.is_op("{"):
            self.subscript()
        rows: list[list[Node]] = [[]]
        while not self.is_cmd("end"):
            rows[-1].append(self.expr())
            if self.accept("\\\\"):
                rows.append([])
            elif not self.accept("&") and not self.is_cmd("end"):
                raise ParseError("matrix")
        self.next()
        if self._environment() != name:
            raise ParseError("environment")
        return self._matrix(name, [row for row in rows if row])

    def _environment(self) -> str:
        self.expect("{")
        name = ""
        while self.token.kind in ("let", "word", "cmd"):
            name += self.next().text
        self.expect("}")
        return name

    @staticmethod
    def _matrix(name: str, rows: list[list[Node]]) -> Node:
        if not rows or len({len(row) for row in rows}) != 1:
            raise ParseError("ragged matrix")
        cells = tuple(cell for row in rows for cell in row)
        if name in ("vmatrix",):
            return Node("fn", ("determinant", num(len(rows)), *cells))
        if name not in _MATRICES:
            raise ParseError(f"environment {name}")
        return Node("matrix", (len(rows), len(rows[0]), *cells))
