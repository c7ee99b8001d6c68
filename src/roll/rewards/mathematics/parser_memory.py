"""Bound the memory of math-verify's parser caches.

An ANTLR parser caches each lookahead that it meets, as states of automata and as shared contexts, for as long as its
process lives. Texts of a grammar repeat themselves, so usually the cache stops growing; a model's texts are always new,
and a worker that scored 24,000 fuzzed answers had grown by 16 MB, nearly all of it such states.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MOST_REMEMBERED", "bound", "forget", "num_remembered"]

MOST_REMEMBERED = 8_000
"""Most cached states and contexts of the parser; about 15 MB. Usual answers need a fraction of that."""


def _parts() -> tuple[Any, Any]:
    from latex2sympy2_extended.antlr_parser import PSLexer, PSParser

    return PSLexer, PSParser


def num_remembered() -> int:
    """Return the number of states and contexts that the lexer and the parser have cached in this process."""
    lexer, parser = _parts()
    states = sum(len(automaton.states) for part in (lexer, parser) for automaton in part.decisionsToDFA)
    return states + len(parser.sharedContextCache)


def forget() -> None:
    """Clear the caches of lexer and parser; must not be called while one of them runs."""
    from antlr4.dfa.DFA import DFA

    lexer, parser = _parts()
    for part in (lexer, parser):
        part.decisionsToDFA[:] = [DFA(state, number) for number, state in enumerate(part.atn.decisionToState)]
    parser.sharedContextCache.cache.clear()


def bound() -> None:
    """Clear the caches if they are too large."""
    if num_remembered() > MOST_REMEMBERED:
        forget()
