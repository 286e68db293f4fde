"""What readers of the loop rely on: it is a page, and weights change at one place."""

from __future__ import annotations

import ast
from pathlib import Path

import sameday
from sameday.train import loop

SOURCE = Path(sameday.__file__).parent
PAGE = 60


def calls_of(name: str) -> set[tuple[str, str]]:
    """Each call of a method of this name: the file, and what it is called on."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                found.add((str(path.relative_to(SOURCE)), ast.unparse(node.func.value)))
    return found


def test_only_the_commit_of_a_step_steps_an_optimizer() -> None:
    """The others show a step that is done; and the plain loop that ours is compared with is nobody's part of it."""
    assert calls_of("step") == {
        ("train/commit.py", "self._optimizer"),
        ("train/loop.py", "watch"),
        ("profile/timeline.py", "watch"),
        ("suite/times/trial.py", "watch"),
        ("verify/peer/loop.py", "optimizer"),
        ("verify/peer/loop.py", "scheduler"),
    }


def test_no_gradient_scaler_steps_in_its_place() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"GradScaler", "register_step_post_hook", "register_step_pre_hook"}, path


def test_the_loop_is_a_page() -> None:
    (train,) = [
        node
        for node in ast.parse(Path(loop.__file__).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    ]
    assert train.end_lineno is not None and train.end_lineno - train.lineno + 1 <= PAGE
