"""Text to token ids and back: the checkpoint's own tokenizer, and incremental detokenization with stop strings.

Owns the only use of transformers in this package, and imports it only when a tokenizer is loaded: that takes seconds.
Must not know of requests, engines or Ray. Used in the caller's process: loaded by `raytp.connection`, called by
`raytp.prompts` before ids go to the driver actor and by `raytp.collector` after they come back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.errors import RequestError, shown
from workers.errors import ModelNotFoundError

Message = Mapping[str, Any]
"""One turn of a chat: "role" and "content", and what else the model's template reads."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """The tokenizer of a Hugging Face directory. Picklable."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.num_ids = max(hf_tokenizer.get_vocab().values()) + 1
        """Every token's id is below it, those of added tokens too; the model's vocabulary V may be larger."""
        added = hf_tokenizer.added_tokens_decoder
        self._special_ids = frozenset(hf_tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load from the directory `path`, never from the network.

        Raises:
            ModelNotFoundError: the directory holds no tokenizer, or a damaged one.
        """
        with _IMPORTING:
            from transformers import AutoTokenizer

        if not _has_vocabulary(path):  # transformers would make an empty tokenizer
            raise ModelNotFoundError(f"{path} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there")
        try:
            return cls(AutoTokenizer.from_pretrained(path, local_files_only=True))
        except Exception as error:  # tokenizers raises a bare Exception for a damaged file
            raise ModelNotFoundError(
                f"the tokenizer in {path} cannot be loaded ({error}): copy its tokenizer*.json files again"
            ) from error

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, (T,), with the special tokens that the tokenizer itself puts around a text."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> NDArray[np.int32]:
        """Ids of a chat through the model's own template, (T,), up to where the assistant's answer begins.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._hf.chat_template is None:
            raise RequestError("the model has no chat template: use generate() with a prompt in the form it expects")
        _check_messages(messages)
        try:
            text: str = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:  # it is a program that may do anything with what it is given
            raise RequestError(f"the model's chat template refuses the messages: {str(error)[:1000]}") from error
        return self._encode(text, add_special_tokens=False)  # the template has written them all

    def _encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the prompt is half a surrogate pair: not text") from error
        ids = self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return np.asarray(ids, dtype=np.int32)

    def has_text(self, token_id: int) -> bool:
        """False for the ids that `decode` leaves out: special ones, and those that no token has."""
        return token_id < self.num_ids and token_id not in self._special_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids` without special tokens; ids that no token has (a padded vocabulary) are left out."""
        ids = [int(i) for i in token_ids]
        return str(self._hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


_IMPORTING = threading.Lock()
"""Transformers imports its parts when they are first asked for, and two threads at once may miss one."""


class TokenizerLoading:
    """Loads a tokenizer in a thread: it takes seconds of imports, and Ray can start meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer: Tokenizer | None = None
        self._error: Exception | None = None
        # It has hooks for forks, and starting Ray forks: first imported in the thread, it would release a lock in the
        # middle of a fork that had not taken it.
        import concurrent.futures.thread  # noqa: F401

        # No daemon: a process that is interrupted now must not end in the middle of the thread's imports. And nobody
        # joins it: after an interrupted join(), Python 3.11 takes a thread for one that has ended.
        self._has_ended = threading.Event()
        threading.Thread(target=self._load, name="raytp-tokenizer").start()

    def result(self) -> Tokenizer | None:
        """The tokenizer; None if the model came without one. Raises what `Tokenizer.load` raises."""
        self._has_ended.wait()
        if self._error is not None:
            raise self._error
        return self._tokenizer

    def _load(self) -> None:
        try:
            if any(self._path.glob("tokenizer*")) or _has_vocabulary(self._path):
                self._tokenizer = Tokenizer.load(self._path)
        except Exception as error:  # whatever it is, it must not end with this thread
            self._error = error
        finally:
            self._has_ended.set()


def _has_vocabulary(path: Path) -> bool:
    return any((path / name).is_file() for name in _VOCABULARY_FILES)


def _check_messages(messages: Any) -> None:
    """Templates render a missing role or content as nothing, and the model answers something else."""
    if not isinstance(messages, Sequence):
        raise RequestError(f"a chat must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise RequestError("a chat needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
            raise RequestError(f'message {i} is {shown(message)}: it must be {{"role": ..., "content": ...}}')


class IncrementalDetokenizer:
    """Text of one growing sequence of token ids, given out as soon as it can no longer change.

    A window of the last tokens is decoded again with each new one, and the new text is what the window's text has
    grown by. Only U+FFFD at its end can still change: an unfinished UTF-8 sequence decodes to one, and where characters
    are spelled in byte tokens (`byte_fallback`), so does each byte of the run that it stands in. The window is cut back
    when it is full, so the cost of a token does not depend on the length of the text.

    Once a stop string is complete, `stopped_by` names it and later tokens are ignored.
    """

    # UTF-8 decoding falls into step within 4 bytes, hence tokens, of wherever a window begins; decoders that treat the
    # first token of a text specially need one more.
    _NUM_KEPT = 6
    _NUM_CUT = 16
    # A character that has begun is over 3 tokens later; what is U+FFFD even then is no text, and stays what it is.
    _NUM_MAX = 20

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.stopped_by: str | None = None
        self.num_tokens = 0
        """Tokens consumed, up to and including the one that completed the stop string."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._max_stop_length = max(map(len, stop), default=0)
        self._window: list[int] = []
        self._num_window_chars = 0  # of the window's text, those already taken
        self._tail = ""  # text taken but held back: it may be the beginning of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far: the stop string, and what is still held back, are not in it."""
        return "".join(self._pieces)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens, and return the text that became final."""
        emitted = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            emitted.append(self._release(self._decode_next(int(token_id))))
        return self._emit("".join(emitted))

    def finish(self) -> str:
        """There are no more tokens: return the text that was held back."""
        if self.stopped_by is not None:
            return ""
        rest = self._tokenizer.decode(self._window)[self._num_window_chars :]
        released = self._release(rest)
        if self.stopped_by is None:
            released, self._tail = released + self._tail, ""
        self._window, self._num_window_chars = [], 0
        return self._emit(released)

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _decode_next(self, token_id: int) -> str:
        """The text that `token_id` makes certain."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        end = len(text.rstrip(_REPLACEMENT))
        is_cut = len(self._window) >= (self._NUM_CUT if end == len(text) else self._NUM_MAX)
        if is_cut:
            end = _num_chars_before_last(text)
        new_text = text[self._num_window_chars : end]
        self._num_window_chars = max(self._num_window_chars, end)
        if is_cut:
            self._cut_window()
        return new_text

    def _cut_window(self) -> None:
        """Keep its last tokens, from where a character begins: byte tokens make no text without its first byte."""
        for num_kept in (*range(self._NUM_KEPT, self._NUM_KEPT + 4), self._NUM_KEPT):
            text = self._tokenizer.decode(self._window[-num_kept:])
            if not text.startswith(_REPLACEMENT):
                break
        self._window = self._window[-num_kept:]
        self._num_window_chars = _num_chars_before_last(text)

    def _release(self, new_text: str) -> str:
        """The part of the held-back text and `new_text` that cannot belong to a stop string; finds complete ones."""
        if not self._stop:
            return new_text
        text, self._tail = self._tail + new_text, ""
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:  # the one that was complete first; of those, the longest
            _, start, self.stopped_by = min(found)
            return text[:start]
        num_held = self._count_possible_stop_chars(text)
        cut = len(text) - num_held
        self._tail = text[cut:]
        return text[:cut]

    def _count_possible_stop_chars(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._max_stop_length - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _num_chars_before_last(text: str) -> int:
    """Characters of `text` without a U+FFFD at the end, which may be one that is not finished."""
    return len(text) - text.endswith(_REPLACEMENT)
