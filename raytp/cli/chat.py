"""`raytp chat`: a session that keeps its conversation. Called by `raytp.cli.main`.

Each turn sends the whole conversation again; the engine's prefix cache has most of it.
"""

from __future__ import annotations

import sys

from raytp.cli import console
from raytp.cli.engine import EngineOptions, stream_answer
from raytp.cli.interrupts import leave_interrupts_alone
from raytp.llm import LLM
from raytp.prompts import encode_conversation, has_chat_template
from scheduler.errors import RequestError
from scheduler.sampling_params import SamplingParams

_HELP = """/reset   forget the conversation
/exit    leave (Ctrl-D does too, and Ctrl-C twice)
/help    this list
Ctrl-C   stop the answer"""


def run(sampling: SamplingParams, options: EngineOptions, *, system: str | None) -> None:
    """Start an engine and hold the session: with a person at a terminal, or one turn a line from a pipe."""
    with options.start() as llm:
        if not has_chat_template(llm.tokenizer):
            raise RequestError(
                f"{llm.model_name} has no chat template: use raytp generate, with a prompt in the form it expects"
            )
        session = _Session(llm, sampling, system, options.quiet)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _talk(session)
        else:
            console.keep_results_apart()
            for line in sys.stdin:
                if not session.take(line.strip(), is_interruptible=False):
                    break


class _Session:
    """A conversation, and what a line of input does to it."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None, is_quiet: bool) -> None:
        self._llm = llm
        self._sampling = sampling
        self._is_quiet = is_quiet
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def take(self, line: str, *, is_interruptible: bool) -> bool:
        """Obey a command or answer a turn; False if the session is to end. Raises RequestError; the turn is dropped."""
        if line == "/exit":
            return False
        if line == "/reset":
            self._messages = list(self._opening)
            console.print_note("the conversation is forgotten")
        elif line == "/help":
            console.print_note(_HELP)
        elif line.startswith("/") and line[1:].isalpha():
            console.print_note(f"there is no command {line}; /help lists them")
        elif line:
            self._answer(line, is_interruptible)
        return True

    def _answer(self, line: str, is_interruptible: bool) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        ids = encode_conversation(messages, self._llm.tokenizer, {})
        answer = stream_answer(self._llm, ids, self._sampling, console.write, is_interruptible=is_interruptible)
        console.write("\n")
        # A stopped answer stays as far as it went: the next question may be about it.
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if not self._is_quiet:
            console.print_note(answer.summary())


def _talk(session: _Session) -> None:
    """Until Ctrl-D, /exit, or a Ctrl-C at the prompt that follows another one."""
    import readline  # noqa: F401 (gives input() editing and a history)

    leave_interrupts_alone()
    console.print_note("/help lists the commands, Ctrl-D ends")
    was_interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.write("\n")
            return
        except KeyboardInterrupt:
            console.write("\n")
            if was_interrupted:
                return
            was_interrupted = True
            console.print_note("Ctrl-C again ends the session")
            continue
        try:
            if not session.take(line.strip(), is_interruptible=True):
                return
            was_interrupted = False
        except RequestError as error:
            console.print_error(error)
