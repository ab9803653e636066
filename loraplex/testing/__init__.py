"""Test doubles for programs that use Loraplex, as httpx has its MockTransport: an engine without weights.

    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    app = create_app(engine)                       # the whole HTTP surface, answered at once

The "model" answers `[NAME] PROMPT` and ends: NAME is the adapter's name or `base`, PROMPT the prompt's text. One token
is one byte. Adapters, names and references are the real `LoRARegistry`'s. `hold`, `fail_next` and `die` bring about
what is hard to bring about with a real engine; `requests` and `aborted` say what reached it.
"""

from __future__ import annotations

from loraplex.testing.fake_adapter_store import FakeAdapterStore
from loraplex.testing.fake_completion import fake_logprobs
from loraplex.testing.fake_engine import FakeAsyncEngine, FakeHealth, FakeModelInfo, FakeRequest, FakeText
from loraplex.testing.fake_tokenizer import FakeTokenizer

__all__ = [
    "FakeAdapterStore",
    "FakeAsyncEngine",
    "FakeHealth",
    "FakeModelInfo",
    "FakeRequest",
    "FakeText",
    "FakeTokenizer",
    "fake_logprobs",
]
