"""The `raytp` command: `generate`, `chat`, `batch`, `info`, `bench`, each in the file of its name; `engines` has three.

Starting the command must stay quick, so Ray, transformers and whatever imports them are imported by the commands that
need them. The rest of the project does not know of this package.
"""

from raytp.cli.batch import BATCH_EXAMPLES, batch
from raytp.cli.bench import BENCH_EXAMPLES, bench
from raytp.cli.engines import SERVE_EXAMPLES, engines, serve_engine, stop
from raytp.cli.main import app

__all__ = ["app"]

app.command(epilog=BATCH_EXAMPLES)(batch)
app.command(epilog=BENCH_EXAMPLES)(bench)
app.command(epilog=SERVE_EXAMPLES)(serve_engine)
app.command()(engines)
app.command()(stop)
