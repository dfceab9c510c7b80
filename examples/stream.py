"""Print an answer as it is made: python examples/stream.py

Closing the iterator, or leaving its loop, ends the request; the engine then works for others.
"""

from contextlib import closing

from raytp import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "Name the planets of the solar system."}]


def main() -> None:
    """Text arrives as soon as it is certain: never half a character, and never a part of a stop string."""
    with LLM() as llm, closing(llm.stream_chat(MESSAGES, SamplingParams(max_tokens=64))) as chunks:
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
