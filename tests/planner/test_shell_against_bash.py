"""Arguments read from a script equal those that bash passes to the program that the script starts."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.formats.facts.launcher import find_launch
from planner.formats.shell.script import read_script

BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash, to compare with")


def passed(script: str, *arguments: str) -> list[list[str]]:
    """The words of every `run` of a script, as bash passes them."""
    prelude = "run() { printf '%s\\037' \"$@\"; printf '\\036'; }\n"
    command = [BASH or "bash", "-c", prelude + script, "script", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": ""})
    # Scripts print too: what is printed ends a line.
    blocks = (block.rpartition("\n")[2] for block in done.stdout.split("\036")[:-1])
    return [block.split("\037")[:-1] for block in blocks]


def read(script: str, *arguments: str) -> list[list[str]]:
    """The commands of a script with their words, as they are read."""
    defined = {str(at): argument for at, argument in enumerate(arguments, 1)}
    commands = [[word.text for word in command] for command in read_script(script, defined).commands]
    started = [command[command[0] == "eval" :] for command in commands]
    return [command[1:] for command in started if command[0] == "run"]


SCRIPTS = {
    "loops that count, and what is printed": """
arr=()
for ((i=0; i<3; i++)); do arr+=($((i * 2))); done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
printf -v PAD '%03d-%s|' 7 a 8
for (( n = 1 ; n < 50 ; n *= 3 )); do last=$n; done
run $FREQ "$PAD" "$(printf '%s.%d' x 3)" "$(echo a  "b  c")" $last $n
SUM=$(X=4; printf '%d\\n' $((X + 1)))
run $SUM ${X:-none}
""",
    "a function takes arguments": """
train() {
  local tp=$1 pp=${2:-1} extra="--seed $#"
  shift 2
  run --tp $tp --pp $pp "$@" $extra
}
tp=9
train 4 2 --mbs 1 "a b"
function twice { train $1 $1; train "$@"; }
twice 3
echo $tp
run $tp ${1:-none}
""",
    "arguments are looked through": """
TP=1
PP=2
while [[ $# -gt 0 ]]; do
  case "$1" in
    --tp) TP="$2"; shift 2 ;;
    -p|--pp)
      PP=$2
      shift; shift ;;
    *) shift ;;
  esac
done
run $TP $PP
""",
    "a branch of a case": """
SIZE=${1:-7B}
case ${SIZE,,} in
  "7b")
    L=32; H=4096
    ;;
  13b | 14b) L=40 H=5120 ;;
  [0-9]*b)
    L=80
    H=8192 ;;
  *) L=0 H=0;;
esac
case $L in
  32) if [ $H = 4096 ]; then W=1; else W=2; fi ;;
  *) for W in 3 4; do V=$W; done ;;
esac
run $L $H $W ${V:-none}
""",
    "conditions": """
A=3 B=x
if [[ $A -gt 2 && ( "$B" == y || $B == x* ) ]]; then run one; else run two; fi
if [ "$A" = 3 ] && [ $B != x ]; then run three; elif (( A * 2 > 5 )); then run four; fi
if [ $A -gt 1 -a "$B" = x ] || false; then run five; fi
if ! [ -z "$UNSET" ]; then run six; else run seven; fi
if [ "$UNSET" = on ]; then run eight; elif [ $UNSET = off ]; then run nine; else run ten; fi
FLAG=true
if $FLAG; then run eleven; fi
[[ $A -ge 3 ]] && C=yes || C=no
(( A > 5 )) && D=yes || D=no
test $A -eq 3 && run $C $D
""",
    "arrays": """
