"""`python -m optaxclip.autopsy FILE module:loss` prints the verdict, and ends in one
line where there is none.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optaxclip
from optaxclip.autopsy import save, why
from optaxclip.autopsy.__main__ import main as command

TRAIN = """
import jax.numpy as jnp

def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)

def broken(w, x, y):
    raise ValueError("of the loss")

def without_its_file(w, x, y):
    open("tokens.bin")

like = 0, (0, 0)
other = 0, 0
"""


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@pytest.fixture
def path(tmp_path, monkeypatch):
    (tmp_path / "train_of_test.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(tmp_path)
    optimizer = optaxclip.skip_spikes(optax.adam(0.1), 10.0)
    w, x = jnp.ones(2), jnp.ones((8, 2))
    y = jnp.zeros(8).at[5].set(1e4)
    grads = jax.grad(loss)(w, x, y)
    _, state = optimizer.update(grads, optimizer.init(w), w)
    return save(tmp_path / "step.npz", w, (x, y), state)


def test_it_prints_the_verdict(path, capsys):
    command([str(path), "train_of_test:loss"])
    out = capsys.readouterr().out
    assert out == f"{why(loss, path)}\n"
    assert out.startswith("data: the step is within")
    options = ["--wide", "train_of_test:loss", "--microbatch", "4"]
    command([str(path), "train_of_test:loss", *options])
    assert why(loss, path, microbatch=4).examples == [4, 5, 6, 7]
    assert capsys.readouterr().out == f"{why(loss, path, microbatch=4)}\n"


@pytest.mark.parametrize("name", ["train_of_test:no", "no_module:loss", "a b"])
def test_a_loss_that_is_not_there_is_named(path, capsys, name):
    with pytest.raises(SystemExit) as ended:
        command([str(path), name])
    assert ended.value.code == 2
    assert f"cannot import {name!r}: " in capsys.readouterr().err


@pytest.mark.parametrize("error", ["TypeError", "ValueError", "ZeroDivisionError"])
def test_a_module_that_raises_is_shown_with_its_line(
    path, capsys, tmp_path, monkeypatch, error
):
    module = f"train_with_{error}"
    (tmp_path / f"{module}.py").write_text(f"raise {error}('of the trainer')")
    with pytest.raises(SystemExit) as ended:
        command([str(path), f"{module}:loss"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert f"    raise {error}('of the trainer')" in printed
    assert printed.endswith(f"cannot import '{module}:loss': of the trainer.\n")


def test_a_file_of_no_use_ends_in_one_line(path):
    np.savez(path, a=np.ones(3))
    with pytest.raises(SystemExit, match=r"must be a file of autopsy\.save"):
        command([str(path), "train_of_test:loss"])
    with pytest.raises(SystemExit, match="No such file"):
        command(["nothing.npz", "train_of_test:loss"])


def test_what_is_no_function_ends_in_one_line(path):
    for name, option in (("like", []), ("loss", ["--wide", "train_of_test:like"])):
        with pytest.raises(SystemExit, match=r"why: \w+ must be a function, got \(0, "):
            command([str(path), f"train_of_test:{name}", *option])


def test_an_error_of_the_loss_keeps_its_traceback(path):
    with pytest.raises(ValueError, match="of the loss"):
        command([str(path), "train_of_test:broken"])
    with pytest.raises(FileNotFoundError, match=r"tokens\.bin"):
        command([str(path), "train_of_test:without_its_file"])


def test_another_structure_is_shown_by_name(path, capsys):
    command([str(path), "train_of_test:loss", "--like", "train_of_test:like"])
    assert capsys.readouterr().out == f"{why(loss, path)}\n"
    with pytest.raises(SystemExit, match=r"like=.* must show the structure"):
        command([str(path), "train_of_test:loss", "--like", "train_of_test:other"])


@pytest.mark.slow
def test_it_finds_a_module_in_the_folder(path):
    python = [sys.executable, "-W", "error", "-m", "optaxclip.autopsy"]
    root = str(Path(optaxclip.__file__).parents[1])
    done = subprocess.run(
        [*python, path.name, "train_of_test:loss"],
        cwd=path.parent,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("data: ") and not done.stderr, done.stderr
