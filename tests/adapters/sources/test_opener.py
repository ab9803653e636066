"""From a path to an adapter that can be registered."""

from __future__ import annotations

import gc
from pathlib import Path

from loraplex.adapter_store import AdapterContent, LongContext
from loraplex.adapters.registry import AdapterText
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.sources.opener import AdapterOpener
from loraplex.processes.fair_turns import working_for


def test_names_of_one_text_share_it(tmp_path: Path) -> None:
    """Each of 400 names of one directory kept a megabyte of its own."""
    opener = AdapterOpener(
        AdapterSource(),
        lambda path, name, tenant, roots: AdapterContent(name, 10, 8),
        lambda folder, vocab_size: AdapterText.of({"chat_templates": {"default": "x" * 1000}}),
    )
    texts = [opener.open(str(tmp_path)).text for _ in range(3)]
    assert texts[0] is not None
    assert all(text is texts[0] for text in texts)
    del texts
    gc.collect()
    assert not opener._texts, "it goes with the last name"


def test_an_engine_is_told_for_which_tenant_it_reads(tmp_path: Path) -> None:
    """And takes its turns in those of that tenant."""
    seen: list[str] = []

    def read(path: str, name: str, tenant: str, roots: tuple[str, ...]) -> AdapterContent:
        seen.append(tenant)
        return AdapterContent(name, 10, 8)

    opener = AdapterOpener(AdapterSource(), read)
    opener.open(str(tmp_path))
    with working_for("acme"):
        opener.open(str(tmp_path))
    assert seen == ["", "acme"]


def test_a_longer_context_and_tokens_that_activate_are_of_the_text(tmp_path: Path) -> None:
    content = AdapterContent("0", 10, 8, 110, (5, 6), LongContext(2.0, 4096))
    text = AdapterOpener(AdapterSource(), lambda path, name, tenant, roots: content).open(str(tmp_path)).text
    assert text is not None
    assert (text.invocation_tokens, text.rope_factor, text.max_model_len) == ((5, 6), 2.0, 4096)
    assert text.brings == ("invocation_tokens",)
    assert text.document["vocab_size"] == 110
    assert AdapterText.of(text.document) == text
