"""Runs the `block` command inside a test."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest

from services.cli import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The exit status and the output of a command."""

    returncode: int | str | None
    stdout: str
    stderr: str


def block(*arguments: str, stdin: str = "", **environment: str) -> Done:
    """Run the command in this process, with its own streams and environment."""
    out, err = StringIO(), StringIO()
    with (
        patch.object(sys, "argv", ["block", *arguments]),
        patch.object(sys, "stdin", StringIO(stdin)),
        patch.dict(os.environ, environment),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Done(returncode=ended.value.code, stdout=out.getvalue(), stderr=err.getvalue())


def answer(*arguments: str, stdin: str = "", **environment: str) -> Any:
    """Run the command with --json, and parse its output."""
    done = block(*arguments, "--json", stdin=stdin, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(*arguments: str, stdin: str = "", **environment: str) -> str:
    """Run the command on bad input, and return its line of error."""
    done = block(*arguments, stdin=stdin, **environment)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr
