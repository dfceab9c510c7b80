"""The `raytp` command: `generate`, `chat`, `info` and `bench`. What each command does stands in the file of its name.

Starting the command must stay quick, so Ray, transformers and whatever imports them are imported by the commands that
need them. The rest of the project does not know of this package.
"""

from raytp.cli.bench import BENCH_EXAMPLES, bench
from raytp.cli.main import app

__all__ = ["app"]

app.command(epilog=BENCH_EXAMPLES)(bench)
