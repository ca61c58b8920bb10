"""The page in headless Chromium: no error, no request, cells, keyboard, comparison, dark and narrow screens, axe."""

from __future__ import annotations

import importlib.resources
import json
import warnings
from pathlib import Path

import pytest
import shared
from browser import Browser
from results_files import MACHINE, write
from test_report import OTHER, SHAPE, TIMES, changed

from registry.report.page import page
from registry.report.sources import read

PROGRAM = Browser.find()
if PROGRAM is None:
    warnings.warn("no Chromium here: how pages look and answer is NOT tested (install chromium)", stacklevel=1)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
WIDE, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser():
    made = Browser(str(PROGRAM))
    yield made
    made.close()


@pytest.fixture(scope="module")
def opened():
    """A page of raw results, some made up, compared with older ones and with a damaged file among them."""
    return shared.folder("pages", make_page) / "report.html"


def make_page(folder):
    write(folder / "new" / "mine.jsonl", "attention", {**TIMES, **changed(1.4)})
    (folder / "new" / "cut.jsonl").write_text('{"kind": "run"')
    limits = {"machine": MACHINE, "limits": {"gbs": 4000, "tflops": {"bfloat16": 700}}}
    (folder / "new" / "limits.json").write_text(json.dumps(limits))
    old = write(folder / "old.jsonl", "attention", TIMES)
    names = ("older_attention_backward.jsonl", "warp_groups.jsonl", "call_overhead.json")
    text = page(read([folder / "new", *(RESULTS / name for name in names)]), read([old]))
    (folder / "report.html").write_text(text, encoding="utf-8")


def show(browser, file, size=WIDE, dark=False):
    browser.view(*size, dark=dark)
    browser.open(file)


def choose(browser, results):
    """Show the figures of one file of results."""
    browser.run(
        f"""{{ const select = document.getElementById("attention-run");
              select.value = [...select.options].find((one) => one.text.startsWith("{results}:")).value;
              select.dispatchEvent(new Event("change")); }}"""
    )


def draw_all(browser):
    """Scroll by every chart and wait until it is drawn."""
    count = browser.run("document.querySelectorAll('.chart').length")
    for number in range(count):
        browser.run(f"document.querySelectorAll('.chart')[{number}].scrollIntoView()")
        browser.wait(f"document.querySelectorAll('.chart')[{number}].dataset.drawn === 'yes'")
    return count


@pytest.mark.slow(9)
def test_it_loads_without_an_error_or_a_request(browser, opened):
    show(browser, opened)
    assert draw_all(browser) >= 6
    assert browser.faults() == [] and browser.requests() == []
    text = browser.run("document.body.innerText")
    assert "cut.jsonl" in text and "1 remark on what was passed over" in text
    sections = ["What changed", "attention", "attention_backward", "CPU cost of a call", "Measured on", "Passed over"]
    assert browser.run("[...document.querySelectorAll('h2')].map((head) => head.textContent)") == sections


def test_a_cell_opens_with_samples_config_reasons_and_the_command(browser, opened):
    show(browser, opened)
    choose(browser, "mine")
    browser.run(
        """{ const rows = [...document.querySelectorAll("#attention tbody tr")];
             rows.find((row) => row.innerText.includes("1024")).querySelector("button").click(); }"""
    )
    text = browser.run("document.getElementById('cell').innerText")
    assert browser.run("document.getElementById('cell').open")
    for part in (
        "gluon_fa3",
        "800 µs",
        "790",
        "810",
        "consumers=3",
        "consumers=2",
        "nobody.has_this",
        "allowed sm120",
        "1980",
    ):
        assert part in text, part
    assert f"echo '{SHAPE}' | kreg tune attention --only 'gluon_fa3' --out rerun.jsonl --shapes /dev/stdin" in text
    assert "--plugin" not in text


def test_the_command_of_a_variant_that_is_not_installed_asks_for_its_plugin(browser, opened):
    show(browser, opened)
    choose(browser, "mine")
    browser.run(
        """{ const rows = [...document.querySelectorAll("#attention tbody tr")];
             const head = [...document.querySelectorAll("#attention thead th")].map((one) => one.innerText);
             const place = head.findIndex((text) => text.includes("peer.other"));
             rows.find((one) => one.innerText.includes("1024")).children[place].querySelector("button").click(); }"""
    )
    text = browser.run("document.getElementById('cell').innerText")
    assert "--only 'peer.other' --out rerun.jsonl --plugin FILE --shapes" in text and "the plugin that brings" in text


def test_the_keyboard_walks_the_cells_and_closes_what_it_opened(browser, opened):
    show(browser, opened)
    choose(browser, "mine")
    focused = "document.activeElement.dataset"
    browser.run("document.querySelector('#attention .heat tbody button').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    assert browser.run(f"[{focused}.case, {focused}.variant]") == ["1", "1"]
    assert browser.run("document.querySelectorAll('#attention .heat button[tabindex=\"0\"]').length") == 1
    browser.press("Enter")
    browser.wait("document.getElementById('cell').open")
    browser.press("Escape")
    browser.wait("!document.getElementById('cell').open")
    assert browser.run(f"[{focused}.case, {focused}.variant]") == ["1", "1"], "the focus is back where it was"


def test_shapes_are_filtered(browser, opened):
    show(browser, opened)
    shown = browser.run(
        """(() => { const input = document.querySelector("#attention-backward input");
                    input.value = "d=128 causal";
                    input.dispatchEvent(new Event("input"));
                    const heads = document.querySelectorAll("#attention-backward .heat tbody th");
                    return [...heads].map((head) => head.textContent); })()"""
    )
    assert shown and all("d=128" in shape and "causal" in shape for shape in shown)


def test_the_comparison_says_what_got_slower(browser, opened):
    show(browser, opened)
    text = browser.run("document.getElementById('against').innerText")
    assert "1\ngot slower" in text and "+40.0%" in text and OTHER.replace(",", ", ") in text


@pytest.mark.slow(6)
@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (PHONE, True)], ids=["wide and light", "phone and dark"])
def test_it_fits_the_screen_in_the_readers_colours_and_axe_finds_no_serious_fault(browser, opened, size, dark):
    axe = pytest.importorskip("axe_core_python", reason="no axe-core: faults of accessibility are NOT looked for")
    show(browser, opened, size, dark)
    assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    draw_all(browser)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    browser.run(importlib.resources.files(axe).joinpath("axe.min.js").read_text(encoding="utf-8") + ";0")
    assert serious(browser) == []
    browser.run("document.body.append(Object.assign(document.createElement('button'), {id: 'nameless'}))")
    assert ["button-name" in fault for fault in serious(browser, "#nameless")] == [True], "it would find one"
    browser.run("document.getElementById('nameless').remove()")
    browser.run("document.querySelector('#attention .heat tbody button').click()")
    assert serious(browser, "#cell") == []
    assert browser.run("document.getElementById('cell').getBoundingClientRect().right <= innerWidth")


def serious(browser, within="html"):
    script = f"axe.run('{within}')"
    script += """.then((found) => found.violations
        .filter((fault) => ["serious", "critical"].includes(fault.impact))
        .map((fault) => [fault.id, ...fault.nodes.slice(0, 3).map((node) => node.html.slice(0, 160))].join(" | ")))"""
    return browser.run(script)


def test_the_readers_choice_of_colours_holds(browser, opened):
    show(browser, opened)
    browser.run("document.querySelector('nav button').click()")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
