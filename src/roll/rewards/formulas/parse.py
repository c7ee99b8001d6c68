"""From tokens to a tree, by recursive descent.

    sum      = product {(+ | - | ±) product}
    product  = signed {(* | / | nothing) signed}
    power    = atom {! } [^ exponent]
    atom     = number | variable | constant | (sum) | |sum| | \\frac{sum}{sum} | \\sqrt[n]{sum} | function argument | …

Juxtaposed factors multiply (`2x`), a whole number before a fraction of numbers is a mixed one (`1\\frac{1}{2}`). A name
that could be a function of what follows in brackets (`f(x)`) is not understood, rather than guessed.
"""

from __future__ import annotations

import re
from fractions import Fraction

from roll.rewards.formulas.nodes import Node, NotUnderstoodError, Number, Operation, Symbol, TooLargeError, negated

__all__ = ["parse_value"]

DEEPEST = 40
"""Brackets within brackets."""
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
_LOGARITHMS = {"\\ln", "\\log"}
_GREEK = {
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "varepsilon",
    "zeta",
    "eta",
    "theta",
    "vartheta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "varphi",
    "chi",
    "psi",
    "omega",
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Sigma",
    "Phi",
    "Psi",
    "Omega",
}
_FUNCTION_LETTERS = set("fghFGHPQ")
_ENDS = {None, ")", "]", "}", "\\}", "|", ","}
_NUMBER = re.compile(r"\d|\.\d")


def parse_value(tokens: list[str]) -> Node:
    """The tokens as one value.

    Raises:
        NotUnderstoodError: they are not one.
        TooLargeError: they are nested too deeply.
    """
    parser = _Parser(tokens)
    node = parser.sum()
    if parser.peek() is not None:
        raise NotUnderstoodError
    return node


