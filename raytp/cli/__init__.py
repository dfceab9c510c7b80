"""The `raytp` command: each part in the file of its name; `main` has generate, chat and info, `engines` has three.

Starting the command must stay quick, so Ray, transformers and whatever imports them are imported by the commands that
need them. The rest of the project does not know of this package.
"""

from raytp.cli.batch import BATCH_EXAMPLES, batch
from raytp.cli.bench import BENCH_EXAMPLES, bench
from raytp.cli.chaos import CHAOS_EXAMPLES, chaos
from raytp.cli.engines import SERVE_EXAMPLES, engines, serve_engine, stop
from raytp.cli.experiment import EXPERIMENT_EXAMPLES, experiment
from raytp.cli.main import app
from raytp.cli.simulate import SIMULATE_EXAMPLES, simulate

__all__ = ["app"]

app.command(epilog=BATCH_EXAMPLES)(batch)
app.command(epilog=BENCH_EXAMPLES)(bench)
app.command(epilog=CHAOS_EXAMPLES)(chaos)
app.command(epilog=EXPERIMENT_EXAMPLES)(experiment)
app.command(epilog=SERVE_EXAMPLES)(serve_engine)
app.command(epilog=SIMULATE_EXAMPLES)(simulate)
app.command()(engines)
app.command()(stop)
