// Requests, tokens and times, from /metrics.

import { Chart } from "./charts.js";
import { byId, keepChildren, make, setText, showBars } from "./dom.js";
import * as format from "./format.js";
import { Look, quantile, rate } from "./metrics.js";
import { Series } from "./series.js";

const FIRST = "vllm:time_to_first_token_seconds";
const BETWEEN = "vllm:inter_token_latency_seconds";
const QUANTILE_S = 10;
const CAUSES = {
  seat: "a place in the batch, or KV memory",
  load: "their adapter to be loaded",
  room: "room for their adapter on the device",
};
const TIERS = {
  device: ["the device", "c3"],
  host: ["host memory", "c1"],
  compressed: ["host memory, compressed", "c4"],
  disk: ["the disk tier", "c2"],
  source: ["their source", "red"],
};
const CHARTS = [
  [
    "Tokens a second",
    [
      { label: "generated", color: "c1" },
      { label: "of prompts", color: "c2" },
    ],
    format.number,
  ],
  [
    "Requests",
    [
      { label: "running", color: "c3" },
      { label: "waiting", color: "c2" },
    ],
    format.number,
  ],
  [
    "Time to first token",
    [
      { label: "p50", color: "c1" },
      { label: "p95", color: "c4" },
    ],
    format.seconds,
  ],
  [
    "Time between tokens",
    [
      { label: "p50", color: "c1" },
      { label: "p95", color: "c4" },
    ],
    format.seconds,
  ],
];

export class TrafficView {
  constructor() {
    this.looks = [];
    this.charts = CHARTS.map(([title, lines, show]) => new Chart(byId("traffic-charts"), title, lines, show));
    this.series = CHARTS.map(() => new Series(2));
  }

  /** One page of /metrics, seen at `time` (seconds). */
  add(text, time) {
    const look = new Look(text, time);
    const before = this.looks.at(-1);
    this.looks = [...this.looks.filter((each) => each.time >= time - QUANTILE_S), look];
    const oldest = before && this.looks[0] === look ? before : this.looks[0];
    const times = (name) => [0.5, 0.95].map((share) => quantile(look, oldest === look ? null : oldest, name, share));
    const points = [
      ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"].map((name) => rate(look, before, name)),
      ["vllm:num_requests_running", "vllm:num_requests_waiting"].map((name) => look.value(name)),
      times(FIRST),
      times(BETWEEN),
    ];
    points.forEach((values, index) => this.series[index].add(time, values));
    this.showTiles(look, before, points);
    this.showCauses(look);
    return look;
  }

  draw(range) {
    this.charts.forEach((chart, index) => chart.draw(this.series[index].columns(range[0]), range));
  }

  showTiles(look, before, [tokens, requests, first, between]) {
    const pair = (values) => values.map(format.seconds).join(" · ");
    const ended = rate(look, before, "vllm:request_success_total");
    const tiles = [
      ["Running", format.count(requests[0])],
      ["Waiting", format.count(requests[1])],
      ["Tokens/s", format.number(tokens[0])],
      ["Requests/s", format.number(ended)],
      ["First token, p50 · p95", pair(first)],
      ["Between tokens, p50 · p95", pair(between)],
      ["KV cache", format.percent(look.value("vllm:kv_cache_usage_perc"))],
      ["Adapters", format.count(look.value("loraplex:adapters"))],
    ];
    keepChildren(
      byId("tiles"),
      tiles,
      ([label]) => label,
      ([label]) =>
        make("div", { class: label.includes("p50") ? "wide" : "" }, make("dt", { text: label }), make("dd")),
      (tile, [, value]) => setText(tile.lastElementChild, value),
    );
  }

  showCauses(look) {
    const waiting = [...look.by("loraplex:requests_waiting_by_cause", "cause")].filter(([, value]) => value > 0);
    const all = waiting.reduce((sum, [, value]) => sum + value, 0) || 1;
    showBars(
      byId("waiting"),
      waiting.map(([cause, value]) => ({
        label: `for ${CAUSES[cause] ?? cause}`,
        share: value / all,
        text: format.count(value),
        color: "c2",
      })),
      "No request waits.",
    );
    const evictions = [...look.by("loraplex:adapter_evictions_total", "cause")]
      .filter(([, value]) => value > 0)
      .sort(([, a], [, b]) => b - a);
    const most = evictions[0]?.[1] || 1;
    showBars(
      byId("evictions"),
      evictions.slice(0, 8).map(([cause, value]) => ({
        label: cause.replace("_", ": ").replaceAll("_", " "),
        share: value / most,
        text: format.count(value),
        color: "c4",
      })),
      "None since the engine started.",
    );
  }

  /** `found`: of /v1/memory, requests by the tier that had their adapter, since the engine started. */
  showFound(found) {
    const tiers = Object.entries(TIERS).filter(([tier]) => found[tier]);
    const all = tiers.reduce((sum, [tier]) => sum + found[tier], 0) || 1;
    showBars(
      byId("found"),
      tiers.map(([tier, [label, color]]) => ({
        label,
        share: found[tier] / all,
        text: `${format.percent(found[tier] / all)} · ${format.number(found[tier])}`,
        color,
      })),
      "No request had an adapter yet.",
    );
  }
}