class _Parser:
    """Reads the tokens once, from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = list(reversed(tokens))
        self._depth = 0
        self._bars = 0

    def peek(self) -> str | None:
        """The next token, or `None` at the end."""
        return self._tokens[-1] if self._tokens else None

    def _take(self) -> str:
        if not self._tokens:
            raise NotUnderstoodError
        return self._tokens.pop()

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise NotUnderstoodError

    def sum(self) -> Node:
        """A sum; also a single product."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooLargeError
        node = self._product()
        while (sign := self.peek()) in ("+", "-", "\\pm"):
            self._take()
            other = self._product()
            if sign == "\\pm":
                node = Operation("pm", (node, other))
            else:
                node = Operation("add", (node, other if sign == "+" else negated(other)))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            token = self.peek()
            if token == "*":
                self._take()
                node = Operation("mul", (node, self._signed()))
            elif token == "/":
                self._take()
                node = Operation("div", (node, self._signed()))
            elif self._starts_factor(token):
                mixed = token == "\\frac" and isinstance(node, Number) and node.value.denominator == 1
                other = self._power()
                node = self._joined(node, other) if mixed else Operation("mul", (node, other))
            else:
                return node

    @staticmethod
    def _joined(whole: Node, part: Node) -> Node:
        """`1\\frac{1}{2}` is 3/2; `2\\frac{\\pi}{3}` is a product."""
        is_number = isinstance(part, Operation) and all(isinstance(arg, Number) for arg in part.args)
        return Operation("add" if is_number else "mul", (whole, part))

    def _starts_factor(self, token: str | None) -> bool:
        if token is None or (token == "|" and self._bars):
            return False
        return token not in {"+", "-", "\\pm", "^", "!", "%", "_", *_ENDS}

    def _signed(self) -> Node:
        negative = False
        while (token := self.peek()) in ("+", "-"):
            self._take()
            negative ^= token == "-"
        if self.peek() == "\\pm":
            self._take()
            return Operation("pm", (Number(Fraction(0)), self._power()))
        node = self._power()
        return negated(node) if negative else node

    def _power(self) -> Node:
        node = self._atom()
        while self.peek() == "!":
            self._take()
            node = Operation("factorial", (node,))
        if self.peek() == "^":
            self._take()
            node = Operation("pow", (node, self._exponent()))
            if self.peek() == "^":
                raise NotUnderstoodError
        return node

    def _exponent(self) -> Node:
        if self.peek() == "{":
            return self._group("{", "}")
        if self.peek() == "-":
            self._take()
            return negated(self._atom())
        node = self._atom()
        if self.peek() == "^":  # a tower, `2^3^4`, is read from the right
            self._depth += 1
            if self._depth > DEEPEST:
                raise TooLargeError
            self._take()
            node = Operation("pow", (node, self._exponent()))
            self._depth -= 1
        return node

    def _group(self, opening: str, closing: str) -> Node:
        self._expect(opening)
        bars, self._bars = self._bars, 0
        node = self.sum()
        self._bars = bars
        self._expect(closing)
        return node

    def _argument(self) -> Node:
        """What a LaTeX command takes: a group in braces, or one digit, letter or command."""
        token = self.peek()
        if token == "{":
            return self._group("{", "}")
        if token is not None and token.isdigit() and len(token) > 1:
            self._take()
            self._tokens.append(token[1:])
            return Number(Fraction(token[0]))
        return self._atom()

    def _atom(self) -> Node:
        token = self._take()
        if _NUMBER.match(token):
            return self._number(token)
        if token in ("(", "[", "{"):
            self._tokens.append(token)
            return self._group(token, {"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._expect("|")
            return Operation("abs", (node,))
        if token.isalpha():
            return self._letter(token)
        if token.startswith("\\"):
            return self._command(token)
        raise NotUnderstoodError

    def _number(self, token: str) -> Node:
        written, _, period = token.rstrip("}").partition("\\overline{")
        whole = written.replace(",", "")
        decimals = len(whole.partition(".")[2])
        if period:
            tail = Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)
            return Operation("add", (Number(Fraction(f"0{whole}0")), Number(tail)))
        if self.peek() == "_":
            raise NotUnderstoodError  # `101_2`, a number in base 2
        return Number(Fraction(whole), decimals)

    def _letter(self, token: str) -> Node:
        name = token + self._subscript()
        if name in _FUNCTION_LETTERS and self.peek() == "(":
            raise NotUnderstoodError
        return Symbol(name)

    def _subscript(self) -> str:
        if self.peek() != "_":
            return ""
        self._take()
        token = self._take()
        if token == "{":
            parts = []
            while (part := self._take()) != "}":
                parts.append(part)
            token = "".join(parts)
        if not re.fullmatch(r"[\w+-]+", token):
            raise NotUnderstoodError
        return f"_{token}"

    def _command(self, token: str) -> Node:
        name = token[1:]
        if token == "\\frac":
            return Operation("div", (self._argument(), self._argument()))
        if token == "\\sqrt":
            return self._root()
        if token in _LOGARITHMS:
            return self._logarithm(name)
        if name in _FUNCTIONS:
            return self._function(name)
        if token == "\\exp":
            return Operation("pow", (Symbol("e"), self._function_argument()))
        if token == "\\abs":
            return Operation("abs", (self._function_argument(),))
        if token == "\\binom":
            return Operation("binomial", (self._argument(), self._argument()))
        if token in ("\\lfloor", "\\lceil"):
            closing, kind = ("\\rfloor", "floor") if token == "\\lfloor" else ("\\rceil", "ceiling")
            return Operation(kind, (self._until(closing),))
        if token == "\\infty":
            return Symbol("oo")
        if token == "\\pi" or name in _GREEK:
            return Symbol(name + self._subscript())
        raise NotUnderstoodError

    def _until(self, closing: str) -> Node:
        node = self.sum()
        self._expect(closing)
        return node

    def _root(self) -> Node:
        degree: Node = Number(Fraction(2))
        if self.peek() == "[":
            degree = self._group("[", "]")
        token = self.peek()
        if token is not None and token.isdigit() and len(token) > 1:
            raise NotUnderstoodError  # `\sqrt12` is the root of 1, or was meant to be that of 12
        return Operation("root", (self._argument(), degree))

    def _logarithm(self, name: str) -> Node:
        base: Node | None = None
        if self.peek() == "_":
            self._take()
            base = self._argument()
        argument = self._function_argument()
        if base is not None:
            return Operation("div", (Operation("ln", (argument,)), Operation("ln", (base,))))
        return Operation(name, (argument,))

    def _function(self, name: str) -> Node:
        """`\\sin^2 x` is a power of the sine, `\\sin^{-1} x` its inverse."""
        exponent: Node | None = None
        if self.peek() == "^":
            self._take()
            exponent = self._exponent()
        argument = self._function_argument()
        if exponent is None:
            return Operation(name, (argument,))
        if exponent == Number(Fraction(-1)):
            if name not in ("sin", "cos", "tan"):
                raise NotUnderstoodError
            return Operation(f"arc{name}", (argument,))
        return Operation("pow", (Operation(name, (argument,)), exponent))

    def _function_argument(self) -> Node:
        """A group, or the factors up to the next sign or function: `\\sin 2x`."""
        if self.peek() in ("(", "{", "["):
            opening = self.peek()
            node = self._group(str(opening), {"(": ")", "{": "}", "[": "]"}[str(opening)])
            if self.peek() == "^":
                raise NotUnderstoodError  # `\sin(x)^2` is read in two ways
            return node
        node = self._power()
        while self._continues_argument(self.peek()):
            node = Operation("mul", (node, self._power()))
        return node

    def _continues_argument(self, token: str | None) -> bool:
        if not self._starts_factor(token) or token is None:
            return False
        name = token.removeprefix("\\")
        return name not in _FUNCTIONS and token not in {*_LOGARITHMS, "*", "/", "(", "[", "{", "|", "\\exp"}
