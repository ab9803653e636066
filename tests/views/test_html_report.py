"""The HTML report: one whole page, every name escaped, and what it says of an empty profile."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from loraplex.metrics import ChunkRun, KernelSpeedup, MemoryReport, TierReport
from loraplex.performance.histogram import Quantiles
from loraplex.performance.report import (
    AdapterPerformance,
    Finding,
    LoraPerformanceReport,
    MixPerformance,
    SwitchCost,
)
from loraplex.performance.steps import Timeline
from loraplex.views.charts import Bar, bars, line, shortened, strip
from loraplex.views.html_report import STYLE, html_report

EVIL = '</title><script>alert("x")</script> & \' name'
TIMES = Quantiles(10, 0.1, 0.1, 0.2, 0.3, 0.4)
FULL = LoraPerformanceReport(
    begun_time=1.7e9,
    seconds=10.0,
    backend="native",
    backend_description=EVIL,
    requests=AdapterPerformance("(all)", 10, 9, 1, 100, TIMES, TIMES, TIMES),
    adapters=(
        AdapterPerformance(EVIL, 6, 6, 0, 60, TIMES, TIMES, TIMES, 1.0, 1.0, 1.0, EVIL, 2048, 8),
        AdapterPerformance(None, 4, 3, 1, 40, TIMES, TIMES, TIMES),
    ),
    num_adapters=1,
    admitted={"nothing": 5, EVIL: 4},
    served_from={"device": 3},
    loads={EVIL: 2},
    evictions={EVIL: 1},
    switch_cost=SwitchCost(TIMES, 4, 2, 0.01, TIMES),
    memory=MemoryReport(
        tiers=(TierReport(EVIL, 5, 10, 2, 0.5),),
        chunk_bytes=1 << 20,
        chunks=(ChunkRun("kv", 2), ChunkRun(EVIL, 3), ChunkRun("free", 4)),
    ),
    num_steps=50,
    part_seconds={"build": 0.5, "forward": 4.0},
    operator_seconds={"gemm": 3.0, "lora": 0.5},
    mixes=(MixPerformance(0, 5, 2.0, 100.0, TIMES), MixPerformance(4, 5, 6.0, 90.0, TIMES, 0.2, 1.25)),
    kernel_fallbacks={EVIL: 7},
    kernel_speedups=(KernelSpeedup("linear", "native", "torch", EVIL, 2e-5, 5e-5),),
    timeline=Timeline(0.5, [10, 20, 15]),
    findings=(Finding("service", "warning", EVIL, EVIL), Finding("kernels", "info", "Kernels: native.")),
)
VOID = {"meta", "rect", "line", "polyline"}


class Page(HTMLParser):
    """Checks that elements nest; keeps tags, texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_and_nothing_in_it_is_taken_for_html() -> None:
    text = html_report(FULL, EVIL)
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("title") >= 2
    assert f"LoRA profile of {EVIL}" in page.texts
    assert EVIL in page.texts
    assert page.tags.count("svg") >= 8
    assert not re.search(r"(src|href)=|url\(|@import", text), "the page needs nothing else"


def test_findings_are_at_the_top() -> None:
    text = html_report(FULL, "x")
    assert text.index("Findings") < text.index("Requests") < text.index("Memory")
    assert '<li class="warning">' in text


@pytest.mark.parametrize(
    "heading", ["Latency by adapter", "Adapters mixed in a step", "Where the time of a step goes", "Kernels"]
)
def test_every_section_has_something_in_it(heading: str) -> None:
    section = html_report(FULL, "x").split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
    assert "<svg" in section


def test_what_the_tables_say() -> None:
    texts = Page(html_report(FULL, "x")).texts
    for cell in ("4 to 7", "1.25 x", "20.0 %", "(base model)", "2.0 KiB", "100 ms"):
        assert cell in texts
    assert any("10 requests began, 9 finished, 1 failed; 10.0 tokens/s" in text for text in texts)


def test_kernels_are_beside_their_fallbacks() -> None:
    texts = Page(html_report(FULL, "x")).texts
    for cell in ("against torch", "2.50 x", "20.0 us", "50.0 us", EVIL):
        assert cell in texts


def test_a_devices_time_that_was_not_measured_is_said() -> None:
    assert "The device computed 0.0 % of the time, in 50 steps." in "".join(Page(html_report(FULL, "x")).texts)
    page = Page(html_report(replace(FULL, device_share=None), "x"))
    assert "The device's time was not measured, in 50 steps." in "".join(page.texts)


def test_a_profile_of_nothing_is_a_page_too() -> None:
    empty = LoraPerformanceReport(0.0, 0.0, "torch", "")
    page = Page(html_report(empty, "x"))
    assert "Nothing was recorded." in page.texts
    assert "Mode normal" in "".join(page.texts)


def test_long_tables_say_that_there_is_more() -> None:
    many = tuple(AdapterPerformance(f"a{index}", 1, 1) for index in range(130))
    page = Page(html_report(replace(FULL, adapters=many), "x"))
    assert "30 more are in the JSON." in page.texts


def test_charts() -> None:
    assert bars([], "x") == line([1.0], "1 s", "x") == strip([], "x") == ""
    Page(bars([Bar("zero", 0.0, "0")], "zeros"))
    Page(line([0.0, 0.0], "1 s", "zeros"))
    drawn = bars([Bar("half", 1.0, "1"), Bar("whole", 2.0, "2")], "two")
    half, whole = (float(width) for width in re.findall(r'<rect [^>]*? width="([\d.]+)"', drawn))
    assert whole == pytest.approx(2 * half)
    widths = [
        float(width) for width in re.findall(r'width="([\d.]+)" height="24"', strip([("kv", 1), ("free", 3)], "x"))
    ]
    assert widths[-1] == pytest.approx(3 * widths[-2])
    assert len(shortened("x" * 99)) == 28


def test_long_times_and_names_leave_room_for_the_other_columns() -> None:
    """The table of adapters fits a page of 1,200 pixels; a narrower one scrolls it beside the names."""
    slow = Quantiles(10, 12.3456, 12.3456, 23.4, 45.6, 4000.0)
    name = "tenant/" + "long-name-" * 10
    adapters = (AdapterPerformance(name, 123456, 123456, 0, 1234567, slow, slow, slow, 1.0, 1.0, 1.0, "device", 1, 8),)
    text = html_report(replace(FULL, adapters=adapters), "x")
    texts = Page(text).texts
    assert {"12.3 s", "23.4 s", "45.6 s"} <= set(texts)
    assert f'<td title="{name}">{name}</td>' in text
    assert "position: sticky" in STYLE
    assert "overflow-x: auto" in STYLE
