"""The built site in a browser: search, dark mode, narrow screens, keyboard, screen readers, print, no request out."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.timeout(1200)]

PATIENCE = 120_000  # ms: the machine may have other work
LAPTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LESSON = "notebooks/00-start-here.html"
KINDS = ("index", "glossary", "search", "api/helpers.diagnosis", "data/reference/cpu-2-cores/README")
KINDS += ("notebooks/01-first-profile", "notebooks/99-everything", "notebooks/checklist", "notebooks/recipes")

# Of all faults that axe-core knows, those that keep people from reading a page
FAULTS = """async (rules) => {
    const found = await axe.run(document, {resultTypes: ["violations"], ...rules});
    const grave = found.violations.filter((each) => ["serious", "critical"].includes(each.impact));
    return grave.flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 200)}`));
}"""
CONTRAST = {"runOnly": ["color-contrast"]}
# With an element for each word of its code, a page takes five times as long. The colours of code and the menu are the
# same on all pages: tests of their own look at them.
WITHOUT_WHAT_ALL_HAVE = """() => {
    for (const each of document.querySelectorAll("div.highlight pre")) each.textContent = each.textContent;
    document.querySelector("#pst-primary-sidebar").remove();
}"""
TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    const wide = [...document.querySelectorAll("body *")].filter((each) => each.getBoundingClientRect().right > width);
    return ["the page scrolls sideways", ...wide.slice(-3).map((each) => each.outerHTML.slice(0, 200))];
}"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and does not log."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(built_site):
    """Address of the site on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=built_site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def names(built_site):
    """All pages."""
    paths = (path.relative_to(built_site) for path in sorted(built_site.rglob("*.html")))
    return [path.as_posix() for path in paths if path.parts[0] != "_static"]


@pytest.fixture(scope="module")
def asked(address):
    """Addresses that a page asked for outside of its own server."""
    return []


@pytest.fixture(scope="module")
def reused(chromium, address, asked):
    context = chromium.new_context(reduced_motion="reduce", base_url=address, color_scheme="light")
    context.set_default_timeout(PATIENCE)
    context.on("request", lambda request: request.url.startswith(address) or asked.append(request.url))
    context.add_init_script(
        "addEventListener('DOMContentLoaded', () => document.head.append(Object.assign("
        "document.createElement('style'), {textContent: '* {transition: none !important}'})))"
    )
    yield context.new_page()
    context.close()


@pytest.fixture
def page(reused):
    """A page as it is for somebody who comes for the first time, with a laptop."""
    reused.goto("search.html")
    reused.evaluate("localStorage.clear()")
    reused.set_viewport_size(LAPTOP)
    reused.emulate_media(color_scheme="light", media="screen")
    return reused


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def press_until(page, reached, key="Tab"):
    """Press a key until the focus is where it should be."""
    for _ in range(300):
        page.keyboard.press(key)
        if page.evaluate(f"document.activeElement.matches({reached!r})"):
            return
    raise AssertionError(f"300 times {key} did not lead to {reached}")


def faults(page, rules):
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    return [f"{page.url}: {fault}" for fault in page.evaluate(FAULTS, rules)]


def test_search_finds_the_notebook_that_explains_a_term(page):
    page.goto(LESSON)
    page.keyboard.press("Control+k")
    page.keyboard.type("pinned memory")
    page.keyboard.press("Enter")
    expect(page.locator("#search-results .search-summary")).to_contain_text("Search finished")
    found = page.locator("#search-results li > a")
    assert "glossary.html#term-pinned-memory" in found.first.get_attribute("href")
    found.filter(has_text="03 · More workers").first.click()
    expect(page.locator("article h1")).to_contain_text("03 · More workers")


def test_the_switch_makes_a_page_dark_and_the_next_page_too(page):
    page.goto(LESSON)
    light = background(page)
    page.get_by_role("button", name="Color mode").locator("visible=true").click()
    page.get_by_text("Dark", exact=True).locator("visible=true").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = background(page)
    page.goto("glossary.html")
    assert background(page) == dark != light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_and_menu_have_no_serious_fault(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(LESSON)
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    assert page.locator("div.highlight span").count() > 100
    assert faults(page, {}) == []


def faults_in_light_and_dark(page, names):
    found = []
    for name in names:
        page.emulate_media(color_scheme="light")
        page.goto(name)
        page.evaluate(WITHOUT_WHAT_ALL_HAVE)
        found += faults(page, {})
        page.emulate_media(color_scheme="dark")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        found += faults(page, CONTRAST)
    return found


def test_no_kind_of_page_has_a_serious_fault(page):
    assert faults_in_light_and_dark(page, [f"{name}.html" for name in KINDS]) == []


@pytest.mark.slow
def test_no_page_has_a_serious_fault(page, names):
    assert faults_in_light_and_dark(page, names) == []


def test_no_page_scrolls_sideways_on_a_phone_or_asks_for_anything_elsewhere(page, names, asked):
    page.set_viewport_size(PHONE)
    too_wide = []
    for name in names:
        page.goto(name)
        too_wide += [f"{name}: {each}" for each in page.evaluate(TOO_WIDE)]
    assert too_wide == []
    assert asked == []


def test_without_a_mouse_the_first_key_leads_past_the_menu(page):
    page.goto(LESSON)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to main content")).to_be_visible()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_without_a_mouse_a_folded_solution_opens(page):
    page.goto(LESSON)
    solution = page.locator("details.hide").first.locator("pre").first
    expect(solution).to_be_hidden()
    press_until(page, "details.hide summary")
    page.keyboard.press("Enter")
    expect(solution).to_be_visible()


def test_without_a_mouse_the_search_opens_and_leads_to_a_page(page):
    page.goto(LESSON)
    press_until(page, "[aria-label=Search]")
    page.keyboard.press("Enter")
    page.keyboard.type("periodic stall")
    page.keyboard.press("Enter")
    expect(page.locator("#search-results .search-summary")).to_contain_text("Search finished")
    press_until(page, "#search-results a[href*='03-more-workers']")
    page.keyboard.press("Enter")
    expect(page.locator("article h1")).to_contain_text("03 · More workers")


def test_without_a_mouse_the_menu_of_a_phone_opens_and_leads_to_a_page(page):
    page.set_viewport_size(PHONE)
    page.goto(LESSON)
    link = page.get_by_role("link", name="06 · Packed formats").first
    expect(link).to_be_hidden()
    press_until(page, ".primary-toggle")
    page.keyboard.press("Enter")
    expect(link).to_be_visible()
    press_until(page, "dialog[open] a[href*='06-packed-formats']")
    page.keyboard.press("Enter")
    expect(page.locator("article h1")).to_contain_text("06 · Packed formats")


def test_on_paper_there_is_the_page_and_no_menu(page):
    page.goto(LESSON)
    page.emulate_media(media="print", color_scheme="light")
    for menu in ("#pst-primary-sidebar", "#pst-secondary-sidebar", ".bd-header-article", ".bd-header"):
        for each in page.locator(menu).all():
            expect(each).to_be_hidden()
    text = page.evaluate("document.body.innerText")
    assert "one of its cores deliver?" in text and "In this notebook we saw" in text
    assert page.evaluate(TOO_WIDE) == []


def test_a_page_opens_as_a_file(chromium, built_site):
    page = chromium.new_page()
    errors = []
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((built_site / "index.html").as_uri())
    page.locator("a[href$='00-start-here.html']").locator("visible=true").first.click()
    expect(page.locator("article h1")).to_contain_text("00 · Start here")
    assert errors == []
    page.close()
