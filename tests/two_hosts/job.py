"""Runs on a host: an engine over two of them, and an answer for each line of standard input that asks for one.

Standard input's first line has the engine's settings, in JSON, and may name the network interface for its ranks.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray

from raytp import LLM, SamplingParams
from raytp.errors import RaytpError

_MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
_ENDLESS = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def answer(llm: LLM, asked: str) -> dict[str, Any]:
    if asked == "facts":
        pairs = json.loads((_MODEL / "questions.json").read_text())[:20]
        outputs = llm.chat([[{"role": "user", "content": p["question"]}] for p in pairs], SamplingParams(temperature=0))
        return {"is_right": [output.text for output in outputs] == [pair["answer"] for pair in pairs]}
    outputs = llm.generate([[5 + i] for i in range(16)], _ENDLESS)
    errors = [output.error for output in outputs if output.error is not None]
    return {"ids": [output.token_ids for output in outputs], "errors": errors}


def main() -> None:
    start = time.monotonic()
    settings = json.loads(sys.stdin.readline())
    if interface := settings.pop("interface", None):
        ray.init(log_to_driver=False, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": interface}})
    try:
        llm = LLM(_MODEL, 2, device="cpu", placement_strategy="STRICT_SPREAD", **settings)
    except RaytpError as error:
        say(error=str(error), kind=type(error).__name__, took_s=time.monotonic() - start)
        return
    say(hostnames=llm.info.hostnames, took_s=time.monotonic() - start)
    for line in sys.stdin:
        say(started=True)
        start = time.monotonic()
        found = answer(llm, line.strip())
        recoveries = [[recovery.report, recovery.rebuild_s] for recovery in llm.recoveries()]
        say(**found, recoveries=recoveries, took_s=time.monotonic() - start)
    llm.shutdown()


if __name__ == "__main__":
    main()
