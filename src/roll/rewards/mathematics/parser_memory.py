"""What math-verify's parser remembers, kept from growing without end.

An ANTLR parser caches each lookahead that it meets, as states of automata and as shared contexts, for as long as its
process lives. Texts of a grammar repeat themselves, so usually that ends soon; a model's texts never stop being new,
and a worker that scored 24,000 fuzzed answers had grown by 16 MB, nearly all of it such states.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MOST_REMEMBERED", "bound", "forget", "num_remembered"]

MOST_REMEMBERED = 8_000
"""States and contexts of the parser; about 15 MB. Usual answers need a fraction of that."""


def _parts() -> tuple[Any, Any]:
    from latex2sympy2_extended.antlr_parser import PSLexer, PSParser

    return PSLexer, PSParser


def num_remembered() -> int:
    """Return the number of states and contexts that the lexer and the parser have cached in this process."""
    lexer, parser = _parts()
    states = sum(len(automaton.states) for part in (lexer, parser) for automaton in part.decisionsToDFA)
    return states + len(parser.sharedContextCache)


def forget() -> None:
    """Let lexer and parser begin anew; never while one of them is at work."""
    from antlr4.dfa.DFA import DFA

    lexer, parser = _parts()
    for part in (lexer, parser):
        part.decisionsToDFA[:] = [DFA(state, number) for number, state in enumerate(part.atn.decisionToState)]
    parser.sharedContextCache.cache.clear()


def bound() -> None:
    """Forget what is too much."""
    if num_remembered() > MOST_REMEMBERED:
        forget()
