"""Shell scripts as they are read, beside bash itself: the words that a command gets, or a refusal, and never others."""

import subprocess
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sameday.spec.convert.shell import grammar
from sameday.spec.convert.shell.execution import Execution
from sameday.spec.convert.shell.variables import Text, Unknown, shown
from sameday.spec.errors import BadInput

FRONT = "set -f; swift() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"


def by_bash(text: str) -> list[list[str]]:
    """The words of each `swift` in it."""
    asked = ["bash", "--norc", "-c", FRONT + text]
    done = subprocess.run(asked, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, timeout=5, check=False)
    return [each.split("\0")[:-1] for each in done.stdout.split("\1")[:-1]]


def here(text: str) -> list[list[Text]]:
    execution = Execution("old.sh")
    execution.all(grammar.commands(text, "old.sh"))
    return [[word for word, _ in start.words[1:]] for start in execution.starts]


def plain(read: list[list[Text]]) -> list[list[str]] | None:
    """None where a word is not known. What a caller may give is nothing."""
    made = []
    for words in read:
        kept = [word for word in words if shown(word) != '"$@"']
        if any(isinstance(piece, Unknown) and not piece.optional for word in kept for piece in word):
            return None
        made.append(["".join(piece for piece in word if isinstance(piece, str)) for word in kept])
    return made


NAMES, ARRAYS = ("A", "B", "LR"), ("X", "Y")
TEXT = st.text("ab1 .-'\"\\#=*/\n\t,", max_size=6)
SIMPLE = st.sampled_from(["a", "--lr", "1e-4", "b=c", "x#y", "-3", "", "don"])
PIECE = st.one_of(
    SIMPLE,
    TEXT.map(lambda text: "'" + text.replace("'", "") + "'"),
    TEXT.map(lambda text: '"' + text.replace('"', "").replace("\\", "\\\\") + '"'),
    st.sampled_from(["\\'", '\\"', "\\ ", "\\\n", '""', "''", '"\\a\\$"', "$'a\\n\\'b'"]),
    st.sampled_from(NAMES).flatmap(
        lambda name: st.sampled_from(
            [
                *(f"${{{name}}}", f'"${name}"', f'"x ${{{name}}} y"', f"${{{name}:-d e}}"),
                *(f'"${{NONE:-${name}}}"', f"${{{name}:+f g}}", "${NONE-'q r'}", '"${NONE:-}"', f"${{{name}[0]}}"),
            ]
        )
    ),
    st.sampled_from(ARRAYS).flatmap(
        lambda name: st.sampled_from(
            [f"${{{name}[@]}}", f'"${{{name}[@]}}"', f'"${{{name}[*]}}"', f'"a${{{name}[@]}}b"', f"${{{name}}}"]
        )
    ),
    st.sampled_from(["$((8 * 2))", "$(( (7 - 9) / 2 % 3 ))", "$((N+1))", "$((0x1f * -N))", "`# no`"]),
)
WORD = st.sampled_from(["$A", "$LR", "$X", '"$@"', "$@"]) | st.lists(PIECE, min_size=1, max_size=3).map("".join)
SCALAR = st.lists(PIECE, min_size=1, max_size=3).map("".join)
WORDS = st.lists(WORD, max_size=4)
BETWEEN = st.sampled_from([" ", "  ", " \\\n  ", "\t"])
COMMENT = st.sampled_from(["# don't", "#", '# "a \\', "true # it's", "", "cat <<'E' >/dev/null\nA='\nE"])


def in_array(words: list[str]) -> str:
    return "(\n  # isn't it\n  " + "\n  ".join(words) + " # a 'comment\n)"


ASSIGNMENT = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["=", "+="]), SCALAR).map("".join),
    st.tuples(st.sampled_from(ARRAYS), st.sampled_from(["=", "+="]), st.lists(SCALAR, max_size=4).map(in_array)).map(
        "".join
    ),
    st.tuples(st.just("export "), st.sampled_from(NAMES), st.just("="), SIMPLE).map("".join),
    COMMENT,
)
COMMAND = st.tuples(BETWEEN, WORDS).map(lambda drawn: drawn[0].join(["swift", "sft", "--seed", "1", *drawn[1]]))
START = "A=1\nB='a  b'\nLR=\nX=(1 '2 3')\nY=()\nN=5\n"
STATEMENTS = st.lists(ASSIGNMENT, max_size=6)


