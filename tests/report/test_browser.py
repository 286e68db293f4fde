"""The page in a real browser, without a network: it shows the run's numbers, fits any width, and runs nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answered import drawn, write_answers
from browser import Browser, find_chromium
from reported import EVIL, NASTY, OVERFLOWING, Runs, profile, tune, verdict

from sameday.report.gather import gather
from sameday.report.page import render, report_from_files

if find_chromium() is None and os.environ.get("SAMEDAY_TEST_BROWSER") != "must":
    pytest.skip(
        "no Chromium on this machine: `make browser` installs one, where there are apt and root",
        allow_module_level=True,
    )

WIDTHS = (390, 1440)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None, "SAMEDAY_TEST_BROWSER=must, and there is no Chromium"
    with Browser(program) as found:
        yield found


@pytest.fixture(scope="module")
def pages(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    fingerprint = gather([runs.finished])[0].fingerprint
    for name, data in (
        ("p", profile(fingerprint)),
        ("t", tune()),
        ("v", verdict(fingerprint) | {"against": "other.yaml"}),
    ):
        (folder / name).write_text(json.dumps(data))
    rich = ([folder / "p"], [folder / "t"], [folder / "v"])
    pages = {
        "one, with everything": report_from_files([runs.finished], folder / "one.html", *rich),
        "unfinished": report_from_files([runs.stopped], folder / "stopped.html"),
        "several": report_from_files(
            [runs.finished, runs.stopped, runs.images, runs.bare], folder / "many.html", *rich
        ),
    }
    [run] = gather([runs.images])
    wide = "a_name_without_any_place_to_break_it_" * 8
    run.label, run.choices = wide, {"workers": wide, wide: wide}
    run.environment["hostname"], run.skipped = wide, [{"where": wide, "what": wide}]
    run.profile = gather([runs.images], [folder / "p"])[0].profile
    (folder / "wide.html").write_text(render([run, *gather([runs.bare])]))
    answered = []
    for seed, name in enumerate(("first", "second")):
        answered.append(Path(shutil.copytree(runs.images, folder / name)))
        asked = drawn(images=5, each=4, right=0.5, seed=seed, answers=[wide, f"{wide}; {EVIL}", "3 polyps", "yes"])
        write_answers(answered[-1], "adapter-test", [replace(each, type=wide) for each in asked], 20)
    pages["answers"] = report_from_files(answered, folder / "answers.html")
    return pages | {"endless words": folder / "wide.html"}


CROWDED = """
[...document.querySelectorAll('svg.chart')].filter(s => s.getBoundingClientRect().width).flatMap(s => {
  const all = [...s.querySelectorAll('text')], frame = s.getBoundingClientRect();
  const boxes = all.map(t => t.getBoundingClientRect());
  const found = [];
  boxes.forEach((a, i) => {
    if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1)
      found.push('out: ' + all[i].textContent);
    boxes.slice(i + 1).forEach((b, j) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
        found.push(`${all[i].textContent} | ${all[i + 1 + j].textContent}`);
    });
  });
  return found;
})
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one, with everything", "unfinished", "several", "endless words", "answers"])
def test_nothing_overflows_and_nothing_is_asked_for(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    browser.open(pages[name], width)
    assert browser.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert browser.evaluate(OVERFLOWING) == []
    # What is folded away must fit too.
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.requests() == [pages[name].as_uri()]
    methods = {event.get("method") for event in browser.events}
    assert not methods & {"Page.javascriptDialogOpening", "Log.entryAdded", "Runtime.exceptionThrown"}
    assert browser.evaluate("document.scripts.length + document.images.length") == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_can_be_read(browser: Browser, pages: dict[str, Path], width: int) -> None:
    for name in ("endless words", "several", "one, with everything"):
        browser.open(pages[name], width)
        assert browser.evaluate(CROWDED) == []
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].filter(s => s.getBoundingClientRect().width).flatMap(s => "
        "[...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * s.getScreenCTM().a))"
    )
    assert len(sizes) > 40 and min(sizes) >= 9


