"""The 25 verifiable instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), each a function of an answer's text.

Names and arguments are as in the IFEval data set (`instruction_id_list`, `kwargs`), so rows of IFEval and of derived
data sets can be used unchanged. Where the paper is ambiguous, ROLL follows the published code, with these exceptions:
keywords are strings, not patterns; sentences are found by rules (`roll.rewards.sentences`) instead of a downloaded
model; text of an unknown language is treated as no language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from roll.errors import ConfigError
from roll.registry import did_you_mean
from roll.rewards.sentences import count_capital_words, count_words, split_sentences
from roll.version import build_install_command

__all__ = ["INSTRUCTIONS", "InstructionError", "build_loose_variants", "check_instruction"]

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]


class InstructionError(ValueError):
    """An instruction is unknown, or its arguments are invalid."""


def _read_integer(arguments: Arguments, name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise InstructionError(f"'{name}' must be an integer >= 0, got {value!r}")
    return int(value)


def _read_text(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InstructionError(f"'{name}' must be a non-empty string, got {value!r}")
    return value.strip()


def _read_texts(arguments: Arguments, name: str) -> list[str]:
    value = arguments.get(name)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v.strip() for v in value):
        raise InstructionError(f"'{name}' must be a list of non-empty strings, got {value!r}")
    return [entry.strip() for entry in value]


def _check_relation(count: int, arguments: Arguments, number: str, relation: str) -> bool:
    wanted, how = _read_integer(arguments, number), arguments.get(relation)
    if how == "at least":
        return count >= wanted
    if how == "less than":
        return count < wanted
    raise InstructionError(f"'{relation}' must be 'at least' or 'less than', got {how!r}")


def _count_occurrences(word: str, text: str) -> int:
    return text.casefold().count(word.casefold())


def _check_forbidden_words(text: str, arguments: Arguments) -> bool:
    words = _read_texts(arguments, "forbidden_words")
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in words)


def _check_letter_frequency(text: str, arguments: Arguments) -> bool:
    letter = _read_text(arguments, "letter")
    if len(letter) != 1:
        raise InstructionError(f"'letter' must be one character, got {letter!r}")
    return _check_relation(text.lower().count(letter.lower()), arguments, "let_frequency", "let_relation")


def detect_language(text: str) -> str:
    """Return the ISO 639-1 code of the text's language, deterministically, or an empty string if it is not detected.

    Raises:
        ConfigError: `langdetect` is not installed.
    """
    try:
        import langdetect
    except ImportError:
        raise ConfigError(
            "instructions about a language require the package langdetect: install it with "
            f"`{build_install_command('instructions')}`."
        ) from None
    # langdetect draws random numbers: without a seed, the same text may get different languages.
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text[:5_000]))
    except langdetect.LangDetectException:
        return ""


def _check_num_paragraphs(text: str, arguments: Arguments) -> bool:
    """Check the number of nonempty paragraphs separated by `***`; only the first and the last may be empty."""
    parts = [part.strip() for part in text.split("***")]
    if not all(parts[1:-1]):
        return False
    return sum(map(bool, parts)) == _read_integer(arguments, "num_paragraphs")


def _check_first_word(text: str, arguments: Arguments) -> bool:
    """Check the number of paragraphs separated by blank lines, and the first word of the n-th paragraph."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    place, word = _read_integer(arguments, "nth_paragraph"), _read_text(arguments, "first_word")
    if len(paragraphs) != _read_integer(arguments, "num_paragraphs") or not 1 <= place <= len(paragraphs):
        return False
    first = re.split(r"[.,?!'\"]", paragraphs[place - 1].split()[0].lstrip("'\""))[0]
    return first.lower() == word.lower()


def _check_postscript(text: str, arguments: Arguments) -> bool:
    marker = _read_text(arguments, "postscript_marker")
    letters = re.sub(r"[^a-z]", "", marker.lower())
    pattern = r"\.\s?".join(letters) if letters in ("ps", "pps") else re.escape(marker)
    return re.search(rf"(?m)(?:^|\s){pattern}", text, re.IGNORECASE) is not None


