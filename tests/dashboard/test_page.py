"""The page of `roll dashboard` in a real browser: every view of a run that has ended, and of one that grows."""

from __future__ import annotations

import csv
import io
import json
import time
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest
from dashboard.served import HOSTILE, Site, copy

pytestmark = pytest.mark.slow
VIEWS = ("overview", "answers", "rollouts", "time", "health", "plan")


def show(page: Any, site: Site, view: str, run: str = "ended", **params: Any) -> None:
    """Open a view, by its link alone, and wait for it."""
    query = urlencode({"runs" if view == "overview" else "run": site.run(run), **params})
    page.goto("about:blank")
    page.goto(f"{site.address}#/{view}?{query}")
    page.wait_for_selector(".view:not([aria-busy])")


def steps(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def answers(run: Path, pattern: str = "*.parquet") -> list[dict[str, Any]]:
    return [row for path in sorted((run / "rollouts").glob(pattern)) for row in pq.read_table(path).to_pylist()]


def first_row(site: Site, run: str = "ended") -> dict[str, Any]:
    """The first rollout of a training step, as the server lists it."""
    listed = site.get(f"runs/{site.run(run)}/rollouts?kind=train&limit=500")["rows"]
    return min(listed, key=lambda row: row["row"])


def until(page: Any, expression: str) -> None:
    """Waits for what an expression says of the page (whose policy forbids Playwright's own way of asking again)."""
    ended = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < ended, expression
        page.wait_for_timeout(20)


def test_dashboard_page_curves_end_where_the_metrics_do_and_are_painted(page: Any, site: Site) -> None:
    show(page, site, "overview")
    plot = page.locator('[data-metric="reward/mean"] canvas').first
    plot.wait_for()
    label = plot.get_attribute("aria-label")
    assert float(label.rsplit(" ", 1)[1]) == pytest.approx(steps(site.runs / "ended")[-1]["reward/mean"], rel=1e-3)
    painted = plot.evaluate(
        """canvas => { const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i + 3] > 200 && Math.max(d[i], d[i+1], d[i+2])
        - Math.min(d[i], d[i+1], d[i+2]) > 60; return n; }"""
    )
    assert painted > 100  # coloured pixels: a curve, not only its axes


def test_dashboard_page_metrics_are_found_by_parts_of_their_names_and_the_link_keeps_all_choices(
    page: Any, site: Site
) -> None:
    show(page, site, "overview")
    page.keyboard.press("/")
    page.keyboard.type("grad norm")
    until(page, "document.querySelectorAll('.card').length === 1")
    assert page.locator(".card h4").inner_text() == "training/grad_norm"
    page.get_by_role("button", name="log", exact=True).click()
    page.get_by_role("button", name="time", exact=True).click()
    page.get_by_label("Smoothing").fill("0.5")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".card canvas")
    assert page.get_by_label("Search metrics").input_value() == "grad norm"
    assert page.get_by_role("button", name="log", exact=True).get_attribute("aria-pressed") == "true"
    assert page.get_by_role("button", name="time", exact=True).get_attribute("aria-pressed") == "true"
    assert page.get_by_label("Smoothing").input_value() == "0.5"


def test_dashboard_page_runs_lie_over_one_another_and_a_broken_one_says_why(page: Any, site: Site) -> None:
    both = f"{site.run('ended')},{site.run('growing')}"
    page.goto(f"{site.address}#/overview?{urlencode({'runs': both})}")
    plot = page.locator('[data-metric="reward/mean"] canvas').first
    plot.wait_for()
    assert plot.get_attribute("aria-label").count("ends at") == 2
    assert "not" in page.locator(".run .problem").first.inner_text()


def test_dashboard_page_rollouts_are_counted_filtered_sorted_and_searched(page: Any, site: Site) -> None:
    rows = answers(site.runs / "ended")
    show(page, site, "rollouts")
    until(page, f"document.querySelector('#matching').textContent.startsWith('{len(rows):,} ')")
    page.get_by_role("button", name="tokens").click()
    until(page, "location.hash.includes('sort=num_tokens')")
    longest = max(len(row["token_ids"]) for row in rows)
    until(
        page,
        f"document.querySelector('.vt-row')?.children[4].textContent === '{longest}'",
    )
    page.get_by_label("step, at least").fill("3")
    wanted = sum(row["step"] >= 3 for row in rows)
    until(page, f"document.querySelector('#matching').textContent.startsWith('{wanted:,} ')")
    text = max(rows, key=lambda row: len(row["text"]))["text"][:8].strip()
    found = sum(text.lower() in (row["prompt"] + "\0" + row["text"]).lower() for row in rows if row["step"] >= 3)
    page.get_by_label("Search in prompts and answers").fill(text)
    until(page, f"document.querySelector('#matching').textContent === '{found:,} found'")


