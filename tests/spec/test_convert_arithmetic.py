"""Arithmetic of shell scripts, beside bash's own."""

import re
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.spec.convert.shell.arithmetic import NotComputed, compute

VALUES = {"A": 7, "B": -3}
NUMBER = st.integers(0, 10**6).map(str) | st.sampled_from(["A", "$B", "${A}", "017", "0x1f", "9223372036854775807"])
SUM = st.recursive(
    NUMBER,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", "-", "*", " / ", "%"]), inner).map("".join),
        inner.map(lambda text: f"( {text})"),
        inner.map(lambda text: f"- {text}"),
    ),
    max_leaves=8,
)


@settings(derandomize=True, max_examples=60)
@given(sums=st.lists(SUM, min_size=1, max_size=8))
def test_numbers_are_those_of_bash(sums: list[str]) -> None:
    for text in sums:
        try:
            made = compute(text, VALUES.__getitem__)
        except NotComputed as error:
            assert str(error) in ("it divides by 0", "the number has more than 64 bits") or "--" in text
            continue
        done = subprocess.run(["bash", "-c", f"A=7; B=-3; echo $(({text}))"], capture_output=True, text=True)
        if done.returncode:  # bash reads A-$B as A--3
            assert re.search(r"- *\$\{?B", text), done.stderr
        else:
            assert int(done.stdout) == made, text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9**9**9", "** is not computed here"),
        ("1 / (2 - 2)", "it divides by 0"),
        ("9223372036854775807 + 1", "the number has more than 64 bits"),
        ("9" * 10**5, "999999999999999999999999999999 is no whole number of 64 bits"),
        ("(" * 10**5, "parentheses are nested deeper than 40"),
        ("(1", "a parenthesis is not closed"),
        ("A > 3 ? 1 : 2", "> is not computed here"),
        ("1 +", "only whole numbers, variables, + - * / % and parentheses are computed"),
        ("08", "08 is no whole number of 64 bits"),
        ("1 2", "2 is not computed here"),
        ("0-- A", "-- is not computed here"),
        ("2 * --A", "only whole numbers, variables, + - * / % and parentheses are computed"),
    ],
)
def test_what_is_not_computed(text: str, why: str) -> None:
    start = time.process_time()
    with pytest.raises(NotComputed) as error:
        compute(text, VALUES.__getitem__)
    assert str(error.value) == why
    assert time.process_time() - start < 1
