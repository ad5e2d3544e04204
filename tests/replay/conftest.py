"""The command `python -m optaxclip.replay`, in this process."""

import runpy
import sys

import pytest


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs it with these arguments and returns what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["replay", *map(str, arguments)])
        # Where another test has imported it, runpy would warn.
        monkeypatch.delitem(sys.modules, "optaxclip.replay.__main__", raising=False)
        runpy.run_module("optaxclip.replay", run_name="__main__")
        return capsys.readouterr().out

    return run
