"""Shell scripts are read as a shell would run them, as far as that is known, and nothing of them happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.formats.shell.script import Script, read_script
from planner.formats.shell.text import Chars, Closings


def lines(source: str, **defined: str) -> list[str]:
    """The commands of a script, as text."""
    return [" ".join(word.text for word in command) for command in read_script(source, defined).commands]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A=1\nrun $A ${A} \"$A\" '$A'", ["run 1 1 1 $A"]),
        ("run a \\\n  b \\\n  c", ["run a b c"]),
        ("run ${A:-7} ${B-x} ${A:+set}", ["run 7 x"]),
        ("A=\nrun ${A:-7} ${A-7} end", ["run 7 end"]),
        ("N=8\nrun $((N*4)) $(( $N / 3 )) $((-7 / 2))", ["run 32 2 -3"]),
        ("A=(--x 1 # note\n  --y 'a b'\n)\nA+=(--z)\nrun ${A[@]} ${#A[@]}", ["run --x 1 --y a b --z 5"]),
        ('A=(1 "2 3")\nB="go ${A[*]}"\nrun $B', ["run go 1 2 3"]),
        ("A=a; B=b && run $A$B || other; last", ["run ab", "last"]),
        ("run a > out.txt 2>&1 | tee log &\nnext", ["run a", "tee log", "next"]),
        ("cat <<EOF > f\nrun $A\nEOF\nnext", ["cat", "next"]),
        ('bash -c "run $A --n 2" ', ["bash -c run ${A} --n 2"]),
        ("eval run --n 2", ["eval run --n 2"]),
        ("X=2 run a # comment --b", ["run a"]),
        ("export A=1 B=2\nrun $A $B", ["run 1 2"]),
        ("for i in 1 2; do run $i; done", ["run ${i}"]),
    ],
)
def test_words_of_commands(source: str, expected: list[str]) -> None:
    assert lines(source) == expected


CHOICE = """
SIZE=${1:-7B}
if [ $SIZE = 7B ]; then
  L=32
elif [ "$SIZE" == 13B ]; then
  L=40
else
  L=80
fi
case $SIZE in
  7B | 8B) H=4096 ;;
  13B) H=5120 ;;
  *) H=8192 ;;
