"""The README's program runs and prints its metrics, within the first 30 lines. Its
commands are where CI looks for them.
"""

import re
from operator import attrgetter
from pathlib import Path

import jax

import optaxclip

ROOT = Path(__file__).parents[2]
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
    start, end = README.index("## Clippers"), README.index("## Coming from elsewhere")
    called = set()
    for code in re.findall(r"`([^`]+)`", README[start:end]):
        called |= set(re.findall(r"(?<![\w.])([\w.]+)\(", code))
    ours = {name for name in called if not name.startswith(("optax.", "path."))}
    assert {"clip_by_global_norm", "rules.windowed_quantile"} <= ours
    assert [name for name in sorted(ours) if not exists(name)] == ["update"]


def exists(name):
    """Whether a dotted name is one of the library's."""
    try:
        attrgetter(name)(optaxclip)
    except AttributeError:
        return False
    return True


def test_it_is_short_and_what_it_links_to_is_there():
    assert README.count("\n") <= 250
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
