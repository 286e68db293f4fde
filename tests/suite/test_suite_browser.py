"""The live page in a real browser: what happens to a suite appears by itself, text stays text, nobody else is asked."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium
from reported import EVIL, NASTY, OVERFLOWING
from watched import running, served, train_some, write_suite

from sameday.suite.page import watch
from sameday.suite.page.watch import DATA, FRESH, Server
from sameday.suite.state import SuiteFolder

if find_chromium() is None and os.environ.get("SAMEDAY_TEST_BROWSER") != "must":
    pytest.skip(
        "no Chromium on this machine: `make browser` installs one, where there are apt and root",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None, "SAMEDAY_TEST_BROWSER=must, and there is no Chromium"
    with Browser(program) as found:
        yield found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read whenever the page asks."""
    monkeypatch.setattr(watch, "FRESH", 0.0)
    monkeypatch.setattr(watch, "BUSY", 0.0)


ROWS = """
Object.fromEntries([...document.querySelectorAll('#jobs tbody tr')].map(r =>
  [r.dataset.job, [...r.cells].slice(1).map(c => c.innerText.split('\\n')[0].trim())]))
"""
NODES = """
Object.fromEntries([...document.querySelectorAll('#graph g.node')].map(g =>
  [g.dataset.job, g.querySelector('text.said').textContent]))
"""


def shows(browser: Browser, expression: str, wanted: Any, alone: bool = False) -> None:
    """At the page's next looks, to which it is urged unless it is left alone."""
    deadline = time.monotonic() + 12
    while (seen := browser.evaluate(expression)) != wanted:
        assert time.monotonic() < deadline, f"{expression}: {seen!r}, not {wanted!r}"
        time.sleep(0.05)
        if not alone:
            browser.evaluate("look()")


def states(browser: Browser, alone: bool = False, **wanted: str) -> None:
    picked = f"(rows => {sorted(wanted)}.map(name => rows[name]?.[0]))({ROWS.strip()})"
    shows(browser, picked, [wanted[name] for name in sorted(wanted)], alone)


def quiet(browser: Browser, server: Server) -> None:
    """Nothing went wrong in the page, and nobody else was asked for anything."""
    methods = {event.get("method") for event in browser.events}
    assert not methods & {"Page.javascriptDialogOpening", "Log.entryAdded", "Runtime.exceptionThrown"}
    assert all(url.startswith((server.address, "data:,")) for url in browser.requests()), browser.requests()


def test_a_job_starts_fails_and_is_run_again(browser: Browser, tmp_path: Path, impatient: None) -> None:
    """As a runner writes it; the page is never loaded again."""
    path, folder = write_suite(tmp_path)
    with served(path, folder) as server:
        browser.open(server.address, 1440)
        states(browser, features="waiting", exp1="waiting")
        browser.evaluate("window.loaded = 'once'")
        assert browser.evaluate("document.querySelectorAll('#graph path.edge').length") == 2
        folder.begin()
        with running(folder, "features", [0]):
            states(browser, features="running", exp1="waiting")
        folder.change("features", state="done", ended=time.time(), spent=1.0)
        with running(folder, "exp1", [0]):
            train_some(folder, "exp1", range(1, 6))
            states(browser, features="done", exp1="running")
            shows(browser, f"{ROWS.strip()}.exp1.slice(1, 5)", ["5 of 20", "0.2000", "8", "90%"])
            shows(browser, f"{NODES.strip()}.exp1", "train · running · 25%")
            browser.evaluate("choose('exp1')")
            shows(browser, "document.getElementById('log').textContent.includes('step 5/20')", True)
        folder.change("exp1", state="failed", code=1, ended=time.time(), spent=2.0, why="exit code 1\nno room: 20 GiB")
        states(browser, exp1="failed", **{"exp1-test": "blocked", "exp2": "waiting"})
        shows(browser, "document.querySelector('#failures pre').textContent", "exit code 1\nno room: 20 GiB")
        folder.change("exp1", state="waiting", why="")
        with running(folder, "exp1", [1]):
            states(browser, exp1="running", **{"exp1-test": "waiting"})
            shows(browser, "document.querySelectorAll('#failures pre').length", 0)
            shows(browser, "document.querySelector('#jobs [data-job=exp1] td small').textContent", "attempt 2")
            shows(browser, "document.querySelector('#gpus tbody').innerText.includes('exp1')", True)
            train_some(folder, "exp1", range(6, 21))
            shows(browser, f"{ROWS.strip()}.exp1[1]", "20 of 20")
        folder.change("exp1", state="done", ended=time.time(), spent=4.0)
        states(browser, exp1="done")
        shows(browser, "document.querySelector('#tiles dd').firstChild.textContent", "2 of 4")
        assert "to spare" not in browser.evaluate("document.getElementById('tiles').innerText")
        assert browser.evaluate("document.querySelectorAll('#charts figure').length") == 2
        assert browser.evaluate("window.loaded") == "once"
        quiet(browser, server)