esac
[ -z "$NODES" ] && NODES=2
run $L $H $NODES
"""


@pytest.mark.parametrize(
    ("defined", "expected"),
    [
        ({}, "run 32 4096 2"),
        ({"1": "13B"}, "run 40 5120 2"),
        ({"1": "70B", "NODES": "4"}, "run 80 8192 4"),
    ],
)
def test_conditions_that_are_known_decide(defined: dict[str, str], expected: str) -> None:
    assert lines(CHOICE, **defined) == [expected]


def test_what_depends_on_an_unknown_condition_is_not_known() -> None:
    script = read_script("A=1\nif grep x file; then A=2; fi\nrun $A $(date) $B")
    words = script.commands[-1]
    assert [word.unknown for word in words[1:]] == [("A",), ("$(date)",), ("B",)]


def test_words_know_their_lines() -> None:
    script = read_script('A="\n --one 1 \\\n --two 2\n"\nrun $A --three')
    assert [(word.text, word.line) for word in script.commands[0]] == [
        ("run", 5),
        ("--one", 2),
        ("1", 2),
        ("--two", 3),
        ("2", 3),
        ("--three", 5),
    ]


def test_batch_directives_are_kept() -> None:
    script = read_script("#!/bin/bash\n#SBATCH --nodes=4\n# SBATCH --no\nrun")
    assert [[word.text for word in line] for line in script.directives] == [["SBATCH", "--nodes=4"]]


@pytest.mark.parametrize(("opening", "closing"), [("${A:-", "}"), ('"${A:-', '}"'), ("${A:-", "")])
def test_constructs_inside_each_other_are_looked_at_once(
    opening: str, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], Closings.__init__

    def init(own: Closings, chars: Chars) -> None:
        made.append(own)
        make(own, chars)

    monkeypatch.setattr(Closings, "__init__", init)
    script = read_script(f"A=3\nX={opening * 500}y{closing * 500}\necho $A")
    assert script.variables["A"].text == "3"
    # One `Closings` for the script and one for each word, and none for their parts.
    assert len(made) < 10


def test_texts_that_a_script_writes_are_kept_by_their_files() -> None:
    script = read_script(
        'N=2\nOUT=ds.$N.json\ncat <<EOT > $OUT\n{"n": $N, "q": "it\'s"}\nEOT\n'
        "tee > b <<'EOT'\n{$N 'x'}\nEOT\nif [ $N = 3 ]; then cat > c <<E\nno\nE\nfi\nN=5; run $N"
    )
    assert {name: text.text for name, text in script.files.items()} == {
        "ds.2.json": '{"n": 2, "q": "it\'s"}\n',
        "b": "{$N 'x'}\n",
    }
    assert [word.text for word in script.commands[-1]] == ["run", "5"]


def test_a_script_that_a_script_starts_has_its_arguments_and_exported_variables() -> None:
    inner = "#SBATCH --nodes 2\nrun ${1} $A ${B:-unset} $C"
    for start in (
        "mpirun -x C=3 bash $HERE/train.sh 7",
        "C=3 ./train.sh 7",
        'srun bash -c "bash train.sh 7"',
    ):
        script = read_script(f"export A=1\nB=2\nexport C=3\n{start}\nrun $1", beside={"train.sh": inner})
        assert next(" ".join(word.text for word in command[-5:]) for command in script.commands) == (
            "run 7 1 unset 3"
        )
        assert script.commands[-1][-1].unknown
        assert len(script.directives) == 1
    endless = read_script("bash a.sh", beside={"a.sh": "run\nbash a.sh"})
    assert len(endless.commands) < 50


def test_a_file_that_a_script_sources_is_read_where_it_is_given() -> None:
    source = "A=1\nsource $HERE/env.sh\n. other.sh\nrun $A $B"
    script = read_script(source, beside={"env.sh": "A=2\nB=3\nsource env.sh\nsource env.sh"})
    assert [(word.text, word.line) for word in script.commands[-1]] == [("run", 4), ("2", 2), ("3", 2)]
    assert [(word.text, word.line) for word in script.not_sourced] == [("other.sh", 3)]


@pytest.mark.slow
def test_values_do_not_grow_without_end() -> None:
    source = "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "run $A"
    assert read_script(source).commands[-1][1].unknown


PIECES = st.sampled_from(
    [
        *("if ", "then ", "else ", "fi ", "for ", "do ", "done ", "case ", "esac ", ";; ", "in ", "{ ", "} "),
        *(
            "$(touch HERE)",
            "`touch HERE`",
            "touch HERE\n",
            "> HERE ",
            ">> HERE\n",
            "<<EOF\n",
            "EOF\n",
            "eval ",
        ),
        *(
            "bash -c ",
            "A=1 ",
            "A=(",
            ")",
            "(",
            '"',
            "'",
            "$",
            "${",
            "}",
            "$((",
            "))",
            "\\",
            "\\\n",
            "\n",
            "#",
            "|",
        ),
        *(
            "&& ",
            "|| ",
            "[ ",
            "] ",
            "[[ ",
            "]] ",
            "$A ",
            "${A[@]} ",
            "${A:-",
            "--num-layers 2 ",
            "torchrun ",
            "é",
        ),
        *("9**9**9", "1/0", "source HERE\n", ". HERE\n", "cat ~ ", "*", "rm -rf HERE\n", "\r\n", "\0"),
    ]
)


@given(st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=200))
def test_no_text_raises_or_touches_anything(source: str) -> None:
    before = sorted(Path().iterdir())
    script = read_script(source)
    assert isinstance(script, Script)
    assert sorted(Path().iterdir()) == before and not Path("HERE").exists()
