"""What an adapter's directory says about text: the oracle is `Tokenizer.from_dir` of that directory."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from loraplex.adapters.files import AdapterFolder
from loraplex.adapters.registry import AdapterText
from loraplex.core import SamplingParams
from loraplex.errors import (
    AdapterBusyError,
    AdapterError,
    AdapterFileFormatError,
    AdapterUnavailableError,
    AdapterValidationError,
    InvalidRequestError,
)
from loraplex.logs import RequestContext, request_context
from loraplex.processes import bounded, fair_turns
from loraplex.text import adapter_text, template_process
from loraplex.text.adapter_text import MAX_ADDED_TOKENS, NUM_PARSING, AdapterTexts
from loraplex.text.processor import InputProcessor, ModelLimits
from loraplex.text.request_text import RequestText
from loraplex.text.template_process import TemplateProcesses
from loraplex.text.tokenizer import Tokenizer
from loraplex.text.tokenizer_file import JsonCursor
from tests.text.tiny_tokenizers import CORPUS, KINDS, tiny_backend, write_directory

WORDS = "select <sql> quux  zz hello <|im_start|>x</think><tool call> Zwölf"
TEMPLATE = "{% for m in messages %}<sql>{{ m.content }}{{ eos_token }}{% endfor %}"


class Place:
    """A base model's directory and an adapter's beside it, which begins as a copy of the tokenizer's files."""

    def __init__(self, root: Path, kind: str = "byte-bpe", **base_files: Any) -> None:
        self.kind = kind
        self.base_dir = write_directory(root / "base", kind, **base_files)
        self.adapter_dir = write_directory(root / "adapter", kind)
        self.base = Tokenizer.from_dir(self.base_dir)
        self.texts = self.make_texts()

    def make_texts(self, **options: Any) -> AdapterTexts:
        base = RequestText(self.base, self.base.vocab_size, self.base.eos_token_ids, {"top_p": 0.9})
        return AdapterTexts(base, self.base_dir, **options)

    def write(self, name: str, content: Any) -> None:
        (self.adapter_dir / name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")

    def add(self, *tokens: AddedToken | str) -> None:
        backend = tiny_backend(self.kind)
        for token in tokens:
            is_special = isinstance(token, AddedToken) and token.special
            (backend.add_special_tokens if is_special else backend.add_tokens)([token])
        backend.save(str(self.adapter_dir / "tokenizer.json"))

    def change_tokenizer(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.adapter_dir / "tokenizer.json"
        content = json.loads(path.read_text("utf-8"))
        change(content)
        path.write_text(json.dumps(content), "utf-8")

    def read(self, vocab_size: int | None = None) -> AdapterText | None:
        return self.texts.read(AdapterFolder(self.adapter_dir, "one"), vocab_size)

    def reasons(self) -> tuple[str, ...]:
        with pytest.raises(AdapterValidationError) as refused:
            self.read()
        return refused.value.reasons

    def side(self, vocab_size: int | None = None) -> RequestText:
        text = self.read(vocab_size)
        assert text is not None
        return self.texts.of(AdapterText.of(text.document))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --------------------------------------------------------------------------------------------------------- added tokens


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_are_as_the_directory_on_its_own_reads_them(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind)
    place.add(AddedToken("<sql>", special=True, normalized=False), "quux", AddedToken(" zz", lstrip=True))
    place.write("tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "[PAD]"})
    side, alone = place.side(), Tokenizer.from_dir(place.adapter_dir)
    assert side.tokenizer is not None
    for words in (WORDS, *CORPUS):
        ids = alone.encode(words)
        assert side.tokenizer.encode(words) == ids
        for skips in (True, False):
            assert side.tokenizer.decode(ids, skip_special_tokens=skips) == alone.decode(ids, skip_special_tokens=skips)
    every = range(alone.vocab_size)
    assert [side.tokenizer.token_bytes(i) for i in every] == [alone.token_bytes(i) for i in every]
    assert side.tokenizer.special_ids == alone.special_ids
    assert side.tokenizer.special_tokens_map == alone.special_tokens_map
    assert side.eos_token_ids == (alone.token_id("<|im_end|>"), *place.base.eos_token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_never_sees_them_and_the_vocabulary_is_shared(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind)
    before = place.base.encode(WORDS), place.base.vocab_size
    place.add("<sql>", "quux")
    side = place.side()
    assert side.tokenizer is not None
    assert side.tokenizer.vocab_size == place.base.vocab_size + 2
    assert (place.base.encode(WORDS), place.base.vocab_size) == before == (place.base.encode(WORDS), before[1])
    assert side.tokenizer.encode(WORDS) != before[0]
    side.tokenizer.token_bytes(5)
    assert side.tokenizer._token_bytes == {}, "bytes of the base's tokens are kept once"


def test_copies_of_the_bases_files_bring_nothing(place: Place) -> None:
    assert place.read() is None
    assert place.texts.of(None).tokenizer is place.base


def test_the_same_tokenizer_written_another_way_brings_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of the library writes it so; the second adapter with that file does not parse it again."""
    place.add()
    assert (
        place.adapter_dir.joinpath("tokenizer.json").read_bytes()
        != place.base_dir.joinpath("tokenizer.json").read_bytes()
    )
    assert place.read() is None
    monkeypatch.setattr(adapter_text, "read_added_tokens", lambda data, base: pytest.fail("it was parsed again"))
    assert place.read() is None


def test_directories_of_slow_tokenizers_have_their_tokens_beside(place: Place) -> None:
    """added_tokens.json and special_tokens_map.json, as transformers wrote them before 2023; no tokenizer.json."""
    (place.adapter_dir / "tokenizer.json").unlink()
    size = place.base.vocab_size
    place.write("added_tokens.json", {"<sql>": size + 1, "<plan>": size})
    place.write("special_tokens_map.json", {"eos_token": "<sql>", "bos_token": {"content": "<s>"}})
    place.write("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    side = place.side(size + 2)
    assert side.tokenizer is not None
    assert side.tokenizer.encode("<plan><sql>", add_special_tokens=False) == [size, size + 1]
    assert side.tokenizer.special_ids == {*place.base.special_ids, size + 1}
    assert side.eos_token_ids[0] == size + 1


def test_as_many_tokens_as_may_be_are_added_at_once(place: Place) -> None:
    """One by one, 4096 took two minutes: the library builds an index of all tokens for each call."""
    size = place.base.vocab_size
    place.change_tokenizer(
        lambda content: content["added_tokens"].extend(
            {"id": size + i, "content": f"<{i}>", "special": i % 2 == 0} for i in range(MAX_ADDED_TOKENS)
        )
    )
    began_s = time.monotonic()
    side = place.side()
    assert time.monotonic() - began_s < 10
    assert side.tokenizer is not None
    last = MAX_ADDED_TOKENS - 1
    assert side.tokenizer.encode(f"<{last}>", add_special_tokens=False) == [size + last]
    assert side.tokenizer.special_ids == {*place.base.special_ids, *range(size, size + MAX_ADDED_TOKENS, 2)}


def test_equal_texts_are_one_tokenizer(place: Place) -> None:
    place.add("<sql>")
    first, second = place.read(), place.read()
    assert first == second
    assert place.texts.of(first) is place.texts.of(second)


def test_a_text_is_known_once_it_is_made(place: Place) -> None:
    place.add("<sql>")
    text = place.read()
    assert place.texts.known(text) is place.texts.of(text)
    other = place.make_texts()
    assert other.known(text) is None
    assert other.known(None) is other.of(None)


def test_a_text_that_fell_out_of_those_remembered_is_made_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_text, "MAX_BUILT", 1)
    place.add("<sql>")
    text = place.read()
    first = place.texts.of(text)
    place.texts.of(AdapterText.of({"generation_config": {}}))
    second = place.texts.of(text)
    assert second is not first
    assert second.tokenizer is not None
    assert first.tokenizer is not None
    assert second.tokenizer.encode(WORDS) == first.tokenizer.encode(WORDS)


def _rename(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["strange"] = vocab.pop("qu")


def _swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_rename, r"token 'strange' of its tokenizer has id \d+, in the base's vocabulary id \d+ is 'qu'"),
        (
            _swap,
            r"token '[ab]' of its tokenizer has id \d+, in the base's vocabulary id \d+ is '[ab]': the adapter was",
        ),
        (
            lambda content: content["model"]["vocab"].update(novel=5000),
            r"token 'novel' \(id 5000\) is in its model's vocabulary and not in the base's: only tokens of",
        ),
        (
            lambda content: content["added_tokens"].append({"id": 5000, "content": "<sql>"}),
            r"added token '<sql>' has id 5000, but would be \d+: ids of added tokens follow the base's, from \d+ on",
        ),
        (
            lambda content: content["added_tokens"].append({"id": 3, "content": "<sql>"}),
            r"token '<sql>' of its tokenizer has id 3, in the base's vocabulary id 3 is",
        ),
        (lambda content: content["added_tokens"].append({"id": True, "content": "<sql>"}), "must have an id and a"),
        (lambda content: content["added_tokens"].append(7), "must have an id and a content, got 7"),
        (lambda content: content["added_tokens"].append({"id": 485, "content": "x" * 600}), "more than 256 char"),
        (
            lambda content: content["added_tokens"].extend({"id": 485 + i, "content": f"<{i}>"} for i in range(9999)),
            f"more than {MAX_ADDED_TOKENS} added tokens",
        ),
    ],
)
def test_what_is_no_extension_is_refused_by_name(
    place: Place, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    place.change_tokenizer(change)
    (only,) = place.reasons()
    assert re.search(reason, only), only


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", "[" * 50_000, "is expected at character 0"),
        ("tokenizer.json", '{"model": {"vocab": ' + '{"a":' * 50_000, "nested deeper than 32 levels"),
        ("tokenizer.json", '{"x": [' + "1," * 2**18 + "1]}", "more values than any tokenizer of this base model"),
        ("tokenizer.json", '{"x": ' + "[" * 50_000, "nested deeper than 32 levels"),
        ("tokenizer.json", '{"x": {"y": [' + "[[1]]," * 2**17 + "1]}}", "more values than any tokenizer of this base"),
        ("tokenizer.json", '{"x": "' + "a" * 2**21 + '"}', "a string without an end, or of more than 2097152"),
        ("tokenizer.json", '{"x": "' + '\\"' * 2**20 + '"}', "a string without an end, or of more than 2097152"),
        ("tokenizer.json", '{"x": ' + "1" * 100 + "}", "is expected at character"),
        ("tokenizer_config.json", '{"x": [' + "[]," * 2**17 + "1]}", "has more than 131072 values"),
        ("special_tokens_map.json", '{"x": [' + "1," * 2**17 + "1]}", "has more than 131072 values"),
        ("generation_config.json", '{"x": [' + ("9" * 4300 + ",") * 6 + "1]}", "has more than 1024 numbers of over 20"),
        (
            "tokenizer_config.json",
            '{"x": [' + "2.225073858507e-308," * 2000 + "1]}",
            "numbers .* or with exponents",
        ),
        ("added_tokens.json", '{"x": [' + ("9" * 4300 + ",") * 6 + "1]}", "has more than 1024 numbers of over 20"),
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 0, "content": "0"}] * 3000},
            "tokenizer.json: there are more than 2048 added tokens",
        ),
        (
            "tokenizer.json",
            {"added_tokens": [{"id": 0, "content": "0" * 300}]},
            "tokenizer.json: an added token has more than 256 characters",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"999": {"content": "  \u3000", "lstrip": True}}},
            "is white space, and takes more of it",
        ),
        ("special_tokens_map.json", {"pad_token": {"content": "\t", "rstrip": True}}, "is white space, and takes more"),
        ("special_tokens_map.json", {"x" * 65 + "_token": "a"}, "a name of more than 64 characters"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "<sql>"}}, "must have an id and a content"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, None),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        ("tokenizer_config.json", {f"x{i}_token": "a" for i in range(300)}, "more than 256 special tokens"),
        ("tokenizer_config.json", {"chat_template": [3]}, "chat_template must be a string or a list"),
        ("added_tokens.json", {"<sql>": "5"}, "added_tokens.json: an added token must have an id"),
        ("chat_template.jinja", "{{ x", "chat template 'default': the chat template is wrong at line 1"),
        (
            "generation_config.json",
            {"temperature": -1},
            r"generation_config.json: .*temperature must be in \[0, 100",
        ),
        ("generation_config.json", {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ("generation_config.json", {"eos_token_id": [-1]}, "eos_token_id must be a token id or a list"),
        ("generation_config.json", {"eos_token_id": list(range(2000))}, "eos_token_id has more than 1024 ids"),
    ],
)
def test_odd_files_are_refused_by_name(place: Place, name: str, content: Any, reason: str | None) -> None:
    place.write(name, content)
    if reason is None:
        place.read()
        return
    (only,) = place.reasons()
    assert re.search(reason, only), only
    assert str(place.adapter_dir) not in only


def test_all_reasons_come_at_once(place: Place) -> None:
    place.write("tokenizer_config.json", "[]")
    place.write("generation_config.json", {"top_k": 1.5})
    assert len(place.reasons()) == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_bytes_are_bounded_before_they_are_read(place: Place, name: str) -> None:
    with (place.adapter_dir / name).open("ab") as file:
        file.truncate(2**34)
    with pytest.raises(AdapterFileFormatError, match=rf"{name} has {2**34} bytes, at most \d+ are read"):
        place.read()


# ---------------------------------------------------------------------------------------- templates, sampling defaults


def test_a_chat_template_of_its_own(place: Place) -> None:
    place.write("chat_template.jinja", TEMPLATE)
    side = place.side()
    assert side.tokenizer is not None
    assert side.renders_apart
    chat = [{"role": "user", "content": "hi"}]
    assert side.tokenizer.apply_chat_template(chat) == "<sql>hi</s>"
    assert side.tokenizer.encode(WORDS) == place.base.encode(WORDS)
    with pytest.raises(InvalidRequestError, match="this model has no chat template"):
        place.base.apply_chat_template(chat)


def test_the_template_file_goes_before_the_configuration(place: Place) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "config"}
    place.write("tokenizer_config.json", config)
    text = place.read()
    assert text is not None
    assert text.document == {"chat_templates": {"default": "config"}}
    place.write("chat_template.jinja", "file")
    text = place.read()
    assert text is not None
    assert text.document == {"chat_templates": {"default": "file"}}
    assert text.brings == ("chat_template",)


HOSTILE = {
    "time in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "time in one call": "{{ 7**70000000 }}",
    "memory at once": "{{ messages[0].content.center(10**10) }}",
    "memory by doubling": "{% set n = namespace(s=8*'a') %}{% for i in range(60) %}{% set n.s = n.s~n.s %}{% endfor %}",
    "a long answer": "{{ 'a' * 40000000 }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_a_template_costs_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next chat is rendered all the same."""
    templates, chat = TemplateProcesses(), {"messages": [{"role": "user", "content": "hi"}]}
    began_s, started = time.monotonic(), starts(monkeypatch)
    with pytest.raises(InvalidRequestError, match=r"more than 0.5 s or too much memory|MemoryError|more than 16777216"):
        templates.render(source, chat)
    assert time.monotonic() - began_s < 30
    assert len(started) == 1, "what a limit ended is not tried again"
    assert templates.render("{{ messages[0].content }}", chat) == "hi"
    templates.close()


def test_what_a_template_leaves_in_its_process_is_no_others_loss() -> None:
    """jinja2 folds the constant, and the compiled template is kept."""
    templates, large = TemplateProcesses(), "{% for i in range(9) %}" + "{{ messages }}" * 2_000 + "{% endfor %}"
    num_chars = 40_000_000
    for index in range(24):
        try:
            templates.check({"default": f"{{{{ 'c' * {num_chars} }}}}{index}"})
        except InvalidRequestError:
            num_chars = num_chars * 7 // 10
    templates.check({"default": large})
    assert templates.render("x", {}) == "x"
    templates.close()


def test_a_long_answer_comes_whole() -> None:
    templates = TemplateProcesses()
    for text in ('"' * 3_000_000, "\u4e2d" * 1_500_000, "\ud800\U0001f600x" * 400_000):
        assert templates.render("{{ text }}", {"text": text}) == text
    templates.close()


def test_all_templates_of_a_directory_share_the_time_of_one(place: Place) -> None:
    """jinja2 folds constants when it compiles: each of these takes half a second."""
    listed = [{"name": f"t{i}", "template": f"{{{{ 3**3000000 % 7 }}}}{i}"} for i in range(16)]
    place.write("tokenizer_config.json", {"chat_template": listed})
    with pytest.raises(AdapterValidationError, match=r"needs more than 0\.5 s"):
        place.read()
    place.write("tokenizer_config.json", {"chat_template": [{"name": f"t{i}", "template": "x"} for i in range(17)]})
    with pytest.raises(AdapterValidationError, match="more than 16 templates"):
        place.read()
    place.write("tokenizer_config.json", {"chat_template": [{"name": 65 * "t", "template": "x"}]})
    with pytest.raises(AdapterValidationError, match="a name of more than 64 characters"):
        place.read()


def test_characters_of_added_tokens_are_bounded(place: Place) -> None:
    place.add(*(f"<{i:03}{'x' * 123}>" for i in range(256)))
    assert place.side().tokenizer is not None
    place.add(*(f"<{i:03}{'x' * 123}>" for i in range(257)))
    (only,) = place.reasons()
    assert "more than 2048 added tokens, or 32768 characters" in only


def test_the_document_is_bounded(place: Place) -> None:
    """It is kept for each version, and written to the state directory."""
    place.write("tokenizer_config.json", {"chat_template": "\U0001f600" * 100_000})
    (only,) = place.reasons()
    assert "more than 1048576 bytes of JSON" in only


def test_a_template_reaches_no_file_and_no_process() -> None:
    templates = TemplateProcesses()
    with pytest.raises(InvalidRequestError, match="refuses this chat"):
        templates.render("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequestError, match="refuses this chat"):
        templates.render("{% include '/etc/passwd' %}", {})
    templates.close()


def test_without_a_process_the_request_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(module: str) -> None:
        raise OSError(24, "Too many open files")

    templates = TemplateProcesses()
    with monkeypatch.context() as patch:
        patch.setattr(bounded, "start", no_descriptor)
        with pytest.raises(AdapterBusyError, match=r"could not be started .*Too many open files"):
            templates.render("x", {})
    assert templates.render("x", {}) == "x"


def starts(monkeypatch: pytest.MonkeyPatch, *signals: signal.Signals) -> list[subprocess.Popen[bytes]]:
    """The processes that are started. The first ones get these signals."""
    started, start = [], bounded.start

    def noted(module: str) -> subprocess.Popen[bytes]:
        started.append(start(module))
        if len(started) <= len(signals):
            started[-1].send_signal(signals[len(started) - 1])
        return started[-1]

    monkeypatch.setattr(bounded, "start", noted)
    return started


def test_a_process_killed_from_outside_is_not_the_templates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    templates, started = TemplateProcesses(), starts(monkeypatch, signal.SIGKILL)
    assert templates.render("x", {}) == "x"
    assert len(started) == 2
    templates.close()


def test_a_process_killed_again_is_told_as_the_servers_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    templates, started = TemplateProcesses(), starts(monkeypatch, signal.SIGKILL, signal.SIGKILL)
    with pytest.raises(AdapterUnavailableError, match=r"was killed by SIGKILL .*twice") as raised:
        templates.render("x", {})
    assert raised.value.http_status == 503
    assert templates.render("x", {}) == "x"
    assert len(started) == 3
    templates.close()


@pytest.mark.parametrize("size", [1, 9_000_000], ids=["a small question", "more than a pipe holds"])
def test_a_stopped_process_does_not_hold_its_chats(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = TemplateProcesses(replace(template_process.WORK, answer_s=0.3))
    started = starts(monkeypatch, signal.SIGSTOP)
    with pytest.raises(AdapterUnavailableError, match=r"did not answer within 0\.3 s") as raised:
        templates.render("{{ text }}", {"text": size * "x"})
    assert raised.value.http_status == 503
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    templates.close()


def test_without_a_thread_the_request_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    templates = TemplateProcesses()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Timer, "start", no_thread)
        with pytest.raises(AdapterBusyError, match="can't start new thread"):
            templates.render("x", {})
    assert templates.render("x", {}) == "x"
    templates.close()


def test_processes_end_with_their_owner() -> None:
    templates = TemplateProcesses()
    assert templates.render("x", {}) == "x"
    running = [each._process for each in templates._processes._all if each._process is not None]
    assert len(running) == 1
    del templates
    assert running[0].returncode is not None


def test_an_open_chat_is_rendered_apart_too(place: Place) -> None:
    place.write("chat_template.jinja", "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")
    side = place.side()
    assert side.tokenizer is not None
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I th"}]
    text = side.tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user] hi [end][assistant] I th"


def test_sampling_defaults_stand_in_place_of_the_bases(place: Place) -> None:
    place.write(
        "generation_config.json",
        {"temperature": 0.5, "max_new_tokens": 7, "min_p": None, "eos_token_id": 3, "do_sample": 1},
    )
    side = place.side()
    assert side.defaults == {"temperature": 0.5, "max_tokens": 7}
    assert side.default_params() == SamplingParams(temperature=0.5, max_tokens=7)
    assert side.eos_token_ids == (*place.base.eos_token_ids, 3)
    assert side.tokenizer is place.base


def test_an_end_token_outside_of_the_vocabulary_does_not_reach_the_engine(place: Place) -> None:
    """It is told to mask its end tokens before `min_tokens`."""
    place.add("<sql>")
    place.write("tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<sql>"})
    place.write("generation_config.json", {"eos_token_id": [2**31 - 1, 3]})
    size = place.base.vocab_size
    assert place.texts.of(place.read()).eos_token_ids == (3,)
    assert place.texts.of(place.read(size + 1)).eos_token_ids == (size, 3)


def test_equal_sampling_defaults_bring_nothing(place: Place) -> None:
    place.write("generation_config.json", {"top_p": 0.9, "transformers_version": "9"})
    assert place.read() is None


def test_without_defaults_the_file_is_not_read(place: Place) -> None:
    place.write("generation_config.json", {"temperature": "hot"})
    place.texts = place.make_texts(has_defaults=False)
    assert place.read() is None


# ------------------------------------------------------------------------------------------- where the vocabulary ends


def test_a_request_is_checked_against_the_vocabulary_of_its_adapter(place: Place) -> None:
    place.add("<sql>", "<plan>")
    size = place.base.vocab_size
    side = place.texts.of(place.read(size + 1))
    inputs = InputProcessor(place.base, ModelLimits(size, 64), place.base.eos_token_ids)
    assert inputs.prepare("r", [size], SamplingParams(), text=side).prompt_token_ids == (size,)
    assert inputs.prepare("r", "<sql>", SamplingParams(), text=side).prompt_token_ids[-1] == size
    inputs.prepare("r", [5], SamplingParams(logit_bias={size: 1}, stop_token_ids=[size]), text=side)
    for params in (SamplingParams(logit_bias={size + 1: 1}), SamplingParams(stop_token_ids=[size + 1])):
        with pytest.raises(InvalidRequestError, match=rf"token id {size + 1} in .* not in the vocabulary, 0..{size}$"):
            inputs.prepare("r", [5], params, text=side)
    with pytest.raises(InvalidRequestError, match=rf"token id {size + 1} is not in the vocabulary, 0..{size}$"):
        inputs.prepare("r", "<plan>", SamplingParams(), text=side)
    for prompt, params in (([size], SamplingParams()), ([5], SamplingParams(logit_bias={size: 1}))):
        with pytest.raises(InvalidRequestError, match=f"token id {size} .*not in the vocabulary, 0..{size - 1}$"):
            inputs.prepare("r", prompt, params)


def test_tokens_without_a_row_are_told_of(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.add("<sql>")
    place.read()
    assert "adapter 'one' adds 1 tokens without a row in its embedding ('<sql>')" in caplog.text


# ------------------------------------------------------------------------------------------------------- JSON in pieces


def pieces(cursor: JsonCursor, depth: int) -> Any:
    """The whole document, by the cursor as far as `depth`."""
    start = cursor._peek()
    if depth and start == "{":
        return {key: pieces(cursor, depth - 1) for key in cursor.members()}
    if depth and start == "[":
        return [pieces(cursor, depth - 1) for _ in cursor.items()]
    return cursor.value()


def random_json(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(6 if depth else 4)
    if kind == 4:
        return [random_json(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 5:
        return {f'k{i},:[]"': random_json(chance, depth - 1) for i in range(chance.randrange(4))}
    return (None, chance.random(), chance.choice(('ä"]}', "plain", "\\\\", '\\"', "long" * 300)), chance.randrange(99))[
        kind
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_document_in_pieces_is_the_document(seed: int) -> None:
    chance = random.Random(seed)
    document = {"a": random_json(chance, 4), "b": random_json(chance, 4)}
    text = json.dumps(document, indent=chance.choice((None, 1)))
    assert pieces(JsonCursor(text, 10**6), chance.randrange(5)) == document
    passed = JsonCursor(text, 10**6)
    passed.pass_over()
    assert passed._at == len(text)
    for cut in range(0, len(text) - 1, 7):
        with pytest.raises(ValueError):  # noqa: PT011 (of json, or of the cursor)
            pieces(JsonCursor(text[:cut], 10**6), 4)
        with pytest.raises(ValueError):  # noqa: PT011
            JsonCursor(text[:cut], 10**6).pass_over()


# ------------------------------------------------------------------------------------------------------- hostile files

ODD = (
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "\ud83d",
    "x" * 3000,
    [],
    [[]],
    {},
    {"content": 1},
    {"id": 3, "content": "a"},
    [None],
)


def mutated(chance: random.Random, value: Any) -> Any:
    """The document with a few of its values replaced, repeated or gone."""
    if chance.random() < 0.02:
        return chance.choice(ODD)
    if isinstance(value, dict):
        kept = {key: mutated(chance, each) for key, each in value.items() if chance.random() > 0.01}
        return kept | ({str(chance.choice(ODD))[:50]: chance.choice(ODD)} if chance.random() < 0.05 else {})
    if isinstance(value, list):
        changed = [mutated(chance, each) for each in value if chance.random() > 0.01]
        return changed * 2 if chance.random() < 0.02 else changed
    return value


@pytest.mark.parametrize("seed", range(12))
def test_no_content_does_more_than_being_refused(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    place = Place(tmp_path, KINDS[seed % len(KINDS)])
    place.add("<sql>")
    tokenizer = json.loads((place.adapter_dir / "tokenizer.json").read_text("utf-8"))
    entries = tokenizer["added_tokens"]
    config = {"eos_token": "</s>", "pad_token": entries[-1], "extra_special_tokens": {"x": "<x>"}, "chat_template": "x"}
    config["added_tokens_decoder"] = {str(each["id"]): each for each in entries}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "special_tokens_map.json": {"additional_special_tokens": ["<y>"], "unk_token": entries[0]},
        "added_tokens.json": {each["content"]: each["id"] for each in entries},
        "generation_config.json": {"temperature": 1.0, "top_k": 5, "eos_token_id": [1, 2], "max_new_tokens": 9},
    }
    num_read = 0
    for _ in range(25):
        for name in files:
            (place.adapter_dir / name).unlink(missing_ok=True)
        for name in chance.sample(list(files), 2):
            text = json.dumps(mutated(chance, files[name]))
            cut = chance.randrange(len(text)) if chance.random() < 0.1 else len(text)
            place.write(name, text[:cut])
        try:
            side = place.texts.of(place.read())
        except AdapterError:
            continue
        num_read += 1
        assert side.tokenizer is not None
        before = place.base.encode(WORDS)
        side.tokenizer.decode(side.tokenizer.encode(WORDS), skip_special_tokens=False)
        assert place.base.encode(WORDS) == before
    assert num_read


def test_few_threads_read_tokenizer_files_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 loads at once each took the interpreter's lock from the server's event loop, which stood for a second."""
    place.add("<|new|>")
    running, most, own_tokens = [0], [0], place.texts._own_tokens

    def counted(*values: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        gate.wait(0.05)
        found = own_tokens(*values)
        running[0] -= 1
        return found

    gate = threading.Event()
    monkeypatch.setattr(place.texts, "_own_tokens", counted)

    def read(tenant: str) -> None:
        request_context.set(RequestContext("", tenant))
        place.read()

    threads = [threading.Thread(target=read, args=(tenant,)) for tenant in "abcdabcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [NUM_PARSING]


def test_what_waits_for_its_turn_keeps_no_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """31 of a client's 32 loads kept theirs, up to 2 GB, and parsed the small ones all at once."""
    place.add("<|new|>")
    place.write("tokenizer_config.json", {"extra_special_tokens": ["<sql>"]})
    was_read, read = list[str](), AdapterFolder.read

    def noted(folder: AdapterFolder, name: str, max_bytes: int) -> bytes:
        was_read.append(name)
        return read(folder, name, max_bytes)

    monkeypatch.setattr(AdapterFolder, "read", noted)
    threads = [threading.Thread(target=place.read) for _ in range(4)]
    turns = place.texts._turns
    with turns.of("a"), turns.of("b"):
        for thread in threads:
            thread.start()
        while len(turns._waiting) < len(threads):
            time.sleep(0.001)
        assert "tokenizer.json" not in was_read
        assert "tokenizer_config.json" not in was_read
    for thread in threads:
        thread.join()
    assert was_read.count("tokenizer.json") == len(threads)


def test_copies_of_the_bases_files_wait_for_no_turn(place: Place) -> None:
    turns = place.texts._turns
    with turns.of("a"), turns.of("b"):
        assert place.read() is None


def test_a_file_as_long_as_the_bases_is_no_copy(place: Place) -> None:
    place.write("tokenizer.json", "x" * (place.base_dir / "tokenizer.json").stat().st_size)
    assert "tokenizer.json is not JSON" in place.reasons()[0]


def test_sampling_defaults_are_a_short_file(place: Place) -> None:
    place.write("generation_config.json", {"x": "y" * 2**16})
    with pytest.raises(AdapterFileFormatError, match="at most 65536 are read"):
        place.read()


def test_a_long_parse_keeps_its_turn(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past 10 s it counted no more, and each of a flood of long files made all others longer."""
    place.add("<|new|>")
    own_tokens = place.texts._own_tokens

    def while_parsing(*values: Any) -> Any:
        with pytest.raises(TimeoutError), place.texts._turns.own(timeout_s=0.01):
            pass
        return own_tokens(*values)

    monkeypatch.setattr(fair_turns, "STUCK_S", 0.0)
    monkeypatch.setattr(place.texts, "_own_tokens", while_parsing)
    assert place.read() is not None
