"""raytp: tensor-parallel inference of large language models on Ray.

from raytp import LLM, SamplingParams

with LLM("path/to/model", tensor_parallel_size=2) as llm:
    print(llm.generate("The capital of Japan is", SamplingParams(max_tokens=16))[0].text)
"""

from raytp.errors import RaytpError, RequestError
from raytp.llm import LLM
from raytp.outputs import CompletionOutput, OutputChunk, RequestOutput
from scheduler.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "OutputChunk", "RaytpError", "RequestError", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"
