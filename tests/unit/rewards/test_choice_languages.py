"""Multiple choice in sentences of several languages, with a bracket behind the letter, and with `only`."""

from __future__ import annotations

import time

import pytest

from roll.rewards.choice import extract_letter, parse_options, score_choice

ANSWERS = [
    ("A (Paris)", "A"),
    ("B (Rome)", "B"),
    ("C (because it is larger)", "C"),
    ("B (2)", "B"),
    ("D (all of the above)", "D"),
    ("Only C satisfies the condition", "C"),
    ("Only C satisfies the condition.", "C"),
    ("Only option B fits the description.", "B"),
    ("Only (D) holds.", "D"),
    ("Hence only B works.", "B"),
    ("Only C meets all requirements.", "C"),
    ("Only C and D satisfy the condition.", None),
    ("Only C fails.", None),
    ("Only C does not satisfy the condition.", None),
    ("Not only C satisfies the condition.", None),
    ("Only A contradicts the text.", None),
    ("Only C is wrong.", None),
    ("Only B violates the rule", None),
    ("Die richtige Antwort ist B", "B"),
    ("Die richtige Antwort ist B.", "B"),
    ("Die richtige Antwort lautet C.", "C"),
    ("Antwort: D", "D"),
    ("Die Antwort ist (A).", "A"),
    ("Richtig ist B.", "B"),
    ("Die korrekte Option ist C", "C"),
    ("Also ist B richtig.", "B"),
    ("Lösung: C", "C"),
    ("B ist richtig.", "B"),
    ("B ist falsch, C ist richtig.", "C"),
    ("Die richtige Antwort ist nicht B.", None),
    ("Die Antwort ist nicht B, sondern C.", "C"),
    ("Die richtige Antwort ist B oder C.", None),
    ("Antwort A ist falsch.", None),
    ("La respuesta correcta es B", "B"),
    ("La respuesta correcta es la B.", "B"),
    ("La respuesta es C.", "C"),
    ("Respuesta: D", "D"),
    ("La opción correcta es la C", "C"),
    ("La opción A es incorrecta.", None),
    ("La respuesta no es B.", None),
    ("La respuesta no es B, sino C.", "C"),
    ("La respuesta es B o C.", None),
    ("La respuesta es A y B.", None),
    ("La bonne réponse est B.", "B"),
    ("La réponse est C", "C"),
    ("Réponse : D", "D"),
    ("La réponse n'est pas B.", None),
    ("La réponse est B ou C.", None),
    ("La risposta corretta è B.", "B"),
    ("A resposta correta é C.", "C"),
    ("Risposta: A", "A"),
    ("Resposta: D", "D"),
    ("La respuesta a la pregunta es desconocida.", None),
    ("La réponse a été donnée.", None),
    ("A resposta é desconhecida.", None),
    ("Die Antwort ist B, weil A falsch ist.", "B"),
    ("A (Paris) or B (Rome)", None),
    ("A (Paris), B (Rome), C (Bern)", None),
    ("A (Paris) is wrong.", None),
    ("A (indefinite article) dog", None),
    ("A (very) long story about B.", None),
    ("Not A (Paris)", None),
    ("I (think) so", None),
    ("La respuesta e B", None),
    ("Ich wähle B.", "B"),
    ("Elijo la B.", "B"),
    ("Je choisis B.", "B"),
    ("Weder A noch B.", None),
    ("Es ist nicht klar, ob die Antwort B ist.", None),
    ("Nur C erfüllt die Bedingung.", "C"),
    ("Nur C ist falsch.", None),
    ("Solo C cumple la condición.", "C"),
    ("Is it A (Paris)?", None),
    ("A (Paris)?", None),
    ("**A** (Paris)", "A"),
    ("A (Paris).", "A"),
    ("The answer: A (Paris)", "A"),
    ("Option B (Rome)", "B"),
    ("La opción B es la correcta.", "B"),
    ("B es la respuesta correcta.", "B"),
    ("B est la bonne réponse.", "B"),
    ("A, porque B es falsa", "A"),
    ("A car is fast.", None),
    ("Resposta: A capital da França é Paris.", None),
    ("La respuesta es A mi parecer dudosa", None),
    ("Resposta: A alternativa correta é a B.", "B"),
    ("Marco B. Rossi wrote it.", None),
    ("Is it A? No: B.", "B"),
    ("Option D claims only C works.", None),
    ("Only C satisfies the first condition, but D satisfies both.", None),
    ("Only C satisfies x > 2. Only D satisfies x < 5.", None),
    ("Does only C satisfy the condition?", None),
    ("Die Antwort wäre B, wenn x positiv ist.", None),
    ("Die Antwort ist B, falls x > 2, sonst C.", None),
    ("Zuerst dachte ich, die Antwort ist B, aber es ist C.", "C"),
    ("¿Es B correcta?", None),
    ("Ist B richtig?", None),
    ("Die richtige Antwort ist **C**.", "C"),
    ("La respuesta correcta es **B) Roma**.", "B"),
    ("La respuesta correcta es B) París.", "B"),
    ("La respuesta correcta es la opción C.", "C"),
    ("Die richtige Antwort ist B: Paris", "B"),
    ("La bonne réponse est la réponse B.", "B"),
    ("Die richtige Antwort ist daher B.", "B"),
    ("Por lo tanto, la respuesta es D.", "D"),
    ("Donc la réponse est (D)", "D"),
    ("A (or B)", None),
    ("A (Paris)\nB (Rome)", None),
    ("The capital is Paris.\n\nA (Paris)", "A"),
    ("A (wrong)", None),
    ("A (incorrecta)", None),
    ("E (energy) is mc^2", None),
    ("La respuesta es desconocida, A o B.", None),
    ("Creo que es B o C", None),
    ("E la risposta è sconosciuta", None),
    ("Y es la respuesta", None),
    ("O resultado é 5", None),
    ("Weder A noch B, sondern C.", "C"),
    ("No es A ni B, es la C.", "C"),
    ("Ce n'est pas B, c'est C.", "C"),
    ("Non è A, è la B.", "B"),
    ("Não é A, é a B.", "B"),
    ("Die Option A ist falsch. Die Option B ist falsch. Die Option C ist richtig.", "C"),
    ("La opción A es falsa, la opción B es verdadera.", "B"),
]
"""An answer, and the letter that a reader takes from it: `None` where it settles on none."""


@pytest.mark.parametrize(("text", "letter"), ANSWERS)
def test_reward_choice_reads_sentences_of_other_languages_and_brackets(text: str, letter: str | None) -> None:
    assert extract_letter(text, "ABCDE") == letter


def test_reward_choice_never_takes_another_letter_for_right() -> None:
    wrong = [
        (text, other)
        for text, letter in ANSWERS
        for other in "ABCDE"
        if other != letter and score_choice(text, other, "ABCDE") is True
    ]
    assert wrong == []


def test_reward_choice_options_with_brackets_are_no_list_of_options() -> None:
    assert parse_options("A (Paris)\nB (Rome)", "ABCDE") == {}


@pytest.mark.parametrize(
    "text", ["Die Antwort ist " * 4_000, "A (" * 20_000, "only B fits " * 5_000, "la la la A " * 5_000, "B es " * 9_000]
)
def test_reward_choice_of_long_texts_takes_linear_time(text: str) -> None:
    begin = time.process_time()
    extract_letter(text, "ABCDE")
    assert time.process_time() - begin < 5
