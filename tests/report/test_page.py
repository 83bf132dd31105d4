"""The report in a real browser: headless Chromium, driven by selenium.

Skipped where either is missing, unless KVTHEORY_REQUIRE_CHROMIUM=1 (`make test-report`).
"""

import os
import shutil
import time

import pytest

from tests.report import pages

REQUIRED = os.environ.get("KVTHEORY_REQUIRE_CHROMIUM") == "1"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not REQUIRED and not (CHROMIUM and DRIVER):
    pytest.skip(
        "needs chromium and chromium-driver (apt-get install chromium chromium-driver)", allow_module_level=True
    )
if not REQUIRED:
    pytest.importorskip("selenium", reason="needs the extra test")

#: the smallest contrast of a text of this size and weight by WCAG 2.2, 1.4.3: 3 for large text, else 4.5
CONTRAST = """
function light(c) { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; }
function parse(s) { const m = s.match(/rgba?\\(([^)]+)\\)/)[1].split(/[ ,\\/]+/).map(Number); return m.length < 4 ? [...m, 1] : m; }
const low = []; let checked = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; node = walker.nextNode();) {
  const e = node.parentElement;
  if (!node.data.trim() || e.closest("script, style, svg, option, .hidden, .skip") || !e.checkVisibility()) continue;
  const style = getComputedStyle(e), ink = parse(style.color); let back = null;
  for (let p = e; p && !back; p = p.parentElement) { const c = parse(getComputedStyle(p).backgroundColor); if (c[3] === 1) back = c; }
  back = back || [255, 255, 255, 1];
  const a = light(ink.slice(0, 3)), b = light(back.slice(0, 3)), ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const px = parseFloat(style.fontSize), least = px >= 24 || (px >= 18.66 && +style.fontWeight >= 700) ? 3 : 4.5;
  checked++; if (ratio < least) low.push([node.data.trim().slice(0, 40), ratio.toFixed(2), style.color, back.join()]);
}
return {low, checked};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return pages.write(tmp_path_factory.mktemp("report")).as_uri()


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert CHROMIUM and DRIVER, "KVTHEORY_REQUIRE_CHROMIUM=1, but chromium or chromedriver is missing"
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(argument)  # fmt: skip
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def _loaded(browser):
    """On a busy machine the load that `get` and `refresh` wait for may have been that of the page before."""
    end = time.monotonic() + 120
    while browser.execute_script("return [location.protocol, document.readyState]") != ["file:", "complete"]:
        assert time.monotonic() < end, "the page does not load"
        time.sleep(0.05)


def _open(browser, page, width=1280, height=720, theme="light", media=""):
    browser.get("about:blank")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [{"name": "prefers-color-scheme", "value": theme}]})  # fmt: skip
    browser.get(page)
    _loaded(browser)


def _shown(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('details.claim')].filter(c => c.checkVisibility()).map(c => c.id)"
    )


def _set(browser, field, value):
    browser.execute_script(
        "const f = document.getElementById(arguments[0]); f.value = arguments[1]; f.dispatchEvent(new Event('input'))",
        field,
        value,
    )


@pytest.mark.parametrize("size", [(1280, 720), (390, 844)])
def test_the_first_screen_says_what_holds_and_what_does_not(browser, page, size):
    _open(browser, page, *size)
    assert (
        browser.execute_script("return document.getElementById('overview').getBoundingClientRect().bottom") <= size[1]
    )
    seen = browser.execute_script(
        "return [...document.querySelectorAll('#overview .fails a')].filter(a => a.checkVisibility()).map(a => a.hash)"
    )
    fails = [c["id"].replace("/", "--") for c in pages.ledger()["claims"] if c["verdict"] == "fails as stated"]
    assert sorted(seen) == sorted(f"#{c}" for c in fails) and fails
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_and_no_sideways_scroll_with_everything_open(browser, page, theme):
    _open(browser, page, 390, 844, theme)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    found = browser.execute_script(CONTRAST)
    assert not found["low"] and found["checked"] > 1000
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if theme == "light" else "rgb(20, 24, 31)")


def test_filters_and_search(browser, page):
    _open(browser, page)
    claims = pages.ledger()["claims"]
    assert len(_shown(browser)) == len(claims)
    _set(browser, "verdict", "fails as stated")
    assert _shown(browser) == [
        c
        for c in _shown(browser)
        if c in {r["id"].replace("/", "--") for r in claims if r["verdict"] == "fails as stated"}
    ]
    assert len(_shown(browser)) == sum(r["verdict"] == "fails as stated" for r in claims)
    _set(browser, "paper", "2607.01520")
    both = {
        r["id"].replace("/", "--") for r in claims if (r["verdict"], r["paper"]) == ("fails as stated", "2607.01520")
    }
    assert set(_shown(browser)) == both
    _set(browser, "q", "no such words anywhere")
    assert _shown(browser) == [] and "0 of" in browser.find_element("id", "shown").text
    browser.find_element("id", "reset").click()
    assert len(_shown(browser)) == len(claims)
    _set(browser, "q", "914000 limit")
    assert _shown(browser) == ["sequential--ratio-914000"]
    _set(browser, "q", "")
    _set(browser, "kind", "search")
    assert _shown(browser) == []


@pytest.mark.parametrize("link", ["#sequential--ratio-914000", "#sequential/ratio-914000"])
def test_a_deep_link_opens_its_claim(browser, page, link):
    _open(browser, page + link)
    claim = browser.find_element("id", "sequential--ratio-914000")
    assert claim.get_attribute("open") and "914" in claim.text and "Reproduce" in claim.text
    assert 0 <= browser.execute_script("return arguments[0].getBoundingClientRect().top", claim) < 300
    code = claim.find_element("css selector", ".run code").text
    assert code == "kvtheory verify --claim sequential/ratio-914000 --budget quick --seed 7 --cache sample"
    assert claim.find_elements("tag name", "math")
    # to a claim that a filter hides, too
    _set(browser, "q", "no such words anywhere")
    browser.execute_script("location.hash = '#risk/spectral-bound'")
    time.sleep(0.2)
    assert browser.find_element("id", "risk--spectral-bound").get_attribute("open")


def test_the_theme_is_remembered_and_needs_no_storage(browser, page):
    _open(browser, page)
    background = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(background) == "rgb(255, 255, 255)"
    browser.find_element("id", "theme").click()
    assert browser.execute_script(background) == "rgb(20, 24, 31)"
    browser.refresh()
    _loaded(browser)
    assert browser.execute_script(background) == "rgb(20, 24, 31)"
    browser.execute_script("localStorage.clear()")
    block = (
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('blocked', 'SecurityError'); }})"
    )
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": block})
    try:
        browser.get_log("browser")
        browser.refresh()
        _loaded(browser)
        browser.find_element("id", "theme").click()
        assert browser.execute_script(background) == "rgb(20, 24, 31)"
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_by_keyboard_alone(browser, page):
    from selenium.webdriver import ActionChains, Keys

    _open(browser, page)

    def press(*keys):
        ActionChains(browser).send_keys(*keys).perform()

    press(Keys.TAB)
    assert browser.switch_to.active_element.text == "To the ledger"
    press(Keys.ENTER)
    press(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("id") == "q"
    press(*"recompute is bit exact")
    assert _shown(browser) == ["sequential--recompute-is-bit-exact"]
    for _ in range(10):
        press(Keys.TAB)
        if browser.switch_to.active_element.tag_name == "summary":
            break
    press(Keys.ENTER)
    assert browser.find_element("id", "sequential--recompute-is-bit-exact").get_attribute("open")
    # everything that takes the keyboard has a name
    nameless = "return [...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter(e => !(e.textContent.trim() || e.ariaLabel || (e.labels && e.labels.length))).length"
    assert browser.execute_script(nameless) == 0


def test_on_paper(browser, page):
    _open(browser, page, theme="dark", media="print")
    assert not browser.find_element("css selector", ".filters").is_displayed()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    closed = "return document.querySelectorAll('details.claim:not([open])').length"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(closed) == 0
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(closed) == len(pages.ledger()["claims"])


def test_no_request_and_no_message(browser, page):
    browser.get_log("browser")
    browser.get_log("performance")
    _open(browser, page)
    asked = [m["message"] for m in browser.get_log("performance") if '"Network.requestWillBeSent"' in m["message"]]
    assert [m for m in asked if '"url":"file:' not in m and '"url":"data:' not in m and '"url":"about:' not in m] == []
    assert browser.get_log("browser") == []