# The same scripts in every run of the tests; others in the long trials.
@settings(derandomize=True, max_examples=150)
@given(lines=STATEMENTS, command=COMMAND)
def test_words_are_those_that_bash_gives(lines: list[str], command: str) -> None:
    text = START + "\n".join([*lines, command]) + "\n"
    assert plain(here(text)) == by_bash(text), text


def block(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=2).map("\n".join)
    condition = st.sampled_from(["true", "false", '[ -z "$LR" ]', "[[ $A == 1 && ( -n $B || 1 < 2 ) ]]", "((N > 3))"])
    leave = st.sampled_from(["", "", "\nbreak", "\ncontinue", "\nreturn", "\nexit"])
    return st.one_of(
        st.tuples(condition, body, body).map(lambda d: f"if {d[0]}; then\n{d[1]}\nelse {d[2]}\nfi"),
        st.tuples(condition, body, leave).map(lambda d: f"if {d[0]}; then {d[1]}{d[2]}\nfi"),
        st.tuples(condition, inner, inner).map(lambda d: f"{d[0]} && {{ {d[1]}\n}} || {{ {d[2]}\n}}"),
        st.tuples(condition, st.sampled_from(["&&", "||"]), inner).map(lambda d: f"{d[0]} {d[1]} {{ {d[2]}\n}}"),
        st.tuples(WORDS, body, leave).map(lambda d: f"for A in {' '.join(d[0])}; do\n{d[1]}{d[2]}\ndone"),
        st.tuples(body, leave).map(lambda d: f"while ((TIMES++ < 2)); do {d[0]}{d[1]}\ndone"),
        st.tuples(body, body).map(
            lambda d: f'case "$A" in\n  1|(2) ) {d[0]} ;;\n  *) {d[1]}\nesac'.replace("(2) ", "2")
        ),
        body.map(lambda d: f"({d}\n)"),
        body.map(lambda d: f"{{ {d}\n}} | cat"),
        st.tuples(body, leave, WORDS).map(lambda d: f"f() {{\nlocal B=7\n{d[0]}{d[1]}\n}}\nf {' '.join(d[2])}"),
        WORDS.map(lambda words: f"set -- {' '.join(words)}"),
        st.sampled_from(["shift", "unset A", "N=$((N+1))", "((N++))", "read B <<< 'x y'", "IFS=,", 'eval "A=$N"']),
        COMMAND,
    )


BLOCKS = st.lists(st.recursive(ASSIGNMENT, block, max_leaves=6), max_size=5)


@example(['if true; then\n:\nelse LR="3"\nfi'], 'swift sft "${LR:+f g}"')
@example(['for A in "$@"; do exit\ndone'], "swift sft --seed 1")
@example(["f() { if true; then A=2; return; fi; A=3; }; f"], "swift sft $A")
@example(["for B in 1; do if true; then A=2; continue; fi; A=3; done"], "swift sft $A")
@example(['while ((TIMES++ < 2)); do ARGS="$ARGS --x"; done'], "swift sft $ARGS")
@example(["true && A=2 || A=3", "false || B=4"], "swift sft $A $B")
@example(["{ set -- --x; } | cat", "set -- --y", "f() { shift; swift sft $@; }; f 1 2"], 'swift sft "$@"')
@example(["IFS=,", "A=x,y"], 'swift sft $A "${X[*]}"')
@example(['set -- "$@" $A', "shift"], 'swift sft --seed 1 "$@"')
@settings(derandomize=True, max_examples=200)
@given(lines=BLOCKS, command=COMMAND)
def test_what_is_decided_while_a_script_runs_is_never_guessed(lines: list[str], command: str) -> None:
    """Words that are known are bash's, whatever conditions, loops and functions stand around them. Conditions may run
    fewer trainings than are there."""
    text = START + "\n".join([*lines, command]) + "\n"
    try:
        read = here(text)
    except BadInput:
        return
    ran = by_bash(text)
    for words in ran:
        assert any(plain([each]) in (None, [words]) for each in read), (text, words)


@pytest.mark.soak
def test_thousands_of_other_scripts() -> None:
    for test, lines in (
        (test_words_are_those_that_bash_gives, STATEMENTS),
        (test_what_is_decided_while_a_script_runs_is_never_guessed, BLOCKS),
    ):
        given(lines=lines, command=COMMAND)(settings(max_examples=3_000)(test.hypothesis.inner_test))()


