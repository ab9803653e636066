// Tiers, the arena, runners.

import { Chart, drawStrip } from "./charts.js";
import { byId, keepChildren, make, setCells, setShown, setText, showBars } from "./dom.js";
import * as format from "./format.js";

const OWNERS = { kv: "c1", adapters: "c3", free: "line", fenced: "red" };
const OWNER_NAMES = { kv: "KV cache", adapters: "adapters", free: "free", fenced: "fenced (damaged)" };
const TIER_COLORS = { device: "c3", host: "c1", compressed: "c4", disk: "c2", merged: "c4" };
const LINES = [
  { label: "device", color: "c3" },
  { label: "host", color: "c1" },
  { label: "disk", color: "c2" },
  { label: "KV", color: "c4" },
];

export class MemoryView {
  constructor() {
    this.chart = new Chart(byId("memory-chart"), "Used share of each tier", LINES, format.percent, 1);
    this.report = null;
    new ResizeObserver(() => this.report && drawStrip(byId("arena"), this.report.chunks, OWNERS)).observe(
      byId("arena"),
    );
  }

  /** `report`: an answer of /v1/memory. */
  show(report) {
    this.report = report;
    drawStrip(byId("arena"), report.chunks, OWNERS);
    const owners = Object.entries(report.chunks_by_owner);
    keepChildren(
      byId("arena-legend"),
      owners,
      ([owner]) => owner,
      ([owner]) => {
        const swatch = make("span", { class: "swatch" });
        swatch.style.background = `var(--${OWNERS[owner] ?? "line"})`;
        return make("li", {}, swatch, `${OWNER_NAMES[owner] ?? owner} `, make("span", { class: "legend-value" }));
      },
      (item, [, chunks]) => setText(item.lastElementChild, format.bytes(chunks * report.chunk_bytes)),
    );
    const tiers = report.tiers.map((tier) => ({
      label: `${tier.tier}: ${format.count(tier.adapters)} adapters`,
      share: tier.max_bytes ? tier.used_bytes / tier.max_bytes : 0,
      text:
        `${format.bytes(tier.used_bytes)} of ${format.bytes(tier.max_bytes)}` +
        ` · pressure ${format.percent(tier.pressure)}`,
      color: TIER_COLORS[tier.tier],
    }));
    tiers.push({
      label: "KV cache",
      share: report.kv.max_bytes ? report.kv.used_bytes / report.kv.max_bytes : 0,
      text: `${format.bytes(report.kv.used_bytes)} of ${format.bytes(report.kv.max_bytes)}`,
      color: "c4",
    });
    showBars(byId("tiers"), tiers, "no tiers");
    this.showRunners(report.runners ?? []);
  }

  /** The chart has what the server remembers, so it is full at once. */
  draw(range) {
    if (!this.report) return;
    const history = this.report.history.filter(({ time }) => time >= range[0]);
    const most = Object.fromEntries(this.report.tiers.map((tier) => [tier.tier, tier.max_bytes]));
    most.kv = this.report.kv.max_bytes;
    const used = (tier) =>
      history.map((sample) => (most[tier] ? (sample.used_bytes[tier] ?? null) / most[tier] : null));
    this.chart.draw([history.map(({ time }) => time), ...["device", "host", "disk", "kv"].map(used)], range);
  }

  showRunners(runners) {
    setShown(byId("runners-panel"), runners.length > 0);
    keepChildren(
      byId("runners"),
      runners,
      (runner) => runner.runner,
      () => make("tr"),
      (row, runner) => {
        const device = runner.tiers?.find((tier) => tier.tier === "device");
        setCells(row, [
          [runner.runner],
          [runner.device],
          [runner.message || (runner.mode === "low_memory" ? "low memory" : "serves"), runner.message ? "bad" : ""],
          [format.count(runner.running), "number"],
          [format.count(runner.waiting), "number"],
          [runner.kv ? format.percent(runner.kv.used_bytes / (runner.kv.max_bytes || 1)) : format.NONE, "number"],
          [device ? `${format.count(device.adapters)} · ${format.bytes(device.used_bytes)}` : format.NONE, "number"],
        ]);
      },
    );
  }
}
