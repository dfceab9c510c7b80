"""What became of a row, as a line of an OpenAI batch's output file. Called by `raytp.batch_job.job`.

https://platform.openai.com/docs/api-reference/batch/request-output; the bodies are those of the two endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from raytp.batch_job.openai_request import parse_request
from raytp.batch_job.rows import BadRow, Place, Row
from raytp.outputs import CompletionOutput, RequestOutput
from raytp.tokenizer import Tokenizer
from scheduler.sampling_params import SamplingParams
from scheduler.updates import TokenLogprobs


class OpenAIFormat:
    """Parses a line, and writes its record. A second attempt at a row gives it the same ids."""

    def __init__(self, defaults: SamplingParams, run_id: str, model_name: str, tokenizer: Tokenizer | None) -> None:
        self._defaults = defaults
        self._run_id = run_id
        self._model_name = model_name
        self._tokenizer = tokenizer

    def parse(self, place: Place, columns: Mapping[str, Any]) -> Row | BadRow:
        """The row that the fields of a line make."""
        return parse_request(place, columns, self._defaults)

    def record(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        """The line of a row that was answered."""
        number = self._number(row.place)
        return {
            "id": f"batch_req_{number}",
            "custom_id": row.id,
            "response": {
                "status_code": 200,
                "request_id": f"req_{number}",
                "body": self._chat(number, output) if row.is_chat else self._completion(number, output),
            },
            "error": None,
        }

    def error_record(self, row: BadRow) -> dict[str, Any]:
        """The line of a row that failed; custom_id is null if the row has none that can be read."""
        return {
            "id": f"batch_req_{self._number(row.place)}",
            "custom_id": row.id,
            "response": None,
            "error": {
                "code": row.code,
                "message": row.message,
                "source": row.place.source,
                "line": row.place.line,
            },
        }

    def _number(self, place: Place) -> str:
        return f"{self._run_id}{place.ordinal:012x}"

    def _chat(self, number: str, output: RequestOutput) -> dict[str, Any]:
        choices = [
            {
                "index": each.index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": self._chat_logprobs(each),
                "finish_reason": each.finish_reason,
            }
            for each in output.outputs
        ]
        return self._body(f"chatcmpl-{number}", "chat.completion", choices, output)

    def _completion(self, number: str, output: RequestOutput) -> dict[str, Any]:
        choices = [
            {
                "index": each.index,
                "text": each.text,
                "logprobs": self._completion_logprobs(each),
                "finish_reason": each.finish_reason,
            }
            for each in output.outputs
        ]
        return self._body(f"cmpl-{number}", "text_completion", choices, output)

    def _body(self, body_id: str, kind: str, choices: list[dict[str, Any]], output: RequestOutput) -> dict[str, Any]:
        num_out = sum(len(each.token_ids) for each in output.outputs)
        return {
            "id": body_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._model_name,
            "choices": choices,
            "usage": {
                "prompt_tokens": output.num_prompt_tokens,
                "completion_tokens": num_out,
                "total_tokens": output.num_prompt_tokens + num_out,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
            },
        }

    def _chat_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        content = [
            self._token(token_id, _as_number(each.chosen))
            | {"top_logprobs": [self._token(*top) for top in _likeliest(each)]}
            for token_id, each in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        tokens = [self._text(token_id) for token_id in completion.token_ids]
        offsets = [0]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [_as_number(each.chosen) for each in completion.logprobs],
            "top_logprobs": [{self._text(i): value for i, value in _likeliest(each)} for each in completion.logprobs],
            "text_offset": offsets[: len(tokens)],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, token_id: int) -> str:
        text = "" if self._tokenizer is None else self._tokenizer.decode([token_id])
        return text or f"token_id:{token_id}"  # special tokens have no text


def _likeliest(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    return [(int(i), _as_number(value)) for i, value in zip(logprobs.top_ids, logprobs.top, strict=True)]


def _as_number(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI's is -9999."""
    return max(float(logprob), -9999.0)