@pytest.mark.parametrize(
    "group",
    [
        "(((N > 3)) && {\nswift sft --seed 7\n}\n)",
        "((true) && (swift sft --seed 7))",
        "(((1)); (swift sft --seed 7)\n)",
    ],
)
def test_a_group_within_a_group_is_no_arithmetic(group: str) -> None:
    """The training in it was taken for a part of an expression."""
    text = f"{START}{group}\nswift sft --seed 8\n"
    assert by_bash(text) == [["sft", "--seed", "7"], ["sft", "--seed", "8"]]
    assert [plain([each]) for each in here(text)] == [[["sft", "--seed", "7"]], [["sft", "--seed", "8"]]]


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as error:
        here(text)
    return str(error.value)


def test_an_open_quote_in_a_long_script_is_refused_at_once() -> None:
    lines = ["swift sft --a 'b", *(f"A{number}=1 # no end" for number in range(20_000))]
    start = time.process_time()
    assert refusal("\n".join(lines)) == "old.sh:1: a quote is opened here and never closed"
    assert time.process_time() - start < 1
    start = time.process_time()
    here("\n".join(["A='b'", *lines[1:]]))
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "text",
    ["swift sft --a 1 \\\n# comment\n  --b 2\n", "swift sft --a 1 \\ \n--b 2\n", "swift sft --a 1\n --b 2\n"],
    ids=["comment", "blank", "none"],
)
def test_flags_that_bash_does_not_give_to_the_command_are_refused(text: str) -> None:
    line = text.count("\n")
    assert refusal(text) == (
        f"old.sh:{line}: --b 2 begins a command of its own, and no program gets it: a command goes on in the next line "
        "only where \\ is the last character, and a comment ends it; join them"
    )
    done = subprocess.run(["bash", "-c", FRONT + text], capture_output=True, text=True, check=False)
    assert f"line {line + 1}: --b: command not found" in done.stderr and "--b" not in done.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("A=(1\n2\n", "old.sh:1: an array is opened here by ( and never closed"),
        ("echo\nA=${B\n", "old.sh:2: ${ is opened here and never closed"),
        ("if true; then\n", "old.sh:1: if begins here and has no fi"),
        ("a\nfi\n", "old.sh:2: fi is not allowed here; bash would not read this script"),
        ("( " * 50 + "a" + ")" * 50, "old.sh:1: commands are nested deeper than 40 here"),
        ("f() " * 9000 + "{ a; }", "old.sh:1: commands are nested deeper than 40 here"),
        ("A=" + "${B:-" * 9000 + "}" * 9000, "old.sh:1: variables are nested deeper than 20 here"),
        ("f() { f; }; f", "old.sh:1: functions call functions deeper than 20 here"),
    ],
)
def test_what_bash_would_not_read_or_never_end(text: str, why: str) -> None:
    assert refusal(text) == why


NESTED = [
    "A='1 2'\nexport B=3\nbash -c 'swift a $A $B'",
    "A='1 2'\nbash -c \"swift a '$A' b\"",
    "A=1 B=2 bash -c 'swift $A $B'",
    "A=1\nsbatch --mem 4 <<E\n#SBATCH -o $UNSET\nB=\\$\nswift $A \"x $A\" \\\"y\\\" 'z' \\\n  \\$B '$A'\nswift 2\nE",
    "A=1\nbash <<'E'\nB=2\nswift \"$B\" $A '$A' \\\n  b\nE\nswift $A",
    "A=1\ncat <<E | bash\nswift $A `# c` \\`# d\\` e\nE",
    "export A=1\nif true; then\n\tsbatch <<-E\n\t\tA=2\n\t\tswift \\$A $A\n\tE\nfi\nswift $A",
    "sbatch --parsable --wrap 'A=1; swift $A'",
    "A=1\nsbatch --wrap=\"swift $A 'b c'\"",
    "A=1\ntmux new-session -d -s x \"swift $A 'b c'\"",
    "tmux send-keys -t 'my window' 'swift a b' Enter",
    "cat <<E >/dev/null\nswift a\nE\nswift b",
]


@pytest.mark.parametrize("text", NESTED)
def test_commands_that_run_commands_are_read_as_they_run_them(text: str) -> None:
    stand_in = (
        "export -f swift\n"
        'sbatch() { for each; do case "$before$each" in --wrap=*) bash -c "${each#--wrap=}"; return;; '
        'wrap*) bash -c "$each"; return;; esac; [ "$each" != --wrap ] || before=wrap; done; bash; }\n'
        'tmux() { for each; do case "$each" in swift*) bash -c "$each";; esac; done; }\n'
    )
    made = plain(here(text))
    assert made == by_bash(stand_in + text) and made
