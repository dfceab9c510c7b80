"""The commands as the shell sees them: their arguments and help, and what an error or an interrupt turns into.

Each command hands over to `raytp.cli.generate`, `raytp.cli.chat` or `raytp.cli.info`, which it imports when it runs.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from raytp.cli import console
from raytp.cli import options as opt
from raytp.cli.interrupts import acknowledge, acknowledge_interrupts
from raytp.errors import ConfigError, RaytpError
from raytp.termination import EXIT_STATUS, is_termination

_WRONG_USAGE = 2
"""As for an option that there is not."""
_INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""
_BROKEN_PIPE = 141
"""128 + SIGPIPE."""

_EXAMPLES = """[bold]Examples[/bold]

raytp generate "Why is the sky blue?"

raytp chat --model Qwen/Qwen3-0.6B --tensor-parallel-size 2

raytp info Qwen/Qwen3-0.6B --tensor-parallel-size 4 --memory 24"""

_GENERATE_EXAMPLES = """[bold]Examples[/bold]

raytp generate "The capital of Japan is" --no-chat --max-tokens 8

raytp generate --file letter.txt --system "Summarize in one sentence."

raytp generate --file questions.txt --lines --json > answers.jsonl

git diff | raytp generate --system "Write a commit message." --model ./my-model -t 2"""

_CHAT_EXAMPLES = """[bold]Examples[/bold]

raytp chat

raytp chat --model ./my-model.gguf --system "Answer like a pirate." --temperature 0.7

printf 'Who wrote Hamlet?\\nAnd when?\\n' | raytp chat"""

_INFO_EXAMPLES = """[bold]Examples[/bold]

raytp info ./my-model

raytp info ./my-model --tensor-parallel-size 2 --memory 80

raytp info ./my-model --json | jq .num_parameters"""


class _Group(TyperGroup):
    """Ends the process as a shell expects it, whatever a command raises."""

    def invoke(self, ctx: Any) -> Any:
        acknowledge_interrupts("stopping, which may take a few seconds")
        try:
            return super().invoke(ctx)
        except RaytpError as error:
            console.print_error(error)
            raise typer.Exit(_WRONG_USAGE if isinstance(error, ConfigError) else 1) from None
        except KeyboardInterrupt:
            # Threads may have to end, too: imports, downloads. Who does not want to wait for them need not.
            signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
            acknowledge()
            console.print_note("interrupted")
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            console.discard_stdout()
            raise typer.Exit(_BROKEN_PIPE) from None
        except SystemExit as error:
            if is_termination(error):
                raise typer.Exit(EXIT_STATUS) from None
            raise
        except OSError as error:  # a disk is full, say: standard output may be a file on it
            console.discard_stdout()
            console.print_error(error)
            raise typer.Exit(1) from None
        finally:
            # Runs before Ray's own exit function, which takes a moment and must not be interrupted.
            for number in (signal.SIGINT, signal.SIGTERM):
                atexit.register(signal.signal, number, signal.SIG_IGN)


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _main(ctx: typer.Context, version: opt.Version = False) -> None:
    """Generate text with a large language model, split over GPUs by tensor parallelism on Ray."""
    console.prepare_streams()
    if version:
        from raytp import __version__

        typer.echo(f"raytp {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(epilog=_GENERATE_EXAMPLES)
def generate(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    lines: opt.Lines = False,
    chat: opt.Chat = None,
    system: opt.System = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    engine: opt.Engine = None,
    model: opt.Model = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    max_model_len: opt.MaxModelLen = None,
    memory_fraction: opt.MemoryFraction = None,
) -> None:
    """Answer one prompt, or many.

    The prompt is the argument, a file, or what is piped in.
    Only answers go to standard output; progress, numbers and errors go to standard error.
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt or --file, not both")
    if prompt is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, name a --file, or pipe one in")
    from raytp.cli.engine import EngineOptions
    from raytp.cli.generate import read_prompts, run

    run(
        read_prompts(prompt, file, lines),
        opt.sampling_params(max_tokens, temperature, top_k, top_p, min_p, seed, stop),
        EngineOptions(model, tensor_parallel_size, device, dtype, max_model_len, memory_fraction, quiet, engine),
        use_chat=chat,
        system=system,
        as_json=json,
    )


@app.command(epilog=_CHAT_EXAMPLES)
def chat(
    system: opt.System = None,
    quiet: opt.Quiet = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    engine: opt.Engine = None,
    model: opt.Model = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    max_model_len: opt.MaxModelLen = None,
    memory_fraction: opt.MemoryFraction = None,
) -> None:
    """Talk with a model; it remembers the conversation.

    Ctrl-C stops an answer, Ctrl-D ends the session, /help lists the commands.
    If the turns are piped in, each line is one.
    """
    from raytp.cli.chat import run
    from raytp.cli.engine import EngineOptions

    run(
        opt.sampling_params(max_tokens, temperature, top_k, top_p, min_p, seed, stop),
        EngineOptions(model, tensor_parallel_size, device, dtype, max_model_len, memory_fraction, quiet, engine),
        system=system,
    )


@app.command(epilog=_INFO_EXAMPLES)
def info(
    model: opt.ModelArgument = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    dtype: opt.Dtype = None,
    memory: opt.Memory = None,
    json: opt.Json = False,
) -> None:
    """Show a model's sizes and how it is split over ranks, without starting anything.

    Sizes are those of the checkpoint's dtype, which a GPU uses; for a CPU add --dtype float32.
    """
    from raytp.cli.info import run

    run(model, tensor_parallel_size, dtype, memory, as_json=json)
