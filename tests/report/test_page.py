"""The page as text: the run's numbers are in it, data stays data, and it asks nothing of anybody."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import EVIL, NASTY, PHASES, Runs, profile, tune, verdict

from sameday.record.metrics import is_step
from sameday.report import tables, words
from sameday.report.beside import Profile
from sameday.report.curves import training_curves
from sameday.report.gather import Run, gather
from sameday.report.page import render, report_from_files
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.plan import Plan, changed

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


def judged(run: Run, **fields: Any) -> dict[str, Any]:
    """What verify writes of the run's plan beside the plain one, but for these fields."""
    plans = changed(Plan(device=run.plan.device), run.plan.model_copy(update=fields), False)
    told = {name: {"against": a, "plan": b, "claim": claim} for name, (a, b, claim) in plans.items()}
    return verdict(run.fingerprint) | {"fields": told}


def rendered(tmp_path: Path, run: Path, **files: Any) -> Reader:
    """The page of a run with these files of other commands, by their options' names."""
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    named = [[tmp_path / name] if name in files else [] for name in ("profile", "tune", "verify")]
    page = Reader(render(gather([run], *named)))
    nothing_runs(page)
    return page


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
    [run] = gather([runs.finished])
    about = run.fingerprint
    tuned = tune() | {"fingerprint": about}
    page = rendered(tmp_path, runs.finished, profile=profile(about), tune=tuned, verify=judged(run))
    for said in (
        "backward pass 400 ms 53.3%",
        "decode 120 ms",
        "A step takes 750 ms on the average (700 ms to 800 ms)",
        "GPU is busy 93% of the time",
        "29.5 GiB",
        "needs at least 412 ms",
        "at 55% of that speed",
        "bound by launches",
        "plan.cache features at most 1.08×, if 7.0% went away: the tower is 7% of the step",
        "The best plan is 20× as fast as the plain one on Fast",
        "share_images: true statistical 1.5 s (1.35 s to 1.65 s) 4× plain, 20 GiB",
        "packing: true, max_questions: null rounding failed out of memory 600 ms",
        "Found within a budget of 6 minutes.",
        "14.5 to 15.5 h",
        "36 to 42 min",
        "Model kept? rounding",
        "Memory, at most 29.5 GiB",
        "Not tried: micro_batch: for another task.",
        "rounding the same mathematics, rounded in another order",
        "loss of a step 0.0123 0.03",
        "q_proj 1.2 1.8",
        "It took 3 min 33 s.",
    ):
        assert said.lower() in page.text.lower(), said
    assert "another recipe" not in page.text and "another plan" not in page.text
    assert "Not in this report" not in page.text


def test_a_largest_value_stands_beside_its_own_limit(runs: Runs, tmp_path: Path) -> None:
    [run] = gather([runs.finished])
    data = judged(run)
    data["largest"] |= {"ratio_tensor": 17.5, "slope": 1.25}
    data["limits"] |= {"ratio_tensor": 4.0, "slope": 0.6}
    data["whose"] |= {"ratio_tensor": "head.bias", "slope": "bias"}
    # A file of an earlier version has the usual limits alone.
    older = rendered(tmp_path, runs.finished, verify=data).text
    assert "R of one tensor 17.5 4 head.bias" in older
    page = rendered(tmp_path, runs.finished, verify=data | {"bounds": {"ratio_tensor": 54.5, "slope": 4.25}}).text
    assert "R of one tensor 17.5 54.5 head.bias" in page and "slope against the reference 1.25 4.25 bias" in page
    assert "R of all tensors 1.05 1.35" in page