def test_dashboard_page_a_rollout_shows_its_turns_tokens_and_group(page: Any, site: Site) -> None:
    row = first_row(site)
    full = site.get(f"runs/{site.run('ended')}/rollouts/{row['row']}")
    show(page, site, "rollout", row=row["row"])
    assert page.locator(".turn.kind-model pre").first.text_content() == (full["text"] or "(empty)")
    page.get_by_role("tab", name="Tokens").click()
    page.wait_for_selector(".tok")
    tokens = site.get(f"runs/{site.run('ended')}/rollouts/{row['row']}/tokens")
    assert page.locator(".tok").count() == len(tokens["tokens"]) == row["num_tokens"]
    page.locator(".tok").last.hover()
    shown = page.locator(".token-detail div:has(dt:text-is('logprob')) dd").inner_text()
    assert float(shown) == pytest.approx(tokens["columns"]["logprob"][-1], rel=1e-3)
    page.get_by_role("tab", name="Group").click()
    page.wait_for_selector(".answer")
    group = [r for r in answers(site.runs / "ended", "step-*.parquet") if r["draw_id"] == row["draw_id"]]
    assert sorted(page.locator(".answer pre").all_text_contents()) == sorted(r["text"] for r in group)


def test_dashboard_page_time_goes_from_the_whole_run_to_a_step(page: Any, site: Site) -> None:
    show(page, site, "time")
    rows = page.locator(".phase-row")
    assert rows.count() == len(steps(site.runs / "ended"))
    measured = site.get(f"runs/{site.run('ended')}/trace/steps")
    assert rows.first.locator(".held").inner_text() == measured[0]["held_back_by"]
    whole = page.locator(".lanes-canvas").get_attribute("aria-label")
    rows.nth(1).click()
    until(page, "location.hash.includes('from=')")
    assert page.locator(".lanes-canvas").get_attribute("aria-label") != whole
    page.keyboard.press("0")
    until(page, "!location.hash.includes('from=')")
    assert page.locator(".lanes-canvas").get_attribute("aria-label") == whole


def test_dashboard_page_a_long_trace_is_followed_until_the_server_has_read_it_all(page: Any, site: Site) -> None:
    whole = {path: site.get(f"runs/{site.run('ended')}/trace/{path}") for path in ("lanes", "steps")}
    half = whole["lanes"]["end_s"] / 2
    early = [span for span in whole["lanes"]["spans"] if span["end_s"] <= half]
    first = {
        "lanes": whole["lanes"] | {"spans": early, "end_s": half, "indexing": {"bytes_left": 2**20}},
        "steps": whole["steps"][:1],
    }
    asked = {"lanes": 0, "steps": 0}

    def answer(route: Any) -> None:
        path = route.request.url.split("?")[0].rsplit("/", 1)[1]
        asked[path] += 1
        route.fulfill(json=(first if asked[path] == 1 else whole)[path])

    page.route("**/trace/*", answer)
    show(page, site, "time")
    until(page, f"document.querySelectorAll('.phase-row').length === {len(whole['steps'])}")
    until(page, "!document.querySelector('.time').textContent.includes('still to read')")


def test_dashboard_page_health_says_what_became_of_every_draw(page: Any, site: Site) -> None:
    show(page, site, "health")
    fates = site.get(f"runs/{site.run('ended')}/health")["ledger"]["fates"]
    ledger = page.get_by_role("region", name="Ledger", exact=True)
    assert f"{sum(fates.values()):,} draws" in ledger.inner_text()
    for fate, number in fates.items():
        assert f"{fate}\n{number:,}" in ledger.inner_text()


def test_dashboard_page_every_answer_leads_to_where_it_comes_from(page: Any, site: Site) -> None:
    while "indexing" in (found := site.get(f"runs/{site.run('ended')}/answers")):
        page.wait_for_timeout(20)
    answers = found["answers"]
    show(page, site, "answers")
    cards = page.locator(".answer-card")
    assert cards.locator("h2").all_inner_texts() == [answer["question"] for answer in answers]
    assert cards.locator(".said").all_inner_texts() == [answer["answer"] for answer in answers]
    links = [link.get_attribute("href") for link in cards.locator("a").all()]
    assert len(links) == sum(len(answer["links"]) for answer in answers)
    for view in {link.split("?")[0]: link for link in links}.values():
        page.goto(f"{site.address}{view}")
        page.wait_for_selector(".view:not([aria-busy])")
        assert "could not be shown" not in page.locator("main").inner_text()


def test_dashboard_page_rollouts_that_were_not_trained_are_one_choice(page: Any, site: Site) -> None:
    rows = answers(site.runs / "ended", "step-*.parquet")
    left_out = sum(row["advantage"] is None for row in rows)
    show(page, site, "rollouts", kind="train")
    page.get_by_label("trained").select_option("false")
    until(page, f"document.querySelector('#matching').textContent.startsWith('{left_out:,} ')")


