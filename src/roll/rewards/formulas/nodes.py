"""A formula as a tree, and the two ways in which reading or computing one ends early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

__all__ = ["Node", "NotUnderstoodError", "Number", "Operation", "Symbol", "TooLargeError", "negated", "symbols"]


class NotUnderstoodError(Exception):
    """The text is no formula of the kinds known here; another reader may do better."""


class TooLargeError(Exception):
    """A number, or the formula itself, is larger than any sensible answer."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written."""

    value: Fraction
    num_decimals: int = 0
    """Digits after the point."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, or one of the constants `pi`, `e`, `i`, `oo`."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation or function: see `roll.rewards.formulas.compute` for their names."""

    name: str
    args: tuple[Node, ...]


Node: TypeAlias = "Number | Symbol | Operation"


def negated(node: Node) -> Node:
    """The node with the opposite sign; of a number, a number."""
    if isinstance(node, Number):
        return Number(-node.value, node.num_decimals)
    return Operation("neg", (node,))


def symbols(node: Node) -> Iterator[str]:
    """Names of all symbols, as often as they occur."""
    if isinstance(node, Symbol):
        yield node.name
    elif isinstance(node, Operation):
        for arg in node.args:
            yield from symbols(arg)
