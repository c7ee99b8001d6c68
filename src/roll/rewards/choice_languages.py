"""Statements about an option's letter in German, Spanish, French, Italian and Portuguese.

These patterns are tried in addition to the English and Chinese ones of `roll.rewards.choice_mentions`, once per letter,
and every repetition is bounded. `A`, `E`, `O` and `Y` are words of these languages, so a letter is accepted only if a
phrase ends after it. A phrase that is a question, a condition, or followed by "but" is not a statement.
"""

from __future__ import annotations

import re

__all__ = ["CONJUNCTIONS", "is_denied", "is_only_fitting_letter", "is_stated"]

CONJUNCTIONS = r"oder|und|bzw\.|y|o|u|ou|et|e|ed"
"""Pattern of the words that join two letters into one statement."""
_MARKS = r"[\s*_\"'“”„«\u2018’$(\[{<>]{0,12}"
_ARTICLE = r"(?:(?:die|der|das|la|el|le|lo|il|a|o|l['’])\s{0,2})?"
_NOUN = (
    r"(?:antwort(?:möglichkeit)?|lösung|option|auswahl|buchstabe|respuesta|opción|opcion|alternativa|solución|letra"
    r"|inciso|réponse|reponse|choix|proposition|lettre|risposta|opzione|soluzione|lettera|resposta|opção|solução)"
)
_IS_VERB = r"(?:ist|lautet|heißt|es|est|è|é)"
_CORRECT_WORDS = (
    r"(?:richtig|korrekt|zutreffend|correct[ao]?|correcte|juste|bonne|corrett[ao]|giust[ao]|corret[ao]|cert[ao]|exacte"
    r"|verdader[ao]|vraie?|ver[ao]|verdadeir[ao])"
)
_WRONG_WORDS = (
    r"(?:falsch|inkorrekt|unzutreffend|ausgeschlossen|incorrect[ao]?|incorrecte|fals[ao]|fausse|faux|erróne[ao]|errat[ao]"
    r"|sbagliat[ao]|errad[ao]|incorret[ao]|scorrett[ao]|descartad[ao]|exclue?|imposible|impossible|unmöglich)"
)
_TAIL = rf"{_MARKS}{_ARTICLE}(?:{_NOUN}\b)?{_MARKS}$"
_CLOSING = r"[)\]}*_\"'”“’»$\s]{0,12}"
_NEGATION_PATTERN = re.compile(
    r"\b(?:nicht|keine?|nie|niemals|weder|no|nunca|jamás|tampoco|ne|pas|jamais|non|mai|não|nem)\b|\bn['’]",
    re.IGNORECASE,
)
_STATED_ANSWER_PATTERN = re.compile(
    rf"(?:\b{_NOUN}\b(?P<between>[^.!?:,;\n]{{0,40}}?)\s{{1,3}}{_IS_VERB}\b|\b{_CORRECT_WORDS}\s{{1,3}}{_IS_VERB}\b"
    rf"|\b{_NOUN}(?:\s{{1,3}}(?:final|finale|{_CORRECT_WORDS}))?[\s*_]{{0,4}}:"
    r"|\b(?:wähle|nehme|elijo|escojo|selecciono|opto por|choisis|scelgo|escolho)\b|\bentscheide mich für\b"
    r"|\b(?:es|das) ist\b|\bc['’]est\b|\b(?:es|è) la\b|\bé a\b|\b(?:sondern|sino(?: que es)?|bensì)\b"
    rf"|\b(?:pero|mais|entonces|luego|ma|quindi|mas|logo|portanto) {_IS_VERB}\b)"
    r"(?:\s{1,3}(?:daher|also|somit|folglich|eindeutig|claramente|entonces|donc|quindi|dunque|portanto|logo)\b)?"
    rf"{_TAIL}",
    re.IGNORECASE,
)
_CONDITION_PATTERN = re.compile(r"\b(?:wenn|falls|ob|sofern|si|se)\b[^.,;:!?\n]{0,30}$", re.IGNORECASE)
_STATEMENT_END_PATTERN = re.compile(
    rf"[).:]|{_CLOSING}(?:$|[.,;:!(\n–—-]|(?:weil|denn|da|porque|ya que|parce|puisque|perché|poiché|pois)\b)",
    re.IGNORECASE,
)
_DOUBT_PATTERN = re.compile(
    r"[^.!;\n]{0,80}[?]|[^.!;\n]{0,30}\b(?:aber|jedoch|pero|mais|ma|mas|wenn|falls|sofern|sonst|si|sinon|se|altrimenti)\b",
    re.IGNORECASE,
)
_VERB_BEFORE_PATTERN = re.compile(
    rf"\b{_IS_VERB}\s{{1,3}}{_ARTICLE}(?:{_NOUN}\s{{1,3}})?[*_(\"]{{0,4}}$", re.IGNORECASE
)
_CORRECT_AFTER_PATTERN = re.compile(rf"{_CLOSING}{_CORRECT_WORDS}\b", re.IGNORECASE)
_IS_CORRECT_PATTERN = re.compile(
    rf"{_CLOSING}{_IS_VERB}\s{{1,3}}(?:(?:die|der|das|la|el|le|il|a|o|un[ae]?|l['’]|einzig|allein|eindeutig|única|unica"
    rf"|seule|claramente)\s{{0,3}}){{0,3}}(?:{_NOUN}\s{{1,3}})?(?:{_CORRECT_WORDS}|richtige|korrekte)\b",
    re.IGNORECASE,
)
_REJECTED_PATTERN = re.compile(
    r"\b(?:nicht|weder|noch|außer|statt|anstatt|ob|wenn|falls|no|ni|salvo|excepto|descarto|descartamos|pas|sauf|non|né"
    rf"|tranne|não|nem|exceto)\b(?:\s{{1,3}}{_IS_VERB})?{_TAIL}",
    re.IGNORECASE,
)
_DENIED_PATTERN = re.compile(
    rf"{_CLOSING}(?:\(\s?|[:–—-]\s{{0,3}})?(?:(?:ist|es|est|è|é|sind|son|sont|sono|são|wäre|sería|serait)\s{{1,3}}"
    rf"(?:\w{{1,14}}\s{{1,3}})?)?(?:{_WRONG_WORDS}|nicht)\b"
    rf"|{_CLOSING}(?:scheidet|entfällt|n['’]|ne\s|no\s(?:es|puede|cumple|son)\b|non\s|não\s|kann\s{{1,3}}nicht"
    r"|passt\s{1,3}nicht|erfüllt\s{1,3}(?:nicht|kein))",
    re.IGNORECASE,
)
_ONLY_PATTERN = re.compile(
    r"(?:^|[.,;:!?\n]\s{0,3}|\b(?:hence|so|thus|therefore|then|since|because|as|clearly|daher|somit|also|folglich|entonces"
    r"|luego|donc|ainsi|quindi|dunque|logo|portanto)\s{1,3})"
    r"(?:only|nur|sólo|solo|solamente|únicamente|seule?|soltanto|apenas|somente)\s{1,3}"
    rf"(?:(?:the\s)?(?:option|choice|answer|statement)\s{{1,3}})?{_TAIL}",
    re.IGNORECASE,
)
_FITS_PATTERN = re.compile(
    rf"{_CLOSING}(?:satisf(?:y|ies)|fits?|works?|holds?|meets?|match(?:es)?|fulfil(?:l?s)?|remains|qualifies"
    r"|agrees with|makes sense|is (?:left|possible|consistent)|erfüllt|passt|stimmt|bleibt|cumple|satisface|encaja"
    r"|convient|satisfait|remplit|respecte|soddisfa|rispetta|satisfaz|atende|cumpre)\b"
    r"(?P<rest>[^.!?;\n]{0,80})(?P<end>.?)",
    re.IGNORECASE,
)
_PARTLY_PATTERN = re.compile(
    r"\b(?:not?|none|neither|nor|never|nothing|but|while|whereas|however|though|if|first|second|third|one|some|part|partly"
    r"|partially|almost|erste|zweite|eine|primera|segunda|première|seconde|prima|seconda|primeira)\b|n['’]t\b",
    re.IGNORECASE,
)


