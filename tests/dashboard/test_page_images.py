"""Images of rollouts on the page, in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from dashboard.served import HOSTILE, Site, add_images
from dashboard.test_page import first_row, show, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digests(site: Site, trained: Path) -> dict[str, str]:
    shutil.copytree(trained, site.runs / "images")
    digests = add_images(site.runs / "images")
    while "indexing" in site.get(f"runs/{site.run('images')}/rollouts"):
        pass  # every request reads more files
    return digests


def test_dashboard_page_images_are_thumbnails_that_a_click_enlarges(
    browser: Any, site: Site, digests: dict[str, str]
) -> None:
    context = browser.new_context()
    page = context.new_page()
    show(page, site, "rollout", "images", row=first_row(site, "images")["row"])
    thumbnail = page.locator("button.thumbnail").first
    until(page, "document.querySelector('.thumbnail img')?.complete")
    sizes = thumbnail.locator("img").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert sizes == [256, 128]  # of 600 × 300
    thumbnail.click()
    until(page, "document.querySelector('dialog img')?.naturalWidth === 600")
    assert digests["shown"] in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    until(page, "document.querySelector('dialog') === null")
    until(page, "document.querySelectorAll('.image-missing').length === 2")
    until(page, "document.querySelector('main').textContent.includes('not an image in a supported format')")
    assert not page.evaluate("window.hacked")
    assert page.locator("main script, main b:text-is('not bold')").count() == 0
    context.close()


def test_dashboard_page_images_that_are_missing_say_so(page: Any, site: Site, digests: dict[str, str]) -> None:
    def hide(route: Any) -> None:
        """Answer without the corrupted image, about which the browser's console complains."""
        found = route.fetch().json()
        found["messages"] = [message for message in found["messages"] if "corrupted" not in message["content"]]
        route.fulfill(json=found)

    row = first_row(site, "images")["row"]
    page.route(f"**/rollouts/{row}", hide)
    show(page, site, "rollout", "images", row=row)
    missing = page.locator(".image-missing")
    assert missing.count() == 1
    assert missing.inner_text().startswith(f"[image {digests['missing'][:12]}] cannot be shown: image ")
    assert "not in the run's media store" in missing.inner_text()
    assert page.locator(".turn.kind-prompt pre").first.text_content() == f"{HOSTILE} shown "
