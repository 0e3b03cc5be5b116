"""The grammar of expressions: from tokens to a tree, by bounded recursive descent. Nothing is evaluated here."""

from __future__ import annotations

import re
from fractions import Fraction

from colocate_grpo.reward.node import TEN, Node, neg, num
from colocate_grpo.reward.tokens import END, ParseError, Token, words

MAX_DEPTH = 40
MAX_DIGITS = 20_000

_GREEK = words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau"
    " upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar nabla"
)
_FUNCTIONS = words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth log ln lg exp det gcd lcm max min"
    " asin acos atan abs floor ceil sgn arg Re Im deg cis"
)
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASES |= {"ten": "10", "twelve": "12", "sixteen": "16"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_MULTIPLY = {"cdot", "times", "ast", "cdotp", "bullet"}
_ENDS_FACTOR = {
    ")",
    "]",
    "}",
    ",",
    ";",
    "=",
    "<",
    ">",
    "+",
    "-",
    "|",
    ":",
    "&",
    "\\\\",
    "\\}",
    "*",
    "/",
    "^",
    "!",
    "?",
    "'",
}
_ENDS_FACTOR |= {"\\|", "_", ".", "**", "%", "\\%", "\\&", "\\#", "\\_", "\\$", "$"}
_ATOM_COMMANDS = {"frac", "sqrt", "binom", "choose", "infty", "pi", "overline", "lfloor", "lceil", "langle", "begin"}
_ATOM_COMMANDS |= {"sum", "prod", "int", "lim", "mathbb", "emptyset", "varnothing", "ldots", "dots", "cdots", "angle"}
_ATOM_COMMANDS |= {"cbrt", "lvert", "vert", "bar", "widehat", "hat", "triangle", "dot", "operatorname", "mathop"}
_ATOM_COMMANDS |= {"dotsc", "dotsb", "vdots", "overrightarrow", "lVert", "tilde", "prime", "partial", "euro", "pounds"}
_ATOM_COMMANDS |= {"yen", "square", "Box", "star", "iint", "oint", "underbrace", "complement", "widetilde", "log"}


class ExpressionParser:
    """Recursive descent over a token list; `depth` bounds the recursion, the token count bounds the time."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0

    # -- tokens ------------------------------------------------------------------------------------------------
    @property
    def token(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def peek(self, offset: int = 1) -> Token:
        return self.tokens[self.at + offset] if self.at + offset < len(self.tokens) else END

    def next(self) -> Token:
        token = self.token
        self.at += 1
        return token

    def is_op(self, *texts: str) -> bool:
        return self.token.kind == "op" and self.token.text in texts

    def is_cmd(self, *names: str) -> bool:
        return self.token.kind == "cmd" and self.token.text in names

    def is_word(self, *words: str) -> bool:
        return self.token.kind == "word" and self.token.text.lower() in words

    def accept(self, *texts: str) -> bool:
        if self.is_op(*texts):
            self.at += 1
            return True
        return False

    def expect(self, *texts: str) -> None:
        if not self.accept(*texts):
            raise ParseError(f"expected {texts[0]!r}, found {self.token.text!r}")

    # -- sums and products -------------------------------------------------------------------------------------
    def expr(self) -> Node:
        """Sum of terms; signs may repeat (`3 + -2`)."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")
        terms = [self._signed_term(self._signs())]
        while self.is_op("+", "-") or self.is_cmd("pm", "mp"):
            terms.append(self._signed_term(self._signs()))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _signs(self) -> list[str]:
        signs = []
        while self.is_op("+", "-") or self.is_cmd("pm", "mp"):
            signs.append(self.next().text)
        return signs

    def _signed_term(self, signs: list[str]) -> Node:
        node = self.term()
        for sign in reversed(signs):
            if sign == "-":
                node = neg(node)
            elif sign != "+":
                node = Node(sign, (node,))
        return node

    def term(self) -> Node:
        """Product of factors, explicit or by juxtaposition; `/` divides by the one factor that follows."""
        factors = [self.factor()]
        while True:
            if self.accept("*") or self._accept_multiply():
                factors.append(self._signed_factor())
            elif self.is_op("/") or self.is_cmd("div"):
                if self.peek().kind == "word":
                    break
                self.next()
                factors.append(Node("inv", (self._signed_factor(),)))
            elif self.is_cmd("bmod") or (self.is_op("%") and self._starts_factor(self.peek())):
                self.next()
                left = self._product(factors)
                factors = [Node("mod", (left, self.factor()))]
            elif self._starts_factor(self.token):
                self._juxtapose(factors)
            else:
                break
        return self._product(factors)

    def _accept_multiply(self) -> bool:
        if self.token.kind == "cmd" and self.token.text in _MULTIPLY:
            self.at += 1
            return True
        # `6.02 x 10^23`: a lone x between a number and a power of ten is a multiplication sign.
        power = self.token.text == "x" and self.peek().text == "10" and self.peek(2).text in ("^", "**")
        if power and self.at and self.tokens[self.at - 1].kind == "num":
            self.at += 1
            return True
        return False

    @staticmethod
    def _product(factors: list[Node]) -> Node:
        return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def _juxtapose(self, factors: list[Node]) -> None:
        """`2x` is a product, `1 1/2` and `1\\frac{1}{2}` are mixed numbers, `1 2` is nothing."""
        previous = self.tokens[self.at - 1]
        if self.token.kind == "num":
            if previous.kind == "num" and self.peek().text == "/" and self.peek(2).kind == "num":
                self._mixed(factors, self._plain_fraction())
                return
            if previous.kind == "num" or not (previous.text.isalnum() or previous.text in (")", "}", "]", "|", "!")):
                raise ParseError("two numbers in a row")
        whole = previous.kind == "num" and previous.text.isdigit() and self.is_cmd("frac")
        node = self.factor()
        if whole and self._is_literal_fraction(node) and factors[-1].op == "num":
            self._mixed(factors, node)
        else:
            factors.append(node)

    def _plain_fraction(self) -> Node:
        top = self._number(self.next().text)
        self.expect("/")
        return Node("mul", (top, Node("inv", (self._number(self.next().text),))))

    @staticmethod
    def _is_literal_fraction(node: Node) -> bool:
        if node.op != "mul" or len(node.args) != 2 or node.args[1].op != "inv":
            return False
        parts = (node.args[0], node.args[1].args[0])
        return all(part.op == "num" and part.args[0] >= 0 and part.args[0] == int(part.args[0]) for part in parts)

    @staticmethod
    def _mixed(factors: list[Node], fraction: Node) -> None:
        whole = factors.pop()
        if whole.op != "num" or whole.args[0] != int(whole.args[0]):
            raise ParseError("mixed number without a whole part")
        factors.append(Node("add", (whole, fraction)))

    def _starts_factor(self, token: Token) -> bool:
        if token.kind in ("num", "let"):
            return True
        if token.kind == "op":
            if token.text == "|":
                return self.bars == 0
            return token.text not in _ENDS_FACTOR
        return token.kind == "cmd" and (
            token.text in _FUNCTIONS or token.text in _GREEK or token.text in _ATOM_COMMANDS
        )

    def _signed_factor(self) -> Node:
        node, negative = None, False
        while self.is_op("+", "-"):
            negative ^= self.next().text == "-"
        node = self.factor()
        return neg(node) if negative else node

    # -- powers ------------------------------------------------------------------------------------------------
    def factor(self) -> Node:
        """An atom with its postfixes: powers, factorials, per cent, degrees, primes."""
        return self._postfixes(self.atom())

    def _postfixes(self, node: Node) -> Node:
        for _ in range(MAX_DEPTH):
            if self.is_op("!") and self.peek().text != "=":
                self.next()
                node = self._factorial(node)
            elif self.is_op("^", "**"):
                node = self._power(node)
            elif self.is_op("_") and node.op == "num" and self.tokens[self.at - 1].text == ")":
                node = self._based(str(node.args[0]))
            elif self.accept("'"):
                node = Node("app", ("'", node))
            elif self.is_cmd("circ", "degree", "degrees"):
                self.next()
                node = self._degrees(node)
            else:
                return node
        raise ParseError("nested too deeply")

    def _factorial(self, node: Node) -> Node:
        """After the `!`: `7!!` is 7 times 5 times 3."""
        return Node("fn", ("double_factorial" if self.accept("!") else "factorial", node))

    def _power(self, base: Node) -> Node:
        self.next()
        if self._accept_circle():
            return self._degrees(base)
        exponent = self.exponent()
        return Node("pow", (base, exponent))

    def _degrees(self, node: Node) -> Node:
        if self.token.text in ("C", "F") and not self._starts_factor(self.peek()):
            scale = "celsius" if self.next().text == "C" else "fahrenheit"
            return Node("quantity", (node, ((scale, 1),)))
        return Node("deg", (node,))

    def _accept_circle(self) -> bool:
        if self.is_cmd("circ", "degree"):
            self.at += 1
            return True
        if self.is_op("{") and self.peek().text == "circ" and self.peek(2).text == "}":
            self.at += 3
            return True
        return False

    def exponent(self) -> Node:
        """What stands after `^`: right associative, signs allowed, a bare number is read whole (`x^10`)."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")
        negative = False
        while self.is_op("-", "+"):
            negative ^= self.next().text == "-"
        node = self.atom()
        for _ in range(MAX_DEPTH):
            if not self.accept("!"):
                break
            node = self._factorial(node)
        if self.is_op("^", "**"):
            node = self._power(node)
        self.depth -= 1
        return neg(node) if negative else node

    # -- numbers -----------------------------------------------------------------------------------------------
    @staticmethod
    def _number(text: str) -> Node:
        if len(text) > MAX_DIGITS:
            raise ParseError("number too long")
        if not text.replace(".", "", 1).isdigit():
            raise ParseError("not a number")
        if "." not in text:
            return num(_integer(text))
        whole, _, decimals = text.partition(".")
        return num(Fraction(_integer(whole + decimals), 10 ** len(decimals)))

    def number(self) -> Node:
        """A literal with scientific exponent, repeating decimals or the base as a subscript."""
        text = self.next().text
        if self.token.text in ("e", "E") and not self.token.spaced:
            node = self._scientific(text)
            if node is not None:
                return node
        if "." in text and self.is_cmd("ldots", "dots", "cdots") and (value := ongoing(text)) is not None:
            self.next()
            return num(value)
        if "." in text or self.is_op("."):
            if self.is_cmd("overline", "dot", "bar"):
                return self._repeating(text)
            if self.is_op(".") and self.peek().text in ("overline", "dot", "bar"):
                self.next()
                return self._repeating(text + ".")
        if self.is_op("_"):
            return self._based(text)
        return self._number(text)

    def _scientific(self, mantissa: str) -> Node | None:
        signed = self.peek().text in ("+", "-") and self.peek().kind == "op"
        digits = self.peek(2) if signed else self.peek()
        if digits.kind != "num" or "." in digits.text or digits.spaced:
            return None
        sign = -1 if self.peek().text == "-" else 1
        self.at += 3 if signed else 2
        exponent = num(sign * self._number(digits.text).args[0])
        return Node("mul", (self._number(mantissa), Node("pow", (TEN, exponent))))

    def _repeating(self, text: str) -> Node:
        """`0.1\\overline{6}` and `0.\\dot{3}` as exact fractions."""
        return num(repeating(text if "." in text else text + ".", self._repeating_block()))

    def _repeating_block(self) -> str:
        """The digits under a bar, or from the first to the last of those with a dot: `\\dot{1}4285\\dot{7}`."""
        dotted = self.next().text == "dot"
        digits = self._braced_digits()
        ahead = 1 if self.token.kind == "num" else 0
        if dotted and self.peek(ahead).text == "dot":
            between = self.next().text if ahead else ""
            self.next()
            digits += between + self._braced_digits()
        return digits

    def _braced_digits(self) -> str:
        braced = self.accept("{")
        digits = self.next().text
        if braced:
            self.expect("}")
        elif len(digits) > 1:  # TeX takes one digit
            raise ParseError("repeating block")
        if not digits.isdigit() or len(digits) > 500:
            raise ParseError("repeating block")
        return digits

    def _based(self, digits: str) -> Node:
        self.next()
        base = self.subscript()
        if not base.isdigit() or not 2 <= int(base[:4]) <= 62:
            raise ParseError(f"base {base[:10]}")
        return Node("based", (digits, int(base)))

    def subscript(self) -> str:
        """Text of a subscript: one token, or a brace group of at most 12 tokens."""
        if not self.accept("{"):
            token = self.next()
            return _BASES.get(token.text, token.text)
        parts = []
        level = 1
        while level:
            token = self.next()
            level += (token.text == "{") - (token.text == "}")
            parts.append(_BASES.get(token.text, token.text))
            if token.kind == "end" or len(parts) > 12:
                raise ParseError("subscript")
        return "".join(parts[:-1])

    # -- hooks for structure.py --------------------------------------------------------------------------------
    def atom(self) -> Node:
        raise NotImplementedError


_ONGOING = re.compile(r"([0-9]*\.[0-9]*?)(([0-9])\3{2,}|([0-9]{2,12}?)\4+)\Z")


def ongoing(text: str) -> Fraction | None:
    """`0.1666` before dots as one sixth: a last digit three times, or a last block twice; None without such an end."""
    match = _ONGOING.match(text) if len(text) <= 60 else None
    return repeating(match[1], match[3] or match[4]) if match else None


def repeating(head: str, block: str) -> Fraction:
    """The decimal `head` with `block` again and again after it."""
    decimals = len(head.partition(".")[2])
    return Fraction(head + "0") + Fraction(_integer(block), (10 ** len(block) - 1) * 10**decimals)


def _integer(digits: str) -> int:
    """int() of a long string is quadratic and limited to 4300 digits by default; halves keep it exact."""
    if len(digits) <= 4000:
        return int(digits or "0")
    half = len(digits) // 2
    return _integer(digits[:-half]) * 10**half + _integer(digits[-half:])