def test_clipping_is_told_where_there_is_any(runs: Runs) -> None:
    images, bare = gather([runs.images, runs.bare])
    free = dataclasses.replace(bare, recipe=bare.recipe.model_copy(update={"max_grad_norm": None}))
    spike = [{"step": step, "grad_norm": 500.0 if step == 50 else 1 + step % 2} for step in range(1, 401)]
    for shown, note in (
        ([images, bare], "before clipping"),
        ([free], ""),
        ([images, free], "of pictures before clipping"),
        ([dataclasses.replace(free, steps=spike)], "one step lies outside the frame, the furthest 500 at step 50"),
    ):
        assert [chart.note for chart in training_curves(shown) if chart.title == "Norm of the gradient"] == [note]


def test_files_about_something_else_are_told_so(runs: Runs, tmp_path: Path) -> None:
    other = profile("0123456789ab") | {"plan": {"token_budget": 3}}
    odd = verdict("0123456789ab") | {
        "verdict": "different",
        "against": "other.yaml",
        "fields": {"packing": {"plan": False, "claim": "rounding"}},
    }
    odd["differences"] = [{"step": 2, "what": "gradient", "name": "q", "text": EVIL}]
    tuned = tune() | {"fingerprint": "0123456789ab"}
    page = rendered(tmp_path, runs.finished, profile=other, tune=tuned, verify=odd)
    assert "This profile is of another recipe (0123456789ab)." in page.text
    assert "This profile is of another plan: it differs in token_budget." in page.text
    assert "This verdict is of another recipe (0123456789ab)." in page.text
    assert "it differs from the run's in packing." in page.text
    assert "not the same model" in page.text and f"step 2, gradient: q: {EVIL}" in page.text
    before, note, after = page.text.partition("This tuning is of another recipe (0123456789ab).")
    assert note and "The best plan is 20×" not in before and "The best plan is 20×" in after
    # What is of something else is not said of the run.
    assert "Model kept? unknown the verdict below is of another recipe" in page.text
    assert "Memory, at most" not in page.text and "The line across a bar" not in page.text


def test_a_verdict_that_was_not_reached_says_so(runs: Runs, tmp_path: Path) -> None:
    given = verdict(gather([runs.finished])[0].fingerprint) | {"verdict": "undecided"}
    page = rendered(tmp_path, runs.finished, verify=given)
    assert "undecided rounding, or another draw of dropout, can drive runs as far apart: these two" in page.text
    assert "not the same model" not in page.text


def test_a_profile_of_another_plan_is_shown_where_the_run_has_no_timeline(runs: Runs) -> None:
    [run] = gather([runs.bare])
    run.steps = [{name: given for name, given in record.items() if name != "phases"} for record in run.steps]
    run.profile = Profile.model_validate(profile(run.fingerprint) | {"plan": {"workers": 7}})
    page = Reader(render([run]))
    assert "This profile is of another plan: it differs in workers." in page.text
    assert "a step takes 750 ms" in page.text and "backward pass" not in page.text


def test_a_verdict_is_of_one_plan_and_one_recipe(runs: Runs, tmp_path: Path) -> None:
    [run] = gather([runs.finished])
    page = rendered(tmp_path, runs.finished, verify=judged(run))
    assert "Model kept? rounding" in page.text and "This verdict is of" not in page.text
    seldom = judged(run, log_steps=77, save_steps=5)
    assert "This verdict is of" not in rendered(tmp_path, runs.finished, verify=seldom).text
    # Judged beside the plain plan, a field that is not named is as in the plain plan.
    page = rendered(tmp_path, runs.finished, verify=judged(run, packing=False))
    assert "This verdict is of another plan: it differs from the run's in packing." in page.text
    assert "Model kept? unknown the verdict below is of another plan" in page.text
    told = judged(run) | {"runs": ["runs/one", "two"]}
    page = rendered(tmp_path, runs.finished, verify=told)
    assert "This verdict is of other runs: runs/one and two." in page.text
    told["runs"] = [f"runs/{NASTY}/", "two"]
    assert "This verdict is of" not in rendered(tmp_path, runs.finished, verify=told).text


