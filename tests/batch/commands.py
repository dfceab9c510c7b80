"""`raytp batch` as a process of its own, what it is asked, and the tiny model that knows its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
PAIRS = [(pair["question"], pair["answer"]) for pair in json.loads((MODEL / "questions.json").read_text())]
SCHEMA = json.loads((Path(__file__).parent / "openai_batch_output.schema.json").read_text())
ENV = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"} | {
    "RAY_AUTH_MODE": "disabled",
    "NO_COLOR": "1",
}
TIMEOUT_S = 250


def start(*arguments):
    command = [sys.executable, "-m", "raytp.cli", "batch", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(*arguments):
    process = start(*arguments)
    out, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, errors


def chat_request(custom_id, question, **body):
    messages = [{"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 40} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_chats(path, chats):
    """Requests in OpenAI's format, q-0 and so on, for the questions of the fixture `real_chats`."""
    return write(path, [chat_request(f"q-{i}", question, max_tokens=8) for i, (question, _) in enumerate(chats)])


def check_chats(records, chats):
    """Each question has one record of OpenAI's schema, with the answer, its end and the counts that `LLM.chat` has."""
    assert sorted(record["custom_id"] for record in records) == sorted(f"q-{i}" for i in range(len(chats)))
    for record in records:
        output = chats[int(record["custom_id"].removeprefix("q-"))][1]
        jsonschema.validate(record, SCHEMA)
        body = record["response"]["body"]
        assert (record["response"]["status_code"], body["object"]) == (200, "chat.completion")
        [choice] = body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (output.text, output.finish_reason)
        assert body["usage"]["prompt_tokens"] == output.num_prompt_tokens
        assert body["usage"]["completion_tokens"] == len(output.token_ids)
