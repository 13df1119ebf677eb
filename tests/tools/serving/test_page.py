"""The page, in a real browser."""

import re
import shutil
from collections.abc import Iterator

import pytest
from support.served import Served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def page(server: Served) -> Iterator:
    """The page as it opens, before a key is entered."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, in containers, Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.asked, page.faults = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda line: page.faults.append(line.text) if line.type == "error" else None)
        page.goto(server.url)
        yield page
        browser.close()


def test_page_streams_a_completion(server, page):
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    state, text = page.locator("#state"), page.get_by_label("Text")
    expect(state).to_contain_text("requires a key")
    page.get_by_label("Key").fill(server.key)
    page.get_by_label("Key").blur()
    expect(page.get_by_role("heading")).to_have_text("Try the model endless")

    page.get_by_label("Prompt").fill("Hello")
    page.get_by_label("Length, in tokens").fill("190000")
    page.get_by_role("button", name="Continue").click()
    expect(state).to_have_text("writing")
    expect(text).to_have_text(re.compile(r"Hello.{40}", re.DOTALL))
    page.get_by_role("button", name="Stop").click()
    expect(state).to_have_text("stopped")

    page.get_by_label("Length, in tokens").fill("30")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Continue").click()
    expect(state).to_have_text(re.compile(r"^30 tokens, [\d.]+ a second; as long as asked for$"))
    assert text.text_content() == server.texts(prompt="Hello", max_tokens=30, temperature=0, echo=True)[0]

    page.get_by_label("Temperature").fill("1.5")
    page.get_by_label("Seed").fill("3")
    page.keyboard.press("Enter")
    expect(state).to_contain_text("30 tokens")
    expected = server.texts(prompt="Hello", max_tokens=30, temperature=1.5, seed=3, echo=True)[0]
    assert text.text_content() == expected

    page.get_by_label("Length, in tokens").fill("300000")
    page.get_by_role("button", name="Continue").click()
    expect(state).to_have_text("max_tokens: 300000 is more than this server's 200000")
    assert all(url.startswith(server.url) or url.startswith("data:") for url in page.asked)
    # Answers that refuse something are errors to the console, too.
    assert [fault for fault in page.faults if "Failed to load resource" not in fault] == []
