"""The page of questions is current, and each has its picture; `make bench NAME=questions` asks them in a browser."""

import questions_page
from docs.pages import ROOT

PICTURES = ROOT / "docs" / "questions"
MAX_BYTES = 80_000


def test_docs_questions_the_page_is_current():
    written = questions_page.PAGE.read_text(encoding="utf-8")
    assert written == questions_page.page(), "run: python tools/questions_page.py"


def test_docs_questions_ten_questions_or_more_are_answered_within_three_clicks_and_shown():
    ids = [question.id for question in questions_page.QUESTIONS]
    assert len(ids) == len(set(ids)) >= 10
    assert all(1 <= len(question.clicks) <= 3 and question.shows for question in questions_page.QUESTIONS)
    assert sorted(path.stem for path in PICTURES.iterdir()) == sorted(ids)
    assert all(0 < path.stat().st_size <= MAX_BYTES for path in PICTURES.iterdir())