def test_a_verdict_of_one_run_is_not_anothers(runs: Runs, tmp_path: Path) -> None:
    """Though both are on the page."""
    [bare] = gather([runs.bare])
    (tmp_path / "v").write_text(json.dumps(judged(bare)))
    page = Reader(render(gather([runs.images, runs.bare], (), (), [tmp_path / "v"])))
    assert f"This verdict is of another recipe ({bare.fingerprint})." in page.text
    assert "Model kept? unknown the verdict below is of another recipe –" in page.text


def test_parts_of_two_tasks_are_in_the_order_of_a_step(runs: Runs) -> None:
    asked, seen = gather([runs.finished, runs.images])
    asked.steps[0] = {**asked.steps[0], "phases": {"wait": 0.1, "tower": 0.2, "other": 0.1}}
    seen.steps[0] = {**seen.steps[0], "phases": {"prepare": 0.1, "backward": 0.2, "other": 0.1}}
    rows = [row.label for row in tables.part_rows([asked, seen])]
    assert rows == [words.PHASES[name] for name in words.PHASES if words.PHASES[name] in rows]
    assert {"preparing on the device", "vision tower", "everything else"} <= set(rows)
    # A profile's too, in whatever order it has them.
    page = profile(seen.fingerprint) | {"plan": {}, "phases": dict(reversed(PHASES.items()))}
    seen.profile = Profile.model_validate(page)
    assert seen.timeline is not None and list(seen.timeline.phases) == list(PHASES)


def test_verdicts_of_finished_runs_and_of_recipes(runs: Runs, tmp_path: Path) -> None:
    """As `sameday verify RUN RUN --json` really writes them."""
    from typed import sameday

    said = sameday(runs.home, "verify", "pictures", "bare", "--recipes", "--json", str(tmp_path / "recipes.json"))
    assert said.code in (0, 2), said.err
    copy = tmp_path / "again"
    subprocess.run(["cp", "-r", runs.images, copy], check=True)
    said = sameday(runs.home, "verify", "pictures", str(copy), "--json", str(tmp_path / "runs.json"))
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


DAMAGED = (
    float("nan"),
    float("inf"),
    float("-inf"),
    10**400,
    -(10**400),
    1e308,
    1e100,
    1e-320,
    -1.0,
    0,
    "x",
    True,
    [],
    {},
)


@pytest.mark.parametrize("bad", DAMAGED, ids=lambda bad: str(bad)[:8])
def test_a_damaged_number_is_passed_over(runs: Runs, tmp_path: Path, bad: Any) -> None:
    """Wherever it stands in metrics.jsonl or eval.json, once or everywhere."""
    run = tmp_path / "run"
    shutil.copytree(runs.images, run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records[0]["phases"] = {"wait": 0.1, "backward": 0.3}
    keys = ("seconds", "samples", "wait", "read", "loss", "lr", "grad_norm", "accuracy")
    for few in (1, len(records)):
        for record in records[-few:]:
            record |= {key: bad for key in keys} | {"phases": {"wait": bad, "forward": bad, "other": 0.1}}
        lines = [*records, records[0] | {"step": bad}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "eval.json").write_text(json.dumps({"val": {"loss": bad, "accuracy": bad, "samples": bad}}))
        told = pytest.raises(BadInput, match=r"page\.html is written without such lines$")
        with nullcontext() if is_step(bad) else told:
            report_from_files([run, runs.bare], tmp_path / "page.html")
        page = Reader((tmp_path / "page.html").read_text())
        nothing_runs(page)
        shown = [page.text, *(value for _, _, value in page.attributes)]
        without = [re.sub(r" is \S+; must be ", "", text) for text in shown]  # of a line that is named
        assert not [text for text in without if re.search(r"\b(nan|inf|not finite)\b", text)]


def test_half_a_character_does_not_stop_a_page(runs: Runs, tmp_path: Path) -> None:
    [run] = gather([runs.images])
    run.choices = {"workers": "half \ud800"}
    (tmp_path / "page.html").write_text(render([run]), encoding="utf-8")
    assert "half ?" in (tmp_path / "page.html").read_text()


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
        "3 epochs in steps of 16 questions, in bf16, seed 0",
        "peaks at 5e-5 and falls linearly to zero after 100 steps of warm-up.",
    ):
        assert part in said, said
    skipping: dict[str, Any] = {"data": {"train": "t.jsonl", "skip": {"answer": ["nan"]}}}
    said = " ".join(words.recipe_words(recipe_from(plain | skipping)))
    assert "Lines where answer is nan are skipped. Images are resized by Pillow. " in said
    said = " ".join(words.recipe_words(recipe_from(plain | {"max_pixels": 262144, "image_backend": "torchvision"})))
    assert "Images are resized by torchvision, to at most 262,144 pixels. " in said
    said = " ".join(words.recipe_words(recipe_from(plain | {"max_steps": 200})))
    assert "200 steps of 16 questions each, in bf16, seed 0" in said
    validated = plain | {"data": {"train": "t.jsonl", "val": "v.jsonl"}}
    for every, told in ((15, "every 15 steps"), (1, "after each step"), ("epoch", "after each epoch")):
        best = {"best": {"metric": "exact_match", "every": every}}
        said = " ".join(words.recipe_words(recipe_from(validated | best)))
        assert f"the weights of the best validation exact_match, compared {told}." in said
    model = {"kind": "vit", "depth": 4, "pool": "mean"}
    data = {"path": "~nobody-of-this-name/set"}  # a run of another machine
    said = " ".join(words.recipe_words(recipe_from({"task": "classify", "model": model, "data": data})))
    assert "vision transformer with 4 layers" in said and "the mean of all patches is classified" in said
    assert "cropped anew in every epoch to 80–100% of its area and mirrored" in said


