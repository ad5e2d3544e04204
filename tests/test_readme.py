"""The README's program runs and prints its metrics, within the first 30 lines; its
commands are where CI looks for them.
"""

import re
from pathlib import Path

import jax

import optaxclip

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_program_runs_and_prints_what_clipping_did(capsys):
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert program and README[: program.end()].count("\n") <= 30
    with jax.numpy_rank_promotion("allow"):  # as it is for users
        exec(compile(program.group(1), "README.md", "exec"), {})
    printed = dict(
        line.split() for line in capsys.readouterr().out.strip().splitlines()
    )
    assert float(printed["clip/norm_before"]) > 0 and float(printed["clip/limit"]) == 1
    assert (
        0 < float(printed["clip/clipped_share"]) <= 1
        and float(printed["clip/norm_after"]) <= 1
    )


def test_both_commands_are_marked():
    for mark, does in (("main", "examples/char_rnn.py"), ("test", "-m pytest")):
        command = re.search(rf"<!-- {mark} command -->\n```sh\n(.*)\n```", README)
        assert command and "venv" in command.group(1) and does in command.group(1)


def test_what_the_tables_call_exists():
    tables = README[
        README.index("## Clippers") : README.index("## Coming from elsewhere")
    ]
    called = {
        name
        for code in re.findall(r"`([^`]+)`", tables)
        for name in re.findall(r"(?<![\w.])(\w+)\(", code)
    }
    assert "clip_by_global_norm" in called
    assert [name for name in sorted(called) if not hasattr(optaxclip, name)] == [
        "update"
    ]


def test_it_is_short_and_what_it_links_to_is_there():
    assert README.count("\n") <= 250
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