def is_stated(left: str, right: str) -> bool:
    """Return whether the text to the left and right of a letter says that the letter is the answer."""
    if _DOUBT_PATTERN.match(right):
        return False
    found = _STATED_ANSWER_PATTERN.search(left)
    if found is not None:
        if not _STATEMENT_END_PATTERN.match(right) or _NEGATION_PATTERN.search(found["between"] or ""):
            return False
        return not _CONDITION_PATTERN.search(left[max(0, found.start() - 40) : found.start()])
    if _IS_CORRECT_PATTERN.match(right) or (_VERB_BEFORE_PATTERN.search(left) and _CORRECT_AFTER_PATTERN.match(right)):
        return not _CONDITION_PATTERN.search(left) and not _NEGATION_PATTERN.search(left[-20:])
    return False


def is_denied(left: str, right: str) -> bool:
    """Return whether the text to the left and right of a letter says that the letter is not the answer."""
    return _DENIED_PATTERN.match(right) is not None or _REJECTED_PATTERN.search(left) is not None


def is_only_fitting_letter(left: str, right: str) -> bool:
    """Return whether the text around a letter says that only this letter fits (`Only C satisfies the condition`)."""
    fits = _FITS_PATTERN.match(right)
    if fits is None or fits["end"] == "?" or not _ONLY_PATTERN.search(left):
        return False
    return not _PARTLY_PATTERN.search(fits["rest"]) and not _NEGATION_PATTERN.search(fits["rest"])
