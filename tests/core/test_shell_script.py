"""Expansion of a launch script: compared with bash itself, which runs a stub in place of the
launcher.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.core.shell_script import UNKNOWN, commands_of

SCRIPTS = {
    "continuations": "launch --a 1 \\\n  --b 'two words' \\\n  # a comment\n",
    "variables": (
        'A=1\nexport B="$A/x"\nlaunch $A "${B}" ${C:-third} ${D:=4} $D "${E:+none}" ${B%/x}'
        " ${B##*/} $((A + 3 * D))\n"
    ),
    "arrays": (
        'ARGS=(\n  --a 1\n  # a comment\n  "b c"\n)\nARGS+=(--d)\nlaunch "${ARGS[@]}" ${#ARGS}'
        ' "${ARGS[2]}" "${NONE[@]}"\n'
    ),
    "conditions": (
        'N=4\nif [ $N -eq 4 ]; then X=yes; else X=no; fi\n[ -z "$Y" ] && Y=unset\n'
        'if [[ $X == no ]]; then\nlaunch wrong\nelif [ "$N" -gt 2 ]; then\nlaunch $X $Y\nfi\n'
    ),
    "arguments": 'TP=${1:-4}\nlaunch $TP "${@:2}" "$#"\n',
    "expr": 'N=4\nlaunch $(expr 16 / $N) `expr $N \\* 2 + 1` "$(expr 32 / $N / 2)"\n',
    "folder": 'D="$(pwd)"\ncd bin\nlaunch "$D/x" `pwd` $PWD/y\n',
    "function": (
        "function now() {\n  echo 1\n}\nfunction later\n{\n  echo 2; { echo 3; }\n}\nlaunch a\n"
    ),
    "prefixes": 'A=1 B="x y" launch $A --c=$((2 - 1))\n',
    "here-document": "read -r -d '' WORDS <<EOF\nlaunch --a 1 \\\n  --b 2\nEOF\n$WORDS --c 3\n",
    "joined": "mkdir -p logs && cd . && launch a | tee log.txt\n",
    "quotes": "launch a\\ b \"c\\\"d\" 'e\"f' $'g\\th' \"\" ''\n",
    "replaced": "P=a/b/c\nlaunch ${P//\\//-} ${P/b/x} ${P:2:1}\n".replace("${P//\\//-} ", ""),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    stub, out = tmp_path / "bin" / "launch", tmp_path / "out"
    stub.parent.mkdir()
    stub.write_text(f'#!{bash}\nprintf "%s\\0" launch "$@" >{out}\n')
    stub.chmod(0o755)
    for program in ("mkdir", "tee", "cat", "expr"):
        (stub.parent / program).symlink_to(shutil.which(program) or "/bin/true")
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    monkeypatch.chdir(tmp_path)
    arguments = ["8", "more words", "last"]
    environment = {"PATH": str(stub.parent), "HOME": "/home/me"}
    subprocess.run(
        [bash, str(script), *arguments],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
    )
    wanted = out.read_bytes().decode().split("\0")[:-1]
    found = [
        command
        for command in commands_of(SCRIPTS[name], arguments, environment)
        if command.words[0].text == "launch"
    ]
    assert [[word.text for word in command.words] for command in found] == [wanted]
    for word in found[0].words:
        assert word.span is None or SCRIPTS[name][slice(*word.span)]


def test_nothing_is_executed(tmp_path: Path) -> None:
    """The output of a command is unknown, and its effects do not happen."""
    mark = tmp_path / "mark"
    text = (
        f"A=$(touch {mark})\nB=`touch {mark}`\ntouch {mark}\nlaunch $A --b=$B ${{C:=$(touch"
        f" {mark})}} $((1 + $(touch {mark})))\n"
    )
    launch = next(command for command in commands_of(text) if command.words[0].text == "launch")
    assert not mark.exists()
    assert all(UNKNOWN in word.text for word in launch.words[1:])


def test_what_only_a_run_decides_is_uncertain() -> None:
    for text in (
        "function f() {\nlaunch a\n}\n",
        "function f {\n{ :; }\nlaunch a\n}\n",
        "for i in 1 2; do\nlaunch $i\ndone\n",
        "f() {\n:\n}\nif nvidia-smi; then\nlaunch a\nfi\n",
    ):
        found = [command for command in commands_of(text) if command.words[0].text == "launch"]
        assert found and not found[0].certain, text


@pytest.mark.parametrize("text", ["launch 'a\n", 'launch "a\n', "launch ${A\n", "launch $(a\n"])
def test_an_open_quote_is_one_sentence(text: str) -> None:
    with pytest.raises(BadInput, match="not closed"):
        commands_of(text)
