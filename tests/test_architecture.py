"""The shape of the package: imports point one way, the terminal answers at once, the tree in the
documentation is whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from sameday.models.families import DEFAULT, known_families
from sameday.spec.registry import RECIPES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sameday"

RANK = {
    "spec": 0,
    "record": 1,
    "cache": 2,
    "hardware": 2,
    "kernels": 2,
    "data": 3,
    "models": 4,
    "tasks": 5,
    "evaluate": 6,
    "report": 7,
    "train": 7,
    "commands": 8,
    "demo": 9,
    "profile": 9,
    "verify": 9,
    "tune": 10,
    "suite": 10,
    "api": 11,
    "cli": 11,
    "__main__": 12,
}
"""A room may import itself and rooms of a lower rank. A new folder needs a line here."""


@cache
def tree(text: str) -> ast.Module:
    return ast.parse(text)


def sources() -> dict[str, str]:
    """Every file of the package by its dotted name below `sameday`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imported_rooms(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and room of each import from the package, inside functions too."""
    for node in ast.walk(tree(text)):
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
    text = "import sameday.train.loop\ndef f():\n    from sameday.tasks.base import Task\n    from sameday import cli\n"
    assert [line.split(", ")[0] for line in wrong_way({"models.thing": text})] == [
        "sameday.models.thing:1 imports from train",
        "sameday.models.thing:3 imports from tasks",
        "sameday.models.thing:4 imports from cli",
    ]
    assert wrong_way({"hardware.thing": "import sameday.kernels.split"})  # of one rank, but another room
    assert not wrong_way({"train.thing": "from sameday.train import watch\nfrom sameday.spec.plan import Plan"})


def modules_loaded_by(name: str, text: str, known: set[str]) -> set[str]:
    """Modules of the package that importing this one loads, whatever is imported inside functions or for types only."""
    loaded: set[str] = set()
    for node in tree(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sameday."):
            module = (node.module or "").removeprefix("sameday.")
            inner = {f"{module}.{alias.name}" for alias in node.names} & known
            loaded |= inner or {module}
        elif isinstance(node, ast.Import):
            loaded |= {alias.name.removeprefix("sameday.") for alias in node.names if alias.name.startswith("sameday.")}
    return loaded - {name}


def test_no_module_imports_itself_by_way_of_others() -> None:
    files = sources()
    graph = {name: modules_loaded_by(name, text, set(files)) for name, text in files.items()}
    done: set[str] = set()
    while ready := {name for name in graph.keys() - done if graph[name] <= done}:
        done |= ready
    assert not graph.keys() - done, f"a circle among {sorted(graph.keys() - done)}"


def test_the_other_trainer_shares_no_code_with_us() -> None:
    """Its loop imports nothing of the package, and its process loads none of our data, models or training."""
    files = sources()
    assert not list(imported_rooms("verify.peer.loop", files["verify.peer.loop"]))
    graph = {name: modules_loaded_by(name, text, set(files)) for name, text in files.items()}
    loaded, new = set[str](), {"verify.arm", "verify.peer.loop"}
    while new:
        loaded |= new
        new = {other for name in new for other in graph.get(name, ())} - loaded
    rooms = {name.split(".")[0] for name in loaded}
    assert {"spec", "verify"} <= rooms and not rooms & {"data", "models", "kernels", "train"}, sorted(loaded)


# Names of tasks

AT_HOME = ("tasks", "spec")
"""Rooms in which a task's name may stand."""


@cache
def words_of_code(text: str) -> list[tuple[int, str]]:
    """Strings, identifiers and modules with their lines. What docstrings say is for readers."""
    found: list[tuple[int, str]] = []
    parsed = tree(text)
    docstrings = {
        id(node.value)
        for node in ast.walk(parsed)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(parsed):
        words: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = [node.value]
        elif isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Import):
            words = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            words = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            words = [node.name]
        elif isinstance(node, ast.arg):
            words = [node.arg]
        elif isinstance(node, ast.keyword):
            words = [node.arg or ""]
        found += [(getattr(node, "lineno", 0), word) for word in words]
    return found


def task_names(text: str, tasks: Iterable[str]) -> list[tuple[int, str]]:
    """Where code names a task: strings that hold its name as a word, and identifiers and modules that begin with it."""
    pattern = re.compile(rf"(?<![a-z])({'|'.join(tasks)})(?![a-z])", re.IGNORECASE)
    # VqaTask is two words to a reader.
    apart = re.compile(r"(?<=[a-z])(?=[A-Z])|_|\.")
    return [(line, word) for line, word in words_of_code(text) if pattern.search(apart.sub(" ", word))]


def test_no_task_is_named_outside_its_own_folder_the_specs_and_the_registries() -> None:
    wrong = [
        f"sameday.{name}:{line} names a task: {word!r}"
        for name, text in sources().items()
        if name.split(".")[0] not in AT_HOME
        for line, word in task_names(text, RECIPES)
    ]
    assert not wrong, "\n".join(wrong)


BUILT_ON = {"cot": {"vqa"}}
"""Tasks that derive from another one, which knows nothing of them."""


def test_tasks_do_not_name_each_other() -> None:
    for task in RECIPES:
        others = set(RECIPES) - {task} - BUILT_ON.get(task, set())
        for name, text in sources().items():
            if name.startswith(f"tasks.{task}"):
                assert not task_names(text, others), name
            if name in ("tasks", "tasks.base", "tasks.setup", "tasks.warm_up"):
                assert not task_names(text, RECIPES), name


def test_the_rule_sees_every_form_of_a_name() -> None:
    tasks = ("vqa", "classify")
    for text in (
        'if recipe.task == "vqa": pass',
        "from sameday.tasks.vqa.task import VqaTask",
        "isinstance(task, ClassifyTask)",
        "import x\nx.VqaRecipe",
        "def _vqa(): pass",
        'say(f"for task classify alone")',
    ):
        assert task_names(text, tasks), text
    for text in ('"""A docstring may speak of vqa."""', 'say("it is classified")', "classified = 1"):
        assert not task_names(text, tasks), text


# What every start loads

LOADS_TRITON = {
    *(f"kernels.{name}_triton" for name in ("bdh", "fused_attention", "host_rows", "lora")),
    "kernels.lora",
}
"""By their kernels, or by an operator that torch.compile sees into: seconds of a start, and a thousand modules."""


def test_triton_is_loaded_where_a_plan_asks_for_it_alone() -> None:
    def at_the_top(text: str) -> set[str]:
        """Modules of ours that are loaded together with this one."""
        found = set[str]()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sameday."):
                module = (node.module or "").removeprefix("sameday.")
                found |= {module, *(f"{module}.{name.name}" for name in node.names)}
        return found

    texts = sources()
    assert set(texts) >= LOADS_TRITON
    tops, loads, before = {name: at_the_top(text) for name, text in texts.items()}, set(LOADS_TRITON), 0
    while before < len(loads):
        before = len(loads)
        loads |= {name for name, top in tops.items() if top & loads}
    assert loads == LOADS_TRITON | {"models.lora_kernel"}


# Names of families


def family_names(text: str) -> list[tuple[int, str]]:
    """Where code names a family of models, or the makers of one, in any spelling."""
    makers = {re.match(r"[a-z]+", family)[0] for family in known_families()}  # type: ignore[index]
    pattern = re.compile("|".join([*known_families(), *makers]), re.IGNORECASE)
    return [(line, word) for line, word in words_of_code(text) if pattern.search(word)]


def test_no_family_is_named_outside_its_own_file_and_the_specs() -> None:
    wrong = [
        f"sameday.{name}:{line} names a family: {word!r}"
        for name, text in sources().items()
        if name.split(".")[0] != "spec" and not name.startswith("models.families")
        for line, word in family_names(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_families_do_not_name_each_other() -> None:
    """The registry names the default alone. What several share stands in a file of its own."""
    for name, text in sources().items():
        if not name.startswith("models.families"):
            continue
        own = {name.rsplit(".", 1)[-1]} if name != "models.families" else {DEFAULT}
        others = {f"sameday.models.families.{family}" for family in known_families()} | set(known_families())
        named = {word for _, word in words_of_code(text)} & others
        assert named <= own, f"sameday.{name} names {sorted(named - own)}"


def test_the_rule_sees_every_form_of_a_family() -> None:
    assert DEFAULT in known_families()
    for text in (
        'if config.model_type == "qwen3_vl": pass',
        "from transformers import Qwen3VLConfig",
        "class TinyQwen: pass",
        "import sameday.models.families.qwen2_5_vl",
        "def f(qwen): pass",
        'say(f"a Qwen-VL model")',
    ):
        assert family_names(text), text
    for text in ('"""A docstring may speak of Qwen3-VL."""', 'say("a family")', "family = family_of(kind)"):
        assert not family_names(text), text


def test_specs_records_reports_audit_and_help_do_without_torch() -> None:
    """What a user waits for before anything is computed. Deep imports count, so a fresh process is asked."""
    light = sorted(name for name in sources() if name.split(".")[0] in ("spec", "record", "report"))
    code = f"""
import importlib, sys
def heavy():
    return sorted({{"torch", "transformers", "peft", "huggingface_hub"}} & set(sys.modules))
for name in {light} + ["data.questions.audit", "tasks.registry", "suite.page.watch", "suite.page.report", "cli"]:
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
    for command in (
        "demo",
        "train",
        "data",
        "eval",
        "cache",
        "verify",
        "profile",
        "tune",
        "report",
        "convert",
        "push",
        "suite",
    ):
        assert re.search(rf"^\W*{command}\s", done.stdout, re.MULTILINE), done.stdout


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_tree_names_every_file() -> None:
    fenced = re.findall(r"```.*?\n(.*?)```", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.DOTALL)
    tree = next((block for block in fenced if "cli.py" in block), "")
    named = Counter(re.findall(r"\b\w+\.py\b", tree))
    there = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert not there - named, f"the tree lacks {sorted(there - named)}"
    known = {path.name for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")}
    assert not set(named) - known, f"the tree names {sorted(set(named) - known)}, which do not exist"
