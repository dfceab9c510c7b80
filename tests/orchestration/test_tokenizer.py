"""The tokenizer against transformers' own, and incremental detokenization against decoding everything at once."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raytp.model_source import resolve_model
from raytp.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerLoading
from scheduler.errors import RequestError
from workers.errors import ModelNotFoundError

TINY = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
TEXTS = st.text(st.sampled_from("ab .,<|\n0é東京😀🏳️‍🌈\ufffd"), max_size=40)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module", params=["tiny", "smollm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "tiny":
        return Tokenizer.load(TINY)
    try:
        return Tokenizer.load(resolve_model(None).path)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def copy_tiny(target: Path, **changes: Any) -> Path:
    """A copy of the tiny model's tokenizer, with top-level entries of tokenizer.json replaced."""
    target.mkdir()
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, target)
    content = json.loads((TINY / "tokenizer.json").read_text()) | changes
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def detokenize(tokenizer: Tokenizer, ids: list[int], *, at_once: int = 1, **options: Any) -> tuple[str, Any]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return detokenizer.text, detokenizer


def test_encode_and_decode_equal_those_of_transformers(tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(tokenizer._hf.name_or_path)
    for text in ("Hello, world! 123", " naïve café 東京 😀", "<|im_start|>user\nhi<|im_end|>", ""):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(reference.encode(text), skip_special_tokens=True)
    assert tokenizer.num_ids == len(reference)
    assert reference.eos_token_id == 2


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("Hello").tolist()
    beyond = [tokenizer.num_ids, tokenizer.num_ids + 1000, 2**31 - 1] * 10
    assert tokenizer.decode(hello + beyond) == "Hello"
    assert detokenize(tokenizer, hello + beyond + hello)[0] == "HelloHello"


def test_chat_is_the_models_template(tiny: Tokenizer) -> None:
    ids = tiny.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.dtype == np.int32
    assert ids.tolist() == tiny.encode(expected).tolist()


def test_chat_passes_template_arguments(tmp_path: Path) -> None:
    path = copy_tiny(tmp_path / "model")
    (path / "chat_template.jinja").write_text(
        "{{ messages[0]['content'] }}{% if enable_thinking %}<|im_start|>{% endif %}"
    )
    tokenizer = Tokenizer.load(path)
    hi = tokenizer.encode("Hi").tolist()
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.encode_chat(messages, enable_thinking=True).tolist() == [*hi, 1]
    assert tokenizer.encode_chat(messages, enable_thinking=False).tolist() == hi


def test_chat_has_exactly_one_bos(tmp_path: Path) -> None:
    """Both the tokenizer and the template write one."""
    bos = "<|endoftext|>"
    template = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    specials = {bos: {"id": bos, "ids": [0], "tokens": [bos]}}
    post_processor = {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": specials}
    post_processor["pair"] = [*template, {"Sequence": {"id": "B", "type_id": 0}}]
    path = copy_tiny(tmp_path / "model", post_processor=post_processor)
    (path / "chat_template.jinja").write_text("<|endoftext|>" + (TINY / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("Hi").tolist().count(0) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist().count(0) == 1


def test_chat_without_template_says_what_to_do(tmp_path: Path) -> None:
    path = copy_tiny(tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="generate"):
        Tokenizer.load(path).encode_chat([{"role": "user", "content": "Hi"}])


def test_messages_that_the_template_refuses_are_request_errors(tmp_path: Path) -> None:
    path = copy_tiny(tmp_path / "model")
    template = (
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}{% endfor %}"
    )
    (path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="only users"):
        Tokenizer.load(path).encode_chat([{"role": "robot", "content": "Hi"}])


@pytest.mark.parametrize("messages", [[], ["Hi"], [{"content": "Hi"}], [{"role": "user"}]])
def test_malformed_messages_are_request_errors(tiny: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        tiny.encode_chat(messages)


def test_text_that_is_no_unicode_is_a_request_error(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2"):
        tiny.encode("ab\ud83d")


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    path = copy_tiny(tmp_path / "model")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        Tokenizer.load(path)


def test_loading_in_a_thread(tmp_path: Path) -> None:
    loaded = TokenizerLoading(TINY).result()
    assert loaded is not None
    assert loaded.num_ids == Tokenizer.load(TINY).num_ids
    assert TokenizerLoading(tmp_path).result() is None


def test_what_goes_wrong_in_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose tokenizer fails is no model without one."""
    path = copy_tiny(tmp_path / "model")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        TokenizerLoading(path).result()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError):
        TokenizerLoading(TINY).result()


def test_ids_with_gaps(tmp_path: Path) -> None:
    """The last token's id counts, not how many tokens there are."""
    added = json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]
    last = added[-1] | {"id": 3000, "content": "<|late|>"}
    tokenizer = Tokenizer.load(copy_tiny(tmp_path / "model", added_tokens=[*added, last]))
    assert tokenizer.encode("<|late|>").tolist() == [tokenizer.num_ids - 1]


def test_pickles(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("Hello 😀").tolist() == tokenizer.encode("Hello 😀").tolist()


def test_transformers_is_imported_late() -> None:
    code = "import sys, raytp.tokenizer; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@settings(deadline=None)
@given(data=st.data())
def test_pieces_of_random_ids_add_up(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_ids + 3), max_size=80))
    assert detokenize(tokenizer, ids)[0] == tokenizer.decode(ids)


@settings(deadline=None)
@given(data=st.data())
def test_pieces_of_broken_utf8_add_up(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Long runs of single bytes that never make a character, and of U+FFFD itself, with special tokens in between."""
    single_bytes = sorted({i for text in ("é", "東", "😀") for i in tokenizer.encode(text).tolist()})
    replacement = tokenizer.encode("\ufffd").tolist()
    ids = data.draw(st.lists(st.sampled_from([*single_bytes, *replacement, 2]), max_size=120))
    assert detokenize(tokenizer, ids, at_once=data.draw(st.integers(1, 5)))[0] == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=TEXTS)
def test_no_piece_ends_in_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(text.replace("\ufffd", "")).tolist()
    pieces = [detokenizer.push([i]) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert detokenizer.finish() == ""


def test_text_comes_out_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("a😀b").tolist()
    pieces = [detokenizer.push([i]) for i in ids]
    assert len(ids) > 3, "the emoji must span tokens"
    assert pieces == ["a", *[""] * (len(ids) - 3), "😀", "b"]


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As in Mistral's and the first Llamas': what has no token of its own is spelled in tokens of one byte each."""
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4} | {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    raw = RawTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))


@settings(deadline=None)
@given(text=st.text(st.sampled_from("abé東😀"), max_size=40), stop=st.sampled_from([(), ("😀a",), ("東😀", "b")]))
def test_characters_spelled_in_byte_tokens(byte_fallback: Tokenizer, text: str, stop: tuple[str, ...]) -> None:
    """A run of them decodes to U+FFFD alone while its last character is unfinished."""
    ids = byte_fallback.encode(text).tolist()
    assert byte_fallback.decode(ids) == text
    output, detokenizer = detokenize(byte_fallback, ids, stop=stop)
    start, string = find_first_stop(text, stop) or (len(text), None)
    assert (output, detokenizer.stopped_by) == (text[:start], string)


def test_byte_tokens_that_are_no_text_still_come_out(byte_fallback: Tokenizer) -> None:
    continuation = byte_fallback.encode("é").tolist()[1]
    detokenizer = IncrementalDetokenizer(byte_fallback)
    emitted = detokenizer.push([continuation] * 100)
    assert len(emitted) > 50
    assert set(emitted) == {"\ufffd"}


def find_first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Brute force: read character by character until the text ends in a stop string; the longest if several."""
    for end in range(1, len(text) + 1):
        if complete := [string for string in stop if text[:end].endswith(string)]:
            return end - len(longest := max(complete, key=len)), longest
    return None


@settings(deadline=None)
@given(
    text=TEXTS,
    stop=st.lists(TEXTS.filter(lambda s: 0 < len(s) <= 4), min_size=1, max_size=3),
    at_once=st.integers(1, 4),
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stop: list[str], at_once: int) -> None:
    ids = tokenizer.encode(text).tolist()
    text = tokenizer.decode(ids)
    output, detokenizer = detokenize(tokenizer, ids, at_once=at_once, stop=tuple(stop))
    expected = find_first_stop(text, tuple(stop))
    if expected is None:
        assert (output, detokenizer.stopped_by, detokenizer.num_tokens) == (text, None, len(ids))
        return
    start, string = expected
    assert (output, detokenizer.stopped_by) == (text[:start], string)
    if "\ufffd" not in text:  # otherwise the text of a token depends on the next one
        needed = next(n for n in range(len(ids) + 1) if string in tokenizer.decode(ids[:n])[start:])
        assert detokenizer.num_tokens == needed


def test_the_beginning_of_a_stop_string_is_held_back(tiny: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny, stop=("xyz",))
    (a, x, y, b, z) = (tiny.encode(letter).tolist() for letter in "axybz")
    assert [detokenizer.push(ids) for ids in (a, x, y)] == ["a", "", ""]
    assert detokenizer.push(b) == "xyb"
    assert [detokenizer.push(ids) for ids in (x, y, z)] == ["", "", ""]
    assert (detokenizer.text, detokenizer.stopped_by, detokenizer.num_tokens) == ("axyb", "xyz", 7)
    assert (detokenizer.push(a), detokenizer.finish(), detokenizer.num_tokens) == ("", "", 7)


def test_held_back_text_comes_out_at_the_end(tiny: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny, stop=("xyz",))
    assert detokenizer.push(tiny.encode("axy").tolist()) == "a"
    assert detokenizer.finish() == "xy"
    assert detokenizer.text == "axy"


def test_cost_of_a_token_does_not_grow(tiny: Tokenizer) -> None:
    """Decoding everything again at each token would make the last tenth of 20,000 tokens cost 19 times the first."""
    for ids in (tiny.encode("The answer is 42. ").tolist(), tiny.encode("\ufffd").tolist()):
        detokenizer = IncrementalDetokenizer(tiny, stop=("never",))
        ids = (ids * 20_000)[:20_000]
        seconds = []
        for begin in range(0, 20_000, 2_000):
            started = time.process_time()
            for token_id in ids[begin : begin + 2_000]:
                detokenizer.push([token_id])
            seconds.append(time.process_time() - started)
        assert seconds[-1] < 5 * seconds[0] + 0.1


INTERRUPTED = """
import atexit, os, signal, sys, threading
from pathlib import Path
from raytp.tokenizer import TokenizerLoading
loading = TokenizerLoading(Path(sys.argv[1]))
atexit.register(lambda: print(loading._tokenizer is not None))
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    loading.result()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_who_is_interrupted_does_not_end_in_the_midst_of_imports() -> None:
    """Else torch complains, as its modules are taken down."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(TINY)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted\nTrue\n", "")
