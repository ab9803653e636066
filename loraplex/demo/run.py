"""The demo: one base model, eleven adapters, one mixed batch, answers that anyone can check."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from loraplex.core import LoRARequest, RequestOutput, SamplingParams
from loraplex.demo.tasks import ADAPTERS, Task, adapter_path, assets_path, prompt_of, word_phrases
from loraplex.frontend.llm import LLM

MAX_TOKENS = 64
PLAIN_WIDTH = 132  # of a pipe or file, so that no cell is folded


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the batch. `task` None asks the base model, which copies the phrase."""

    task: Task | None
    phrase: str

    @property
    def adapter_name(self) -> str:
        return "(base)" if self.task is None else self.task.name

    @property
    def expected(self) -> str:
        return self.phrase if self.task is None else self.task.apply(self.phrase)


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    text: str
    num_tokens: int
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.text == self.question.expected


def base_path() -> str:
    return str(assets_path() / "base")


def questions(each: int, seed: int) -> list[Question]:
    """`each` held-out phrases of two words for the base and every adapter; neighbours never share an adapter."""
    models: list[Task | None] = [None, *ADAPTERS]
    drawn = word_phrases(each * len(models), seed)
    return [Question(task, phrase) for task, phrase in zip(models * each, drawn, strict=True)]


def ask(llm: LLM, asked: Sequence[Question]) -> list[Answer]:
    """All questions in one call: one continuous batch over all adapters and the base."""
    numbers = {task.name: number for number, task in enumerate(ADAPTERS, 1)}
    requests = [
        None if q.task is None else LoRARequest(q.task.name, numbers[q.task.name], str(adapter_path(q.task.name)))
        for q in asked
    ]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate([prompt_of(q.phrase) for q in asked], params, lora_request=requests)
    return [
        Answer(q, output.outputs[0].text, len(output.outputs[0].token_ids), _seconds(output))
        for q, output in zip(asked, outputs, strict=True)
    ]


def _seconds(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.finished_time is not None  # noqa: PT018
    return metrics.finished_time - metrics.arrival_time


def show(console: Console, answers: Sequence[Answer]) -> None:
    table = Table(title="One base model, one batch, the answers of twelve models", title_justify="left")
    for heading in ("prompt", "adapter", "answer", "expected"):
        table.add_column(heading, overflow="fold")
    table.add_column("verdict", justify="center")
    table.add_column("tokens/s", justify="right")
    for answer in answers:
        verdict = "[green]right[/]" if answer.is_right else "[bold red]WRONG[/]"
        question = answer.question
        cells = (prompt_of(question.phrase), question.adapter_name, answer.text, question.expected)
        table.add_row(
            *(cell.replace("[", r"\[") for cell in cells), verdict, f"{answer.num_tokens / answer.seconds:.0f}"
        )
    console.print(table)


def run_demo(each: int = 2, seed: int = 0, device: str = "auto") -> int:
    """Print the table; 0 when every answer is right, 1 otherwise."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for task in ADAPTERS:
        console.print(f"  [bold]{task.name:12}[/] {task.description}")
    began = time.perf_counter()
    with LLM(base_path(), device=device) as llm:
        loaded = time.perf_counter()
        asked = questions(each, seed)
        ask(llm, asked[: len(ADAPTERS) + 1])  # loads the adapters, so that the figures below are of serving
        started = time.perf_counter()
        answers = ask(llm, asked)
        seconds = time.perf_counter() - started
    show(console, answers)
    num_right = sum(answer.is_right for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    console.print(
        f"{num_right} of {len(answers)} right; {num_tokens} tokens in {seconds:.2f} s = {num_tokens / seconds:.0f} "
        f"tokens/s over {len(ADAPTERS)} adapters and the base in one batch (model loaded in {loaded - began:.1f} s)"
    )
    return 0 if num_right == len(answers) else 1
