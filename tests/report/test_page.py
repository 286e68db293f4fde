"""The page as text: the run's numbers are in it, data stays data, and it asks nothing of anybody."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from reported import EVIL, NASTY, Runs, profile, tune, verdict

from sameday.report import tables, words
from sameday.report.gather import Run, gather
from sameday.report.page import render
from sameday.spec.load import load_plan, load_recipe

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """A page's elements, that each is closed in its turn, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.parts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())


def nothing_runs(page: Reader) -> None:
    """No element or attribute that runs or loads anything."""
    assert not {"script", "img", "link", "iframe", "object", "embed", "form", "base", "video"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset", "style")]
    for tag, name, value in page.attributes:
        if name in ("href", "xlink:href"):
            assert tag == "a" and value.startswith(("#", "data:application/yaml;base64,")), value


def test_one_run(runs: Runs) -> None:
    [run] = gather([runs.finished])
    page = Reader(render([run]))
    nothing_runs(page)
    scores = run.scores["val"]
    assert f"{scores['loss']:.4f}" in page.text and f"{100 * scores['exact_match']:.1f}%" in page.text
    assert run.fingerprint in page.text and "finished, 3 steps" in page.text
    for sentence in ("2 questions each", "LoRA) of rank 2, alpha 4", "be brief <script>alert(1)</script>"):
        assert sentence in page.text
    assert "no padding is computed" in page.text and "asked for" in page.text
    assert f"image '{NASTY}.png' not found" in page.text and "1 left out." in page.text
    for what in (
        "Where a step's time goes",
        "What each choice of the plan gives",
        "Proof that the plan keeps the model",
    ):
        assert what in page.text
    assert f"torch {run.environment['versions']['torch']}" in page.text


def test_recipe_and_plan_can_be_taken_out_whole(runs: Runs, tmp_path: Path) -> None:
    [run] = gather([runs.finished])
    page = render([run])
    links = re.findall(r'download="(\w+\.yaml)" href="data:application/yaml;base64,([^"]*)"', page)
    assert [name for name, _ in links] == ["recipe.yaml", "plan.yaml"]
    for name, data in links:
        (tmp_path / name).write_bytes(base64.b64decode(data))
    assert load_recipe(tmp_path / "recipe.yaml") == run.recipe and load_plan(tmp_path / "plan.yaml") == run.plan
    text = "".join(Reader(page).parts)
    assert run.recipe_text in text and run.plan_text in text


def test_runs_of_one_recipe_side_by_side(runs: Runs) -> None:
    both = gather([runs.stopped, runs.finished])
    page = Reader(render(both))
    nothing_runs(page)
    assert "One recipe, run 2 times" in page.text and "different recipes" not in page.text
    [said] = tables.same_losses(both)
    assert said.startswith("Over the 1 step that both have") and said in page.text
    assert "stopped is unfinished" in page.text and "stopped was not validated." in page.text
    ratio = page.text.split("× those of stopped")
    assert len(ratio) == 2


def test_runs_of_different_recipes_are_said_to_be_different(runs: Runs) -> None:
    page = Reader(render(gather([runs.finished, runs.images])))
    assert "These are 2 different recipes" in page.text and "compared by their metrics only" in page.text
    assert "task: 'vqa' there, 'classify' here" in page.text
    assert "those of" not in page.text  # speeds of different models say nothing
    same_task = Reader(render(gather([runs.images, runs.bare])))
    assert "data.val: 10 there, 0 here" in same_task.text and "bare was not validated." in same_task.text


def test_what_other_commands_measured(runs: Runs, tmp_path: Path) -> None:
    files = []
    [run] = gather([runs.finished])
    for name, data in (("p", profile(run.fingerprint)), ("t", tune()), ("v", verdict(run.fingerprint))):
        (tmp_path / name).write_text(json.dumps(data))
        files.append([tmp_path / name])
    page = Reader(render(gather([runs.finished], *files)))
    nothing_runs(page)
    for said in (
        "backward pass 400 ms 53.3%",
        "decode 120 ms",
        "A step takes 750 ms (700 ms to 800 ms)",
        "GPU is busy 93% of the time",
        "29.5 GiB",
        "needs at least 412 ms",
        "at 55% of that speed",
        "bound by launches",
        "plan.cache features at most 1.08×: the tower is 7% of the step",
        "The best plan is 20× as fast as the plain one on Fast",
        "share_images: true statistical 1.5 s (1.35 s to 1.65 s) 4× plain, 20 GiB",
        "packing: true, max_questions: null rounding failed out of memory 600 ms",
        "14.5 to 15.5 h",
        "Not tried: channels_last: for another task.",
        "rounding the same mathematics, rounded in another order",
        "loss of a step 0.0123 0.03",
        "q_proj 1.2 1.8",
        "It took 3 min 33 s.",
    ):
        assert said.lower() in page.text.lower(), said
    assert "another recipe" not in page.text and "another plan" not in page.text
    assert "Not in this report" not in page.text


def test_files_about_something_else_are_told_so(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(json.dumps(profile("0123456789ab") | {"plan": {"token_budget": 3}}))
    odd = verdict("0123456789ab") | {
        "verdict": "different",
        "fields": {"packing": {"plan": False, "claim": "rounding"}},
    }
    odd["differences"] = [{"step": 2, "what": "gradient", "name": "q", "text": EVIL}]
    (tmp_path / "v").write_text(json.dumps(odd))
    page = Reader(render(gather([runs.finished], [tmp_path / "p"], (), [tmp_path / "v"])))
    assert "This profile is of another recipe (0123456789ab)." in page.text
    assert "This profile is of another plan: it differs in token_budget." in page.text
    assert "This verdict is of another recipe (0123456789ab)." in page.text
    assert "it differs from the run's in packing." in page.text
    assert "not the same model" in page.text and f"step 2, gradient: q: {EVIL}" in page.text


def test_verdicts_of_finished_runs_and_of_recipes(runs: Runs, tmp_path: Path) -> None:
    """As `sameday verify RUN RUN --json` really writes them."""
    from typed import sameday

    said = sameday(runs.home, "verify", "images", "bare", "--recipes", "--json", str(tmp_path / "recipes.json"))
    assert said.code in (0, 2), said.err
    copy = tmp_path / "again"
    subprocess.run(["cp", "-r", runs.images, copy], check=True)
    said = sameday(runs.home, "verify", "images", str(copy), "--json", str(tmp_path / "runs.json"))
    assert said.code == 0, said.err
    page = Reader(render(gather([runs.images], (), (), [tmp_path / "runs.json"])))
    assert "bitwise the same bits" in page.text.lower() and "training loss 0 1.0e-05" in page.text
    if (tmp_path / "recipes.json").exists():
        page = Reader(render(gather([runs.images], (), (), [tmp_path / "recipes.json"])))
        assert "no verdict" in page.text


def test_a_loss_that_was_not_finite_leaves_a_gap(runs: Runs, tmp_path: Path) -> None:
    [run] = gather([runs.images])
    run.steps[1] = {**run.steps[1], "loss": None, "seconds": None}
    nothing_runs(Reader(render([run])))


anything = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
nasty = st.sampled_from([EVIL, NASTY, "</style><b>", "</title>", '" onload="x', "{{ 7 * 7 }}", "]]>", "<!--", "&lt;"])
texts = st.builds(lambda a, b, c: a + b + c, anything, nasty, anything)


@settings(max_examples=40)
@given(texts, texts, texts, texts)
def test_data_is_text_wherever_it_comes_from(runs: Runs, label: str, why: str, what: str, typed: str) -> None:
    [run] = gather([runs.finished])
    changed: Run = dataclasses.replace(
        run,
        label=label,
        choices={"packing": why, what: why},
        skipped=[{"where": what, "what": why}],
        recipe_text=typed,
        plan_text=typed,
        environment=run.environment | {"hostname": what, "history": [{"time": why, "command": f"sameday {typed}"}]},
    )
    [other] = gather([runs.images])
    page = Reader(render([changed, other]))
    nothing_runs(page)
    together = "".join(page.parts)
    for text in (label, why, what, typed):
        assert text in together


def test_the_words_of_a_recipe() -> None:
    from sameday.spec.load import recipe_from

    plain = {"task": "vqa", "model": "Qwen/Qwen3-VL-8B-Instruct", "data": {"train": "t.jsonl"}}
    said = " ".join(words.recipe_words(recipe_from(plain | {"order": "by_image", "warmup_steps": 100})))
    for part in (
        "“Qwen/Qwen3-VL-8B-Instruct” learns answers",
        "of rank 4, alpha 8, on q_proj, k_proj, v_proj, o_proj.",
        "images at random, an image's questions together; there is no validation set",
        "3 epochs of 16 questions each, in bf16, seed 0",
        "peaks at 5e-5 and falls linearly to zero after 100 steps of warm-up.",
    ):
        assert part in said, said
    model = {"kind": "vit", "depth": 4, "pool": "mean"}
    said = " ".join(words.recipe_words(recipe_from({"task": "classify", "model": model, "data": {"path": "set"}})))
    assert "vision transformer with 4 layers" in said and "the mean of all patches is classified" in said
    assert "cropped anew in every epoch to 80–100% of its area and mirrored" in said


def test_durations() -> None:
    said = [words.seconds(value) for value in (None, 0.0, 2.5e-5, 0.0123, 1.5, 75.0, 213.0, 9000.0)]
    assert said == ["–", "0 s", "25 µs", "12.3 ms", "1.5 s", "75 s", "3 min 33 s", "2 h 30 min"]


def test_the_command_never_loads_torch(runs: Runs, tmp_path: Path) -> None:
    code = """
import sys
sys.argv = ["sameday", "report", sys.argv[1], "-o", sys.argv[2]]
from sameday.cli import main
try:
    main()
except SystemExit as leave:
    assert not leave.code
assert not {"torch", "numpy", "transformers", "matplotlib"} & set(sys.modules)
"""
    out = tmp_path / "page.html"
    done = subprocess.run([sys.executable, "-c", code, runs.images, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"written: {out}\n" and out.stat().st_size > 20_000