def test_dashboard_page_a_run_without_a_plan_says_how_to_make_one(page: Any, site: Site) -> None:
    show(page, site, "plan")
    assert "roll plan" in page.locator(".plan").inner_text()
    assert "pipeline" in page.locator(".plan pre").inner_text()


def test_dashboard_page_hostile_texts_are_shown_as_they_are(page: Any, site: Site) -> None:
    name = "hostile <b>run<b>"
    row = first_row(site, name)
    show(page, site, "rollouts", name, kind="train")
    page.wait_for_selector(f".vt-row:has-text('{HOSTILE[:12]}')")
    show(page, site, "rollout", name, row=row["row"])
    assert page.locator(".turn.kind-model pre").first.text_content() == HOSTILE
    for tab in ("Tokens", "Group"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_selector(".tok, .answer")
    assert page.locator("main img, main script, main b:text-is('not bold')").count() == 0
    show(page, site, "overview", name)
    assert page.locator(".run-name", has_text=name).is_visible()


def test_dashboard_page_a_run_that_grows_is_followed_without_loading_again(
    page: Any, site: Site, trained: Path
) -> None:
    show(page, site, "overview", "growing")
    plot = page.locator('[data-metric="reward/mean"] canvas').first
    plot.wait_for()
    page.evaluate("window.loadedOnce = true")
    copy(trained, site.runs / "growing", num_steps=6)
    last = steps(trained)[-1]["reward/mean"]
    item = page.locator(".run", has_text="growing")
    item.get_by_text("6 / 6 steps").wait_for()
    assert float(plot.get_attribute("aria-label").rsplit(" ", 1)[1]) == pytest.approx(last, rel=1e-3)
    assert page.evaluate("window.loadedOnce")


def test_dashboard_page_keys_do_what_the_list_of_keys_says(page: Any, site: Site) -> None:
    show(page, site, "overview")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").get_by_text("this list").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_selector(".vt-row.on")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.wait_for_selector("#row-1.on")
    page.keyboard.press("Enter")
    page.wait_for_selector(".rollout-head")
    page.keyboard.press("2")
    page.wait_for_selector(".tok")
    page.keyboard.press("j")
    until(page, "location.hash.includes('at=2')")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") != before


def test_dashboard_page_plots_and_tables_are_saved(page: Any, site: Site) -> None:
    show(page, site, "overview", q="reward/mean")
    page.wait_for_selector(".card canvas")
    saved = {}
    for kind in ("PNG", "SVG", "CSV"):
        page.locator(".card").first.hover()
        with page.expect_download() as download:
            page.get_by_role("button", name=f"as {kind}").first.click()
        saved[kind] = Path(download.value.path()).read_bytes()
    assert saved["PNG"].startswith(b"\x89PNG")
    assert saved["SVG"].startswith(b"<svg") and b"<path" in saved["SVG"]
    table = list(csv.DictReader(io.StringIO(saved["CSV"].decode())))
    shown = table[0].keys() - {"run", "step", "time_s"}
    name = shown.pop()
    assert [float(row[name]) for row in table] == [row[name] for row in steps(site.runs / "ended")]


def test_dashboard_page_a_saved_table_of_a_long_run_has_every_step(page: Any, site: Site) -> None:
    rows = [{"step": step, "kind": "train", "reward/mean": (step * 7919 % 1000) / 1000} for step in range(1, 5001)]
    (site.runs / "long").mkdir()
    (site.runs / "long" / "config.yaml").write_text("pipeline: rlvr\n")
    (site.runs / "long" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(page, site, "overview", "long", q="reward/mean")
    page.wait_for_selector(".card canvas")
    page.locator(".card").first.hover()
    with page.expect_download() as download:
        page.get_by_role("button", name="as CSV").first.click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert [(int(row["step"]), float(row["reward/mean"])) for row in table] == [
        (row["step"], row["reward/mean"]) for row in rows
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_dashboard_page_every_view_is_accessible_and_fits_narrow_windows(browser: Any, site: Site, theme: str) -> None:
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    row = first_row(site)["row"]
    tabs = [("rollout", {"row": row, "tab": tab}) for tab in ("turns", "tokens", "group")]
    for width in (1280, 360):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        page = context.new_page()
        for view, params in [*((view, {}) for view in VIEWS), *tabs]:
            show(page, site, view, **params)
            page.wait_for_load_state("networkidle")
            page.evaluate(axe)
            found = page.evaluate("axe.run()")["violations"]
            serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
            assert serious == [], (view, width)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (view, width)
        context.close()


def test_dashboard_page_the_page_fetches_nothing_from_elsewhere(page: Any, site: Site) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for view in VIEWS:
        show(page, site, view)
    elsewhere = [url for url in asked if not url.startswith((site.address, "about:", "blob:", "data:"))]
    assert elsewhere == []
