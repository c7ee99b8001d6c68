"""Bound the memory of math-verify's parser caches.

An ANTLR parser never removes entries from its caches of automaton states and contexts. A model's answers always contain
new text, so the caches keep growing: a worker that scored 24,000 fuzzed answers grew by 16 MB, nearly all of it in
these caches.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_CACHED_STATES", "clear_caches", "count_cached", "limit_caches"]

MAX_CACHED_STATES = 8_000
"""Maximum number of cached states and contexts of the parser; about 15 MB. Typical answers need a fraction of this."""


def _import_parser() -> tuple[Any, Any]:
    from latex2sympy2_extended.antlr_parser import PSLexer, PSParser

    return PSLexer, PSParser


def count_cached() -> int:
    """Return the number of states and contexts that the lexer and the parser have cached in this process."""
    lexer, parser = _import_parser()
    states = sum(len(automaton.states) for part in (lexer, parser) for automaton in part.decisionsToDFA)
    return states + len(parser.sharedContextCache)


def clear_caches() -> None:
    """Clear the caches of the lexer and the parser. Must not be called while either of them is running."""
    from antlr4.dfa.DFA import DFA

    lexer, parser = _import_parser()
    for part in (lexer, parser):
        part.decisionsToDFA[:] = [DFA(state, number) for number, state in enumerate(part.atn.decisionToState)]
    parser.sharedContextCache.cache.clear()


def limit_caches() -> None:
    """Clear the caches if they are too large."""
    if count_cached() > MAX_CACHED_STATES:
        clear_caches()