declare -A LAYERS=([7B]=32 ["13B"]=40)
LAYERS[70B]=80
ARGS=(--a 1 "b c")
ARGS+=("--size" "${LAYERS[${1:-13B}]}")
ARGS[${#ARGS[@]}]=--end
for name in swiglu bf16; do
  ARGS+=("--$name")
done
ARGS[1]=2
run "${ARGS[@]}" ${#ARGS[@]} "${ARGS[-1]}" ${ARGS[@]:0:2} ${LAYERS[70B]}
run "${ARGS[*]}"
""",
    "parts of values": """
FILE=/x/y_z/run_model.tar.gz
NAME=${FILE##*/}
run $NAME ${FILE%/*} ${NAME%.gz} ${NAME%%.*} ${NAME#*_} ${FILE//_/-} ${FILE/_/+} ${NAME:4} ${NAME:4:5}
TEXT=aBc
KEY=TEXT
run ${TEXT^^} ${TEXT,,} ${TEXT^} ${#TEXT} ${!KEY} ${UNSET:-${TEXT}x} ${TEXT:+y} ${UNSET+z}
run ${NAME: -2} ${TEXT/#a/b} ${TEXT/%c/d}
M=${10}
run ${M:-4} ${M:+given} end
""",
    "words before a command are for it alone": """
A=1
A=2 run $A
run $A
B=3 C=$A run ${B:-none}
""",
    "quotes": r"""
FREQ="'([0]*3+[1]*4)'"
OPTS="--data \"a b\" --freq $FREQ --pipe Et\|tL"
run $'--bf16' it\'s "a\$b" 'c"d' e"f"g $"h"
eval run $OPTS
CMD="run $OPTS"
echo $CMD
eval $CMD
run a `# a comment` b \
  c \
  d
""",
    "subshells keep what they set": """
A=1
(A=2; run $A; (A=3 && run $A); run $A)
run $A
[ $A = 1 ] && (B=4; run $A $B) || run never
f() { (A=9); run $A "$@"; if (true); then (run in); fi; }
f x
case $A in (1) (run one $A);; *) run other;; esac
(case $A in 2) run two;; 1) A=5; run five $A;; esac
run $A)
run $A ${B:-none}
""",
    "whole numbers": """
declare -i N=4*2 M
N+=3; M=N/2
run $N $M
local_sum() { local -i s=$1+$2; run $s; s=s*2; run $s; }
local_sum 3 4
""",
    "texts that follow a line": """
N=3
read -r -d '' CMD <<EOF
run --n $N "a b" \\
  c
EOF
eval "$CMD"
read -d '' LATER << 'END'
run '$N' $N
END
N=4
eval "$LATER"
cat <<EOF | while read line; do X=1; done
EOF
run end
""",
    "sums": """
N=4
((WORLD = N * 8))
let TP=2**2
PP=$[1+1]
((N++))
ACC=$((WORLD/TP/PP>2?8:16))
: $((N += 2))
run $WORLD $TP $PP $N $ACC $((1<<12)) $((0x10 + 010)) $((-7 / 2)) $((-7 % 3)) $((N > 3 && TP)) $((!N)) $((~5))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("arguments", [(), ("7B",), ("--tp", "8", "--pp", "4")], ids=["none", "one", "flags"])
def test_words_are_those_that_bash_passes(name: str, arguments: tuple[str, ...]) -> None:
    if name == "arrays" and arguments[:1] == ("--tp",):
        arguments = ("70B",)
    expected = passed(SCRIPTS[name], *arguments)
    assert expected
    assert read(SCRIPTS[name], *arguments) == expected


NUMBERS = st.integers(0, 40).map(str) | st.sampled_from(["A", "B", "0x1f", "007"])


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions of other expressions."""
    operators = ["+", "-", "*", "/", "%", "**", "<<", ">>", "<", "<=", ">", ">=", "==", "!=", "&", "|", "^"]
    two = st.tuples(parts, st.sampled_from([*operators, "&&", "||"]), parts).map(" ".join)
    three = st.tuples(parts, parts, parts).map(lambda p: f"{p[0]} ? {p[1]} : {p[2]}")
    one = st.tuples(st.sampled_from(["(", "- ", "! "]), parts).map(
        lambda p: p[0] + p[1] + ")" * (p[0] == "(")
    )
    return one | two | three


@settings(max_examples=60)
@given(st.lists(st.recursive(NUMBERS, joined, max_leaves=6), min_size=1, max_size=8))
def test_sums_are_those_of_bash(expressions: list[str]) -> None:
    script = "A=7\nB=A+1\n" + "\n".join(f"run $(({expression}))" for expression in expressions)
    found = read(script)
    real = {expression: passed(f"A=7\nB=A+1\nrun $(({expression}))") for expression in expressions}
    for expression, (word,) in zip(expressions, found, strict=True):
        # The value of a number that is too large, or of a division by zero, is not known.
        if "$" not in word:
            assert real[expression] == [[word]], expression


@pytest.mark.parametrize("unknown", ["$(hostname)", "`hostname`", "$HOME", "${RANDOM}"])
def test_what_is_not_known_decides_nothing(unknown: str) -> None:
    script = f'X={unknown}\n[ -z "$X" ] && A=1\nif [ "$X" = a ]; then B=1; else B=2; fi\nrun ${{A:-0}} $B'
    (command,) = read_script(script).commands
    assert [word.unknown for word in command[1:]] == [("A",), ("B",)]


def test_a_loop_over_what_trains_is_not_known() -> None:
    loop = "for TP in 1 2; do ARGS='--a 1'; torchrun $ARGS --tp $TP $N; N=$((N*2)); done"
    inside, after = read_script(f"A=1 N=2\n{loop}\nrun $ARGS $A $N").commands
    assert [word.text for word in inside[1:3]] == ["--a", "1"]
    assert [word.unknown for word in inside[4:]] == [("TP",), ("N",)]
    assert [word.unknown for word in after[1:]] == [("ARGS",), (), ("N",)]


@pytest.mark.slow
def test_loops_and_calls_end() -> None:
    loops = "while [ 1 = 1 ]; do B=1; done\nfor i in 1 2; do for j in $i 2; do C=2; done; done"
    script = f"f() {{ f; f; }}\nf\n{loops}\nA=2"
    nested = "for i in 1 2 3; do\n" * 300
    assert read_script(script).variables["A"].text == "2"
    read_script(nested + "A=1\n" + "done\n" * 300)
    read_script("f() {\n" * 3000)


def test_what_is_printed_is_not_what_runs() -> None:
    flags = "--num-layers 2 --hidden-size 64 --moe-layer-freq '([0]*1+[1]*1)'"
    launch = find_launch(f'CMD="torchrun pretrain_gpt.py {flags}"\necho $CMD\neval $CMD', {})
    assert launch is not None
    assert [word.text for word in launch.arguments][-1] == "([0]*1+[1]*1)"
