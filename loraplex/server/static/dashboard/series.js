// What was seen while the page was open: an hour of every look, a day of minutes.

const FINE = 1800;
const COARSE = 1440;
const COARSE_S = 60;

/** Points of a time (seconds) and one value, or null, for each of `width` lines. */
export class Series {
  constructor(width) {
    this.width = width;
    this.fine = [];
    this.coarse = [];
    this.minute = [];
  }

  add(time, values) {
    this.fine.push([time, ...values]);
    if (this.fine.length > FINE) this.fine.shift();
    if (this.minute.length && Math.floor(time / COARSE_S) !== Math.floor(this.minute[0][0] / COARSE_S)) {
      this.coarse.push(this.mean());
      if (this.coarse.length > COARSE) this.coarse.shift();
      this.minute = [];
    }
    this.minute.push([time, ...values]);
  }

  mean() {
    const columns = Array.from({ length: this.width + 1 }, (_, column) =>
      this.minute.map((point) => point[column]).filter((value) => value != null),
    );
    return columns.map((values) =>
      values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null,
    );
  }

  /** Times, and the values of each line, from `since` on. */
  columns(since) {
    const start = this.fine[0]?.[0] ?? Infinity;
    const points = [...this.coarse.filter(([time]) => time < start), ...this.fine].filter(([time]) => time >= since);
    return Array.from({ length: this.width + 1 }, (_, column) => points.map((point) => point[column]));
  }
}
