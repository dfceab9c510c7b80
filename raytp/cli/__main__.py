"""`python -m raytp.cli` is the `raytp` command."""

from raytp.cli import app

app(prog_name="raytp")
