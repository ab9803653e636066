// Prometheus' text: samples, rates of counters, quantiles of histograms.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n" };

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL))
    labels[name] = value.replace(/\\(.)/g, (_, char) => ESCAPES[char] ?? char);
  return labels;
}

/** One look at /metrics, taken at `time` (seconds). */
export class Look {
  constructor(text, time) {
    this.time = time;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (!match) continue;
      const sample = {
        labels: match[2] ? labelsOf(match[2]) : {},
        value: Number(match[3].replace("Inf", "Infinity")),
      };
      if (this.samples.has(match[1])) this.samples.get(match[1]).push(sample);
      else this.samples.set(match[1], [sample]);
    }
  }

  has(name) {
    return this.samples.has(name);
  }

  /** The sum over all label values; null when there is no such metric. */
  value(name) {
    const found = this.samples.get(name);
    return found ? found.reduce((sum, { value }) => sum + value, 0) : null;
  }

  /** Sums by the value of one label. */
  by(name, label) {
    const sums = new Map();
    for (const { labels, value } of this.samples.get(name) ?? [])
      sums.set(labels[label], (sums.get(labels[label]) ?? 0) + value);
    return sums;
  }

  /** The value of a label that all samples of a metric have. */
  label(name, label) {
    return this.samples.get(name)?.[0]?.labels[label];
  }
}

/** Of a counter, a second, since `before`; null at the first look and after a restart. */
export function rate(now, before, name) {
  const [value, old] = [now.value(name), before?.value(name)];
  const passed = now.time - (before?.time ?? now.time);
  return value == null || old == null || passed <= 0 || value < old ? null : (value - old) / passed;
}

/** A quantile of what a histogram counted since `before`, as histogram_quantile has it; null when that is nothing. */
export function quantile(now, before, name, share) {
  const old = before?.by(`${name}_bucket`, "le") ?? new Map();
  const buckets = [...now.by(`${name}_bucket`, "le")]
    .map(([bound, sum]) => [Number(bound.replace("Inf", "Infinity")), sum - (old.get(bound) ?? 0)])
    .sort(([a], [b]) => a - b);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!before || total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, upTo] of buckets) {
    if (upTo >= share * total) {
      return bound === Infinity
        ? low
        : low + ((bound - low) * (share * total - below)) / Math.max(1e-9, upTo - below);
    }
    [low, below] = [bound, upTo];
  }
  return low;
}
