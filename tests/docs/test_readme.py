"""The README is short, its program prints what it shows, its commands are where CI
looks for them, and what it calls and links to exists.
"""

import re
from contextlib import redirect_stdout
from io import StringIO
from operator import attrgetter
from pathlib import Path

import jax
import optax

import optaxclip
from tests.docs.test_docs import assert_as_shown

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAM = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", README, re.DOTALL)


def run(program):
    """What a program prints."""
    out = StringIO()
    with jax.numpy_rank_promotion("allow"), redirect_stdout(out):  # as for users
        exec(compile(program, "README.md", "exec"), {})
    return out.getvalue()


def test_the_program_prints_what_the_readme_shows():
    assert PROGRAM
    assert_as_shown(PROGRAM[2], run(PROGRAM[1]), "README.md")


def test_without_a_limit_the_loss_ends_where_it_says():
    assert PROGRAM
    printed = run(PROGRAM[1].replace("norm(5.0)", "norm(None)"))
    final = re.search(r"step 299: loss (\S+)", printed)
    claim = re.search(r"and the\s+final\s+loss\s+is\s+([\d.]+\d)", README)
    assert final and claim and final[1] == claim[1]


def test_what_it_calls_exists():
    before, _, coming = README.partition("## Coming from")
    text = re.sub(r"```.*?```", "", before, flags=re.DOTALL)
    # What other libraries call is in the first column there.
    text += "".join(line.rpartition("` |")[2] for line in coming.splitlines())
    code = " ".join(re.findall(r"`([^`]+)`", text))
    called = set(re.findall(r"(?<![\w.])([\w.]+)\(", code))
    assert {"clip_by_global_norm", "metrics"} <= called
    assert [name for name in sorted(called) if not exists(name)] == []


def exists(name):
    """Whether a dotted name is one of ours or optax's."""
    of, name = (
        (optax, name.removeprefix("optax."))
        if name.startswith("optax.")
        else (optaxclip, name)
    )
    try:
        attrgetter(name)(of)
    except AttributeError:
        return False
    return True


def test_what_it_links_to_is_there():
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    links += re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
