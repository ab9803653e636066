// Numbers, sizes and times in words.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const NONE = "–";

const digits = (value) =>
  value >= 100 || Number.isInteger(value) ? whole.format(value) : value.toPrecision(value < 1 ? 2 : 3);

export function number(value) {
  if (value == null || Number.isNaN(value)) return NONE;
  return Math.abs(value) >= 10000 ? compact.format(value) : digits(value);
}

export const count = (value) => (value == null ? NONE : whole.format(value));

export function bytes(value) {
  if (value == null) return NONE;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? digits(value) : whole.format(value)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value == null || Number.isNaN(value)) return NONE;
  if (value < 1) return `${digits(value * 1000)} ms`;
  if (value < 120) return `${digits(value)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return value < 172800 ? `${whole.format(value / 3600)} h` : `${whole.format(value / 86400)} d`;
}

export const percent = (value) =>
  value == null || Number.isNaN(value) ? NONE : `${digits(Math.round(value * 1000) / 10)} %`;

/** How long ago a Unix time was; 0: never. */
export function ago(time) {
  if (!time) return "never";
  const passed = Date.now() / 1000 - time;
  return passed < 2 ? "now" : `${seconds(Math.round(passed))} ago`;
}

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

export const moment = (time) => (time ? new Date(time * 1000).toLocaleString("en-GB") : "never");