def test_durations() -> None:
    said = [words.seconds(value) for value in (None, 0.0, 2.5e-5, 0.0123, 1.5, 75.0, 213.0, 9000.0)]
    assert said == ["–", "0 s", "25 µs", "12.3 ms", "1.5 s", "75 s", "3 min 33 s", "2 h 30 min"]


def test_two_durations_share_a_unit_and_differ_where_they_do() -> None:
    hours = [(0.01973, 0.02), (14.5, 15.5), (0.6, 0.7), (0.0, 0.001), (2.0, 2.0), (1000.0, 1200.5), (3.00001, 3.00002)]
    said = [words.between(3600 * low, 3600 * high) for low, high in hours]
    assert said == [
        *("71 to 72 s", "14.5 to 15.5 h", "36 to 42 min", "0 to 3.6 s", "2 h"),
        *("1,000 to 1,200 h", "3.00001 to 3.00002 h"),
    ]


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_two_durations_are_told_apart(low: float, high: float) -> None:
    low, high = sorted((low, high))
    size = 1 if high < 120 else 60 if high < 7200 else 3600
    assert (" to " in words.between(low, high)) == (low / size != high / size)


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


def test_nothing_out_of_a_file_changes_how_the_rest_is_shown(runs: Runs) -> None:
    [run] = gather([runs.finished])
    run.label = "a\x1b[2J\x00\u202egnp.exe\x9b"
    page = render([run])
    assert not set(page) & set("\x1b\x00\u202e\x9b") and "a\\x1b[2J\\x00\\u202egnp.exe\\x9b" in page


def test_runs_of_other_data_do_not_ask_for_the_same_model(runs: Runs, copied: Any, tmp_path: Path) -> None:
    first, second = copied(runs.images), tmp_path / "second"
    shutil.copytree(first, second)
    same = "whatever their plans, these runs ask for the same model"
    assert same in Reader(render(gather([first, second]))).text
    for state in (second / "checkpoints").glob("*/state.json"):
        record = json.loads(state.read_text())
        state.write_text(json.dumps(record | {"digests": record["digests"] | {"training data": "other"}}))
    said = Reader(render(gather([first, second]))).text
    assert "second has the recipe of pictures, but another training data." in said
    assert same not in said
