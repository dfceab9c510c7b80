"""Complete several prompts at once: python examples/generate.py

Runs the default model, split over two ranks. Outputs stand in the order of the prompts, whatever order they end in.
"""

from raytp import LLM, SamplingParams

PROMPTS = ["The capital of Japan is", "Water boils at", "The first three prime numbers are"]


def main() -> None:
    """One SamplingParams for all prompts; a list of them would give each its own."""
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24)
    with LLM(tensor_parallel_size=2) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r} -> {output.text!r} ({output.finish_reason})")


if __name__ == "__main__":
    main()
