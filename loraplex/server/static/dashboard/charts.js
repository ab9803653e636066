// uPlot in the page's colours, with a legend that is text.

import { make, setText } from "./dom.js";
import { clock, NONE } from "./format.js";

const HEIGHT = 150;
const charts = new Set();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Lines over time in `parent`: `lines` are {label, color}; `show` words a value; `most`: a fixed upper end. */
export class Chart {
  constructor(parent, title, lines, show, most = null) {
    this.lines = lines;
    this.show = show;
    this.values = lines.map(() => make("span", { class: "legend-value" }));
    const legend = make(
      "ul",
      { class: "legend" },
      ...lines.map((line, index) => {
        const swatch = make("span", { class: "swatch" });
        swatch.style.background = `var(--${line.color})`;
        return make("li", {}, swatch, `${line.label} `, this.values[index]);
      }),
    );
    this.time = make("span", { class: "muted" });
    this.place = make("div", { class: "plot", "aria-hidden": "true" });
    parent.append(
      make(
        "figure",
        { class: "chart" },
        make("figcaption", {}, make("h3", { text: title }), this.time, legend),
        this.place,
      ),
    );
    this.data = [[], ...lines.map(() => [])];
    this.plot = new globalThis.uPlot(this.options(most), this.data, this.place);
    new ResizeObserver(() => this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT })).observe(
      this.place,
    );
    charts.add(this);
  }

  options(most) {
    const axis = {
      stroke: () => color("muted"),
      grid: { stroke: () => color("line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    return {
      width: Math.max(50, this.place.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 8, 0, 0],
      cursor: { sync: { key: "loraplex" }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
      scales: { y: { range: (_, low, high) => [0, most ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 24, space: 80, values: (_, times) => times.map((time) => clock(time).slice(0, 5)) },
        { ...axis, size: 58, space: 36, values: (_, values) => values.map((value) => this.show(value)) },
      ],
      series: [
        {},
        ...this.lines.map((line) => ({
          stroke: () => color(line.color),
          width: 1.5,
          points: { show: false },
          fill: line.fill ? () => color(`${line.color}-fill`) : undefined,
        })),
      ],
      hooks: { setCursor: [() => this.label()] },
    };
  }

  /** `data`: times and the values of each line; `range`: [first, last] time. */
  draw(data, range) {
    this.data = data;
    this.plot.batch(() => {
      this.plot.setData(data, false);
      this.plot.setScale("x", { min: range[0], max: range[1] });
    });
    this.label();
  }

  label() {
    const index = this.plot?.cursor.idx ?? this.data[0].length - 1;
    this.lines.forEach((_, line) => {
      const value = this.data[line + 1][index];
      setText(this.values[line], value == null ? NONE : this.show(value));
    });
    setText(this.time, this.plot?.cursor.idx == null ? "" : clock(this.data[0][index]));
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  charts.forEach((chart) => chart.plot.redraw(false)),
);

/** Chunks of the arena as a strip, in the order of addresses. `runs`: {owner, chunks}. */
export function drawStrip(canvas, runs, colors) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth * scale, 18 * scale];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d");
  const total = runs.reduce((sum, run) => sum + run.chunks, 0) || 1;
  const found = Object.fromEntries(Object.entries(colors).map(([owner, name]) => [owner, color(name)]));
  let start = 0;
  pen.clearRect(0, 0, width, height);
  for (const run of runs) {
    pen.fillStyle = found[run.owner] ?? color("line");
    pen.fillRect((start / total) * width, 0, (run.chunks / total) * width, height);
    start += run.chunks;
  }
}
