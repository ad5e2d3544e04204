"""The README is short, its programs print what it shows, its commands are where CI
looks for them, and what it calls and links to exists.
"""

import json
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from operator import attrgetter
from pathlib import Path

import jax
import optax

import optaxclip
from optaxclip.doctor.__main__ import main as doctor_main
from optaxclip.replay.__main__ import main as replay_main
from tests.docs.test_docs import assert_as_shown

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README, re.DOTALL)
DOCTOR = re.compile(
    r"```sh\n(python -m optaxclip.doctor .*)\n```\n```text\n(.*?)```", re.DOTALL
)
TABLE = re.compile(r"^\|.*\n", re.MULTILINE)


def run(program, namespace):
    """What a program prints."""
    out = StringIO()
    with jax.numpy_rank_promotion("allow"), redirect_stdout(out):  # as for users
        exec(compile(program, "README.md", "exec"), namespace)
    return out.getvalue()


def test_its_programs_print_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    assert len(PROGRAMS) == 2
    for program, printed in PROGRAMS:
        assert_as_shown(printed, run(program, namespace), "README.md")


def test_the_steps_that_it_says_are_clipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(PROGRAMS[1][0], {})
    rows = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    steps = [i for i, row in enumerate(rows) if row["clip/clipped"]]
    broken = [i for i in steps if i % 50 == 20]
    first = [i for i in steps if i % 50 != 20]
    pattern = r"clipped (\d+) of (\d+) steps: the six .* (\d+) early ones,"
    numbers = re.search(pattern, README)
    assert numbers and len(broken) == 6 and first[-1] < 40
    counts = [len(steps), len(rows), len(first)]
    assert [int(number) for number in numbers.groups()] == counts


def test_replay_says_that_its_limit_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(PROGRAMS[1][0], {})
    out = StringIO()
    with redirect_stdout(out):
        replay_main(["log.jsonl"])
    assert "Take 1.0, as most trainers do" in out.getvalue()


def test_without_a_limit_the_loss_ends_where_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run(PROGRAMS[1][0].replace("norm(1.0)", "norm(None)"), {})
    final = re.search(r"step 299: loss (\S+)", printed)
    claim = re.search(r"The\s+final\s+loss\s+is\s+([\d.]+\d)", README)
    assert final and claim and final[1] == claim[1]


def test_the_doctor_says_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(PROGRAMS[1][0].replace("norm(1.0)", "norm(None)"), {})
    command, shown = DOCTOR.search(README).groups()
    out = StringIO()
    with redirect_stdout(out):
        doctor_main(shlex.split(command)[3:])
    assert_as_shown(shown, out.getvalue(), "README.md")


def test_what_it_calls_exists():
    text = README.partition("## Run it yourself")[0]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
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


def test_its_prose_has_at_most_600_words():
    prose = README
    for left_out in (r"```.*?```", r"<picture>.*?</picture>", r"<!--.*?-->"):
        prose = re.sub(left_out, "", prose, flags=re.DOTALL)
    prose = re.sub(r"\]\(.*?\)", "]", TABLE.sub("", prose))
    assert 300 < len(prose.split()) <= 600


def test_no_table_is_wider_than_a_phone():
    """Of each column the longest word cannot be broken. A phone shows about 40 letters
    of the size that tables have.
    """
    text = re.sub(r"\]\(.*?\)", "]", README)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert tables
    for table in tables:
        rows = [line.strip("|").split("|") for line in table.splitlines()]
        columns = zip(*rows)
        widths = [max(map(len, " ".join(column).split())) for column in columns]
        assert sum(widths) <= 40, (widths, rows[0])
