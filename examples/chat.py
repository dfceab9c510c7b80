"""Hold a conversation of two turns: python examples/chat.py

Each turn sends the whole conversation again, and the prefix cache serves what it has seen before.
"""

from raytp import LLM, SamplingParams

QUESTIONS = ["What is the capital of Japan?", "And of France?"]


def main() -> None:
    """The model's own chat template turns the messages into a prompt."""
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    with LLM() as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (answer,) = llm.chat(messages, SamplingParams(max_tokens=32))
            messages.append({"role": "assistant", "content": answer.text})
            print(f"> {question}\n{answer.text}")
            print(f"  ({answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens from the cache)")


if __name__ == "__main__":
    main()
