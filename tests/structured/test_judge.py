"""A form is judged in a process of its own, as the engine's compiler would judge it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loraplex import StructuredOutputsParams
from loraplex.errors import InvalidRequestError
from loraplex.processes import bounded
from loraplex.structured import judge as judge_module
from loraplex.structured.grammars import GrammarCompiler
from loraplex.structured.judge import MAX_GROWTH_BYTES, ByteTokens, FormJudge


@pytest.fixture(scope="module")
def judge() -> Iterator[FormJudge]:
    judge = FormJudge()
    yield judge
    judge.close()


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """That reach a process."""
    asked, ask = [], bounded.BoundedProcesses.ask

    def noted(processes: bounded.BoundedProcesses, question: Any) -> bytes | None:
        asked.append(question)
        return ask(processes, question)

    monkeypatch.setattr(bounded.BoundedProcesses, "ask", noted)
    return asked


FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    "calls": {"calls": {"f": {"type": "object"}}, "is_one_call": True, "disable_any_whitespace": True},
    "object": {"json_object": True},
    "choice": {"choice": ["yes", "no"]},
    "regex": {"regex": "[a-z]{1,40}"},
    "grammar": {"grammar": 'start: "a" | "b"'},
    "unknown keyword": {"json": {"x-guidance": {}}},
    "no text fits": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "bad regex": {"regex": "(a"},
    "bad grammar": {"grammar": "start: missing"},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_verdict_is_the_compilers(form: dict[str, Any], judge: FormJudge) -> None:
    params = StructuredOutputsParams(**form)
    assert StructuredOutputsParams(**params.said) == params
    compiler = GrammarCompiler(ByteTokens, ByteTokens.vocab_size)
    reasons: list[str | None] = []
    for check in (compiler.check, judge.check, judge.check):
        try:
            check(params)
            reasons.append(None)
        except InvalidRequestError as error:
            reasons.append(f"{error.param}: {error.message}")
    compiler.close()
    assert len(set(reasons)) == 1
    assert (reasons[0] is None) == (list(FORMS.values()).index(form) < 6)


def test_equal_forms_are_judged_once_and_verdicts_are_bounded(
    questions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = FormJudge()
    monkeypatch.setattr(judge_module, "MAX_VERDICTS", 2)
    for _ in range(2):
        for text in ("one", "two"):
            judge.check(StructuredOutputsParams(choice=[text]))
    assert len(questions) == 2
    for text in ("three", "one"):
        judge.check(StructuredOutputsParams(choice=[text]))
    assert len(questions) == 4
    assert len(judge._verdicts) == 2
    judge.close()


def test_a_client_learns_nothing_of_what_others_asked_for(questions: list[Any]) -> None:
    """A verdict of another client's was there at once: 12 ms for a form that it had asked for, 19 for one that not."""
    judge, form = FormJudge(), StructuredOutputsParams(choice=["a secret of acme"])
    judge.check(form, "acme")
    assert judge.check_known(form, "acme")
    assert not judge.check_known(form, "beta")
    judge.check(form, "beta")
    assert len(questions) == 2
    judge.close()


def test_a_client_that_asks_for_many_pushes_out_its_own(questions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.structured.judge.MAX_VERDICTS", 4)
    judge, form = FormJudge(), StructuredOutputsParams(choice=["of beta"])
    judge.check(form, "beta")
    for number in range(8):
        judge.check(StructuredOutputsParams(choice=[f"of acme {number}"]), "acme")
    assert judge.check_known(form, "beta")
    assert len(judge._verdicts) == 4
    judge.close()


def test_a_known_verdict_is_told_at_once(questions: list[Any]) -> None:
    """Two clients' costly forms kept both processes, and a third one's known form waited for them."""
    judge, good, bad = FormJudge(), StructuredOutputsParams(choice=["x"]), StructuredOutputsParams(regex="(a")
    assert not judge.check_known(good)
    assert not judge.check_known(bad)
    assert not questions
    judge.check(good)
    with pytest.raises(InvalidRequestError):
        judge.check(bad)
    assert judge.check_known(good)
    with pytest.raises(InvalidRequestError):
        judge.check_known(bad)
    assert len(questions) == 2
    judge.close()


def test_what_takes_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 KB of a regular expression took 530 MB; nothing within today's bounds is known to take 32 MiB."""
    sizes = iter([2**20, 2**20 + MAX_GROWTH_BYTES, 2**20, 2**20 + 2 * MAX_GROWTH_BYTES])
    monkeypatch.setattr(judge_module, "_resident_bytes", lambda: next(sizes))
    assert judge_module.judge(StructuredOutputsParams(regex="a").said) == ""
    with pytest.raises(InvalidRequestError, match="it takes 64 MiB of memory, and at most 32 are given"):
        judge_module.judge(StructuredOutputsParams(regex="b").said)


def test_what_ends_the_compiler_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least number of 64 bits recursed without an end; it is refused before, so here something else ends it."""
    judge = FormJudge()
    judge.check(StructuredOutputsParams(choice=["x"]))
    monkeypatch.setattr(StructuredOutputsParams, "said", {"no field": 1})
    with pytest.raises(InvalidRequestError, match="or ends the compiler"):
        judge.check(StructuredOutputsParams(choice=["y"]))
    monkeypatch.undo()
    judge.check(StructuredOutputsParams(choice=["z"]))
    judge.close()
