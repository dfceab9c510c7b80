"""Finds the commands that documents and manifests show, and checks that what they run has the options they give it."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
from ray.scripts.scripts import cli as ray_command

from raytp.cli import app

ROOT = Path(__file__).parents[2]
RAYTP = typer.main.get_command(app)


def shell_blocks(document: str) -> list[str]:
    """The ```sh blocks of Markdown."""
    return re.findall(r"^```sh\n(.*?)^```", document, re.MULTILINE | re.DOTALL)


def lines_of(block: str) -> list[list[str]]:
    """Commands of a block, split as a shell does it, without comments and assignments before them."""
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [command for command in ([*_drop_assignments(command)] for command in commands) if command]


def _drop_assignments(command: list[str]) -> list[str]:
    while command and re.match(r"[A-Z_]+=", command[0]):
        command = command[1:]
    return command


def check(command: list[str]) -> str:
    """What a command runs, and what `ray` runs in turn. Raises what `_parse` and `_parse_script` do."""
    program, arguments = command[0], command[1:]
    if program == "raytp":
        _parse(RAYTP, arguments)
        return program
    if program != "ray":
        return program
    split = arguments.index("--") if "--" in arguments else len(arguments)
    outer, inner = arguments[:split], arguments[split + 1 :]
    _parse(ray_command, outer + inner[:1])
    if arguments[0] == "exec":
        return f"ray exec {check(shlex.split(arguments[2]))}"
    if arguments[0] == "submit":
        _parse_script(ROOT / arguments[2], inner)
        return f"ray submit {arguments[2]}"
    if arguments[:2] == ["job", "submit"]:
        return f"ray job submit {check(inner)}"
    return f"ray {arguments[0]}" if arguments[0] != "job" else f"ray job {arguments[1]}"


def _parse(command: Any, arguments: list[str]) -> None:
    """Raises AssertionError for a command, and a usage error of click's for an option, that there is not."""
    name = ""
    while hasattr(command, "commands"):
        name, *arguments = arguments
        assert name in command.commands, name
        command = command.commands[name]
    command.make_context(name, list(arguments))


def _parse_script(script: Path, arguments: list[str]) -> None:
    """Raises SystemExit for an argument that the script does not know."""
    with patch.object(sys, "argv", [str(script), *arguments]):
        runpy.run_path(str(script))["parse_arguments"]()