@pytest.mark.slow
def test_the_page_looks_again_by_itself_every_two_seconds(browser: Browser, tmp_path: Path) -> None:
    path, folder = write_suite(tmp_path)
    with served(path, folder) as server:
        browser.open(server.address, 1440)
        states(browser, exp1="waiting")
        began = time.monotonic()
        folder.change("exp1", state="failed", attempt=1, why="x")
        states(browser, alone=True, exp1="failed")
        assert time.monotonic() - began < 6
        port = server.server_port
    shows(browser, "document.getElementById('live').className", "bad", alone=True)
    assert "does not answer" in browser.evaluate("document.getElementById('live').textContent")
    with served(path, folder, port=port):  # a reader need not do anything
        shows(browser, "document.getElementById('live').className", "note", alone=True)


def test_names_and_log_text_stay_text(browser: Browser, tmp_path: Path, impatient: None) -> None:
    path, folder = write_suite(tmp_path / NASTY, name=f"{NASTY} & night", out=NASTY)
    train_some(folder, "exp1", range(1, 4))
    with folder.log("exp1").open("a") as file:
        file.write(f"{EVIL}\n{NASTY}\n</pre></script><svg onload=alert(1)>\x1b]0;title\x07 \u202egnp.exe\n")
    folder.change("exp1", state="failed", attempt=1, host=NASTY, why=f"{EVIL}\n<img src=x onerror=alert(2)>")
    with running(folder, "exp2", [0, 1]), served(path, folder) as server:
        folder.change("exp2", host=f"{NASTY}2")
        browser.open(server.address, 390)
        shows(browser, "document.getElementById('name').textContent", f"{NASTY} & night")
        browser.evaluate("choose('exp1')")
        shows(browser, "document.getElementById('log').textContent.includes('onload')", True)
        log = browser.evaluate("document.getElementById('log').textContent")
        assert (
            EVIL in log and NASTY in log and "</pre></script><svg onload=alert(1)>\\x1b]0;title\\x07 \\u202egnp" in log
        )
        assert EVIL in browser.evaluate("document.querySelector('#failures pre').textContent")
        assert NASTY in browser.evaluate("document.getElementById('out').textContent")
        assert f"{NASTY}2" in browser.evaluate("document.getElementById('gpus').textContent")
        assert browser.evaluate("document.title").startswith(NASTY)
        assert browser.evaluate("document.scripts.length") == 1
        assert browser.evaluate("document.querySelectorAll('img, [onerror], [onload], main script').length") == 0
        # The policy would stop it anyway.
        browser.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hit = 1'}))"
        )
        assert browser.evaluate("typeof hit") == "undefined"
        assert not [event for event in browser.events if event.get("method") == "Page.javascriptDialogOpening"]


@pytest.mark.parametrize("width", [390, 1440])
def test_it_can_be_read_on_a_phone_and_by_night(browser: Browser, tmp_path: Path, width: int) -> None:
    path, folder = write_suite(tmp_path, name="a_name_without_any_place_to_break_it_" * 4)
    train_some(folder, "exp1", range(1, 90), total=90)
    train_some(folder, "exp2", range(1, 60), total=90)
    folder.change("exp2", state="failed", attempt=1, started=time.time() - 50, ended=time.time(), why="x" * 600)
    folder.log("exp1").open("a").write("y" * 600 + "\n")
    ink = "getComputedStyle(document.body).color.match(/\\d+/g).slice(0, 3).map(Number)"
    seen = {}
    with running(folder, "exp1", [0]), served(path, folder) as server:
        for dark in (False, True):
            browser.open(server.address, width, dark=dark)
            states(browser, exp1="running", exp2="failed")
            shows(browser, "document.getElementById('log').textContent.length > 500", True)
            assert browser.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
            assert browser.evaluate(OVERFLOWING) == []
            seen[dark] = sum(browser.evaluate(ink))
            # One chart of each kind is seen, and its curves with it.
            drawn = "[...document.querySelectorAll('#charts path.line')].filter(p => p.getBoundingClientRect().width)"
            assert browser.evaluate(f"{drawn}.length") == 4
        quiet(browser, server)
    assert seen[False] < 200 and seen[True] > 500


def test_a_job_is_chosen_by_a_click(browser: Browser, tmp_path: Path, impatient: None) -> None:
    path, folder = write_suite(tmp_path)
    for name in ("exp1", "exp2"):
        train_some(folder, name, range(1, 3))
        folder.log(name).write_text("".join(f"{name} line {n}\n" for n in range(200)))
    with served(path, folder) as server:
        browser.open(server.address, 1440)
        states(browser, exp1="waiting")
        for name, click in (
            ("exp1", "document.querySelector('#jobs button[data-job=exp1]').click()"),
            (
                "exp2",
                "document.querySelector('#graph [data-job=exp2] rect')"
                ".dispatchEvent(new MouseEvent('click', {bubbles: true}))",
            ),
        ):
            browser.evaluate(click)
            shows(browser, "document.getElementById('log').textContent.split('\\n').at(-1)", f"{name} line 199")
            assert browser.evaluate("document.getElementById('chosen').value") == name
        at_end = "(p => p.scrollTop + p.clientHeight >= p.scrollHeight - 2)(document.getElementById('log'))"
        assert browser.evaluate(at_end)
        with folder.log("exp2").open("a") as file:
            file.write("one more\n")
        shows(browser, "document.getElementById('log').textContent.split('\\n').at(-1)", "one more")
        assert browser.evaluate(at_end)  # it follows
        browser.evaluate("document.getElementById('log').scrollTop = 0")
        with folder.log("exp2").open("a") as file:
            file.write("and more\n")
        shows(browser, "document.getElementById('log').textContent.split('\\n').at(-1)", "and more")
        assert browser.evaluate("document.getElementById('log').scrollTop") == 0  # a reader is not torn away


def test_a_suite_folder_that_is_not_there_yet_is_waited_for(browser: Browser, tmp_path: Path, impatient: None) -> None:
    path, _ = write_suite(tmp_path)
    folder = SuiteFolder(tmp_path / "later")
    with served(path, folder) as server:
        browser.open(server.address, 1440)
        states(browser, features="waiting")
        assert not folder.path.exists()  # looking makes nothing
        folder.change("features", state="done", attempt=1)
        states(browser, features="done")


@pytest.mark.soak
def test_fifty_open_pages_are_one_look_at_the_files(browser: Browser, tmp_path: Path) -> None:
    """All of them live, and what the server reads and computes in a second is what it is for one."""
    path, folder = write_suite(tmp_path)
    asked: Counter[str] = Counter()
    looks: list[float] = []
    with running(folder, "exp1", [0]), served(path, folder) as server:
        train_some(folder, "exp1", range(1, 12))
        get, look = server.pages.get, server.pages._snapshot.look
        server.pages.get = lambda address: (asked.update([address]), get(address))[1]  # type: ignore[method-assign]
        server.pages._snapshot.look = lambda: (looks.append(time.monotonic()), look())[1]  # type: ignore[method-assign]
        began = time.monotonic()
        pages = browser.open_more(server.address, 50)
        try:
            deadline = began + 120
            while asked["/"] < 50 or asked[DATA] < 3 * 50:
                assert time.monotonic() < deadline, asked
                time.sleep(0.05)
        finally:
            browser.close_pages(pages)
        seconds = time.monotonic() - began
    assert asked["/watch.js"] >= 50 and len(looks) <= seconds / FRESH + 1
    assert all(after - before >= FRESH for before, after in pairwise(looks))