def test_the_page_shows_the_runs_numbers(browser: Browser, pages: dict[str, Path], runs: Runs) -> None:
    browser.open(pages["several"], 1440)
    asked, _, seen, _ = gather([runs.finished, runs.stopped, runs.images, runs.bare])
    rows = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#scores tbody tr')].map(r => "
        "[r.cells[0].innerText.trim(), [...r.cells].slice(1).map(c => c.innerText.trim())]))"
    )
    assert rows["validation loss"] == [
        f"{asked.scores['val']['loss']:.4f}",
        "–",
        f"{seen.scores['val']['loss']:.4f}",
        "–",
    ]
    assert rows["validation accuracy"] == ["–", "–", f"{100 * seen.scores['val']['accuracy']:.1f}%", "–"]
    # Each validation is a mark that says its number.
    titles = browser.evaluate("[...document.querySelectorAll('#curves circle title')].map(t => t.textContent)")
    for record in seen.evaluations:
        assert f"pictures: {100 * record['accuracy']:.4g}% at step {record['step']}" in titles
    losses = browser.evaluate("document.querySelectorAll('.hero svg.chart:last-of-type path.line').length")
    assert losses == 3  # one run has a single step, which is a dot


def test_marks_stand_where_their_numbers_are(browser: Browser, pages: dict[str, Path], runs: Runs) -> None:
    """Read back from the picture: a mark's height between two ticks is its value."""
    browser.open(pages["several"], 1440)
    figure = "[...document.querySelectorAll('figure')].find(f => f.querySelector('h3').innerText === 'Validation loss')"
    marks, ticks = browser.evaluate(
        f"(f => [[...f.querySelectorAll('circle.dot')].map(c => [c.querySelector('title').textContent, "
        "c.getBoundingClientRect().top + c.getBoundingClientRect().height / 2]), "
        "[...f.querySelectorAll('text.tick.end.middle')].map(t => [parseFloat(t.textContent), "
        f"t.getBoundingClientRect().top + t.getBoundingClientRect().height / 2])])({figure})"
    )
    (v0, y0), *_, (v1, y1) = ticks
    [seen] = gather([runs.images])
    for record in seen.evaluations:
        [y] = [y for said, y in marks if said.startswith("pictures:") and said.endswith(f" {record['step']}")]
        read = v0 + (y - y0) / (y1 - y0) * (v1 - v0)
        assert read == pytest.approx(record["loss"], abs=0.03 * abs(v1 - v0) + 1e-9)


def test_parts_are_as_wide_as_they_are_long(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one, with everything"], 1440)
    bar = "[...document.querySelectorAll('#time .hero svg:last-of-type rect')]"
    pieces: list[Any] = browser.evaluate(
        f"{bar}.map(r => [r.querySelector('title').textContent, r.getBoundingClientRect().width])"
    )
    assert [said.split(":")[0] for said, _ in pieces][-3:] == ["loss", "backward pass", "everything else"]
    widths = {said.split(":")[0]: wide for said, wide in pieces}
    assert widths["backward pass"] == pytest.approx(2 * widths["forward pass"], rel=0.01)
    assert browser.evaluate(f"new Set({bar}.map(r => getComputedStyle(r).fill)).size") == len(pieces)


def test_markup_in_data_stays_text(browser: Browser, pages: dict[str, Path]) -> None:
    for name in ("one, with everything", "several"):
        browser.open(pages[name], 390)
        text = browser.evaluate("document.body.textContent")
        assert EVIL in text and NASTY in text
        assert not [e for e in browser.events if e.get("method") == "Page.javascriptDialogOpening"]
        assert browser.evaluate("document.querySelectorAll('script, img, [onerror]').length") == 0


def test_day_night_and_paper(browser: Browser, pages: dict[str, Path]) -> None:
    light = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    ink = "getComputedStyle(document.body).color.match(/\\d+/g).slice(0, 3).map(Number)"
    line = "getComputedStyle(document.querySelector('path.line')).stroke"
    seen = {}
    for dark in (False, True):
        browser.open(pages["one, with everything"], 1440, dark=dark)
        seen[dark] = sum(browser.evaluate(light)), sum(browser.evaluate(ink)), browser.evaluate(line)
    assert seen[False][0] > 600 > 200 > seen[False][1] and seen[True][0] < 150 < 500 < seen[True][1]
    assert seen[False][2] != seen[True][2]
    assert browser.pdf().startswith(b"%PDF")
