"""The shape of the package: imports point one way, the terminal answers at once, the README is whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sameday"

RANK = {
    "spec": 0,
    "report": 1,
    "cache": 1,
    "hardware": 1,
    "kernels": 1,
    "data": 2,
    "models": 3,
    "tasks": 4,
    "train": 5,
    "demo": 6,
    "profile": 6,
    "verify": 6,
    "tune": 7,
    "cli": 8,
    "__main__": 9,
}
"""A room may import itself and rooms of a lower rank. A new folder needs a line here."""


def sources() -> dict[str, str]:
    """Every file of the package by its dotted name below `sameday`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imported_rooms(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and room of each import from the package, inside functions too."""
    for node in ast.walk(ast.parse(text)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are written in full, from sameday"
            if node.module == "sameday":
                targets = [f"sameday.{alias.name}" for alias in node.names]
            else:
                targets = [node.module or ""]
        for target in targets:
            first, *rest = target.split(".")
            if first == "sameday" and rest:
                yield node.lineno, rest[0]


def wrong_way(files: dict[str, str]) -> list[str]:
    """Each import that points up, as a sentence."""
    wrong = []
    for name, text in files.items():
        room = name.split(".")[0]
        for line, other in imported_rooms(name, text):
            if other != room and RANK[other] >= RANK[room]:
                wrong.append(f"sameday.{name}:{line} imports from {other}, which does not stand below {room}")
    return wrong


def test_every_room_has_a_rank() -> None:
    assert {name.split(".")[0] for name in sources()} - {""} <= set(RANK)


def test_imports_point_one_way() -> None:
    assert wrong_way(sources()) == []


def test_the_rule_sees_every_form_of_import() -> None:
    text = (
        "import sameday.train.loop\ndef f():\n    from sameday.tasks.vqa.task import VqaTask\n    from sameday import cli\n"
    )
    assert [line.split(", ")[0] for line in wrong_way({"models.thing": text})] == [
        "sameday.models.thing:1 imports from train",
        "sameday.models.thing:3 imports from tasks",
        "sameday.models.thing:4 imports from cli",
    ]
    assert wrong_way({"hardware.thing": "import sameday.kernels.split"})  # of one rank, but another room
    assert not wrong_way({"train.thing": "from sameday.train import watch\nfrom sameday.spec.plan import Plan"})


def test_the_loop_and_the_verifier_know_no_task() -> None:
    """What is one task's own is asked of the task: they import the faces and the registry."""
    faces = {"sameday.tasks.base", "sameday.tasks.start", "sameday.tasks.registry"}
    specs = {"sameday.spec.vqa", "sameday.spec.classify"}
    for name, text in sources().items():
        if name.split(".")[0] not in ("train", "verify", "cli"):
            continue
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
        modules = {n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in found}
        known = {m for m in modules if m.startswith(("sameday.tasks", "sameday.models"))} - faces
        assert not known | (modules & specs), name


def test_specs_reports_audit_and_help_do_without_torch() -> None:
    """What a user waits for before anything is computed. Deep imports count, so a fresh process is asked."""
    light = sorted(name for name in sources() if name.split(".")[0] in ("spec", "report"))
    code = f"""
import importlib, sys
def heavy():
    return sorted({{"torch", "transformers", "peft", "huggingface_hub"}} & set(sys.modules))
for name in {light} + ["data.questions.audit", "tasks.registry", "cli"]:
    importlib.import_module("sameday." + name)
    assert not heavy(), (name, heavy())
sys.argv = ["sameday", "--help"]
try:
    sys.modules["sameday.cli"].main()
except SystemExit as leave:
    assert not leave.code
assert not heavy(), heavy()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "train", "eval", "cache", "verify", "profile", "tune", "report", "convert"):
        assert re.search(rf"^\W*{command}\s", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README.md")
def test_the_readme_names_every_file() -> None:
    fenced = re.findall(r"```.*?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    tree = next((block for block in fenced if "cli.py" in block), "")
    named = Counter(re.findall(r"\b\w+\.py\b", tree))
    there = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert not there - named, f"README's tree lacks {sorted(there - named)}"
    known = {path.name for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")}
    assert not set(named) - known, f"README's tree names {sorted(set(named) - known)}, which do not exist"