_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _check_json(text: str, arguments: Arguments) -> bool:
    fenced = re.fullmatch(r"```(?:json)?\s*\n?(.*?)```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _check_two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


INSTRUCTIONS: dict[str, Check] = {
    "change_case:capital_word_frequency": lambda text, given: _check_relation(
        count_capital_words(text), given, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, _: text.isupper() and detect_language(text.lower()) == "en",
    "change_case:english_lowercase": lambda text, _: text.islower() and detect_language(text) == "en",
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(_read_text(given, "prompt_to_repeat").lower())
    ),
    "combination:two_responses": _check_two_responses,
    "detectable_content:number_placeholders": lambda text, given: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= _read_integer(given, "num_placeholders")
    ),
    "detectable_content:postscript": _check_postscript,
    "detectable_format:constrained_response": lambda text, _: any(option in text for option in _OPTIONS),
    "detectable_format:json_format": _check_json,
    "detectable_format:multiple_sections": lambda text, given: (
        len(re.findall(rf"{re.escape(_read_text(given, 'section_spliter'))}\s?\d+", text))
        >= _read_integer(given, "num_sections")
    ),
    "detectable_format:number_bullet_lists": lambda text, given: (
        len(re.findall(r"(?m)^[^\S\n]*(?:\*(?!\*)|-).", text)) == _read_integer(given, "num_bullets")
    ),
    "detectable_format:number_highlighted_sections": lambda text, given: (
        sum(not part.isspace() for part in re.findall(r"\*{1,2}([^\n*]+)\*{1,2}", text))
        >= _read_integer(given, "num_highlights")
    ),
    "detectable_format:title": lambda text, _: any(map(str.strip, re.findall(r"<<([^\n<>]+)>>", text))),
    "keywords:existence": lambda text, given: all(
        _count_occurrences(word, text) for word in _read_texts(given, "keywords")
    ),
    "keywords:forbidden_words": _check_forbidden_words,
    "keywords:frequency": lambda text, given: _check_relation(
        _count_occurrences(_read_text(given, "keyword"), text), given, "frequency", "relation"
    ),
    "keywords:letter_frequency": _check_letter_frequency,
    "language:response_language": lambda text, given: (
        detect_language(text).partition("-")[0] == _read_text(given, "language").partition("-")[0].lower()
    ),
    "length_constraints:nth_paragraph_first_word": _check_first_word,
    "length_constraints:number_paragraphs": _check_num_paragraphs,
    "length_constraints:number_sentences": lambda text, given: _check_relation(
        len(split_sentences(text)), given, "num_sentences", "relation"
    ),
    "length_constraints:number_words": lambda text, given: _check_relation(
        count_words(text), given, "num_words", "relation"
    ),
    "punctuation:no_comma": lambda text, _: "," not in text,
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(_read_text(given, "end_phrase").lower())
    ),
    "startend:quotation": lambda text, _: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
}
"""The checks by instruction name: functions of an answer's text and the instruction's arguments."""


def check_instruction(instruction: str, arguments: Arguments, text: str) -> bool:
    """Return whether a text follows an instruction. An empty text follows no instruction.

    Raises:
        InstructionError: The instruction does not exist, or an argument is missing or of the wrong type.
    """
    try:
        function = INSTRUCTIONS[instruction]
    except KeyError:
        raise InstructionError(
            f"unknown instruction '{instruction}'.{did_you_mean(instruction, list(INSTRUCTIONS))}"
        ) from None
    try:
        followed = function(text, arguments)
    except InstructionError as error:
        raise InstructionError(f"instruction '{instruction}': {error}") from None
    return bool(text.strip()) and followed


def build_loose_variants(text: str) -> list[str]:
    """Return the text and the variants that the loose criterion also accepts (section 2.2 of arXiv 2311.07911).

    The variants lack the first line, the last line, or both; each one is also returned without asterisks.
    """
    lines = text.split("\n")
    cut = [text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return list(dict.fromkeys([*cut, *(part.replace("*", "") for part in cut)]))
