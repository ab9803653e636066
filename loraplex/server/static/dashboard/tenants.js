// Tenants with their limits, shares and what they used today; for a tenant's key, its own adapters.

import { ask, withQuery } from "./api.js";
import { byId, keepChildren, make, setCells, setText } from "./dom.js";
import * as format from "./format.js";

const MOST_ROWS = 100;
const PAGE = 10000;
const NAMES = {
  adapters: "adapters",
  adapter_bytes: "of adapters",
  host_bytes: "in the host's memory",
  device_bytes: "on the device",
  pins: "pins",
  requests_per_s: "requests/s",
  tokens_per_minute: "tokens/min",
  concurrency: "at a time",
  max_context: "tokens of context",
  connections: "connections",
};
const USED = ["requests", "prompt_tokens", "generated_tokens", "errors", "waiting_s"];
const USAGE_COLUMNS = ["Requests", "Prompt tokens", "Generated tokens", "Errors", "Waited"];

const limitOf = ([name, value]) => {
  const amount = name.endsWith("_bytes") ? format.bytes(value) : format.number(value);
  return `${amount} ${NAMES[name] ?? name.replaceAll("_", " ")}`;
};

const limitsOf = (quota) => Object.entries(quota).map(limitOf).join(", ");

/** Sums of today's rows by one field; the pages are bounded, and so is what is asked for. */
async function usageToday(field) {
  const today = new Date().toISOString().slice(0, 10);
  const sums = new Map();
  const page = await ask(withQuery("/v1/usage", { first_day: today, limit: PAGE }));
  for (const row of page.data) {
    const sum = sums.get(row[field]) ?? Object.fromEntries(USED.map((name) => [name, 0]));
    for (const name of USED) sum[name] += row[name];
    sums.set(row[field], sum);
  }
  return [sums, page.next !== null];
}

const usageCells = (sum) =>
  USED.map((name) => [
    sum ? (name === "waiting_s" ? format.seconds(sum[name]) : format.number(sum[name])) : format.NONE,
    "number",
  ]);

export class TenantsView {
  /** `me`: of /v1/key. */
  constructor(me) {
    this.me = me;
    const titles = me.may_manage
      ? ["Tenant", ...USAGE_COLUMNS, "Limits", "Shared adapters"]
      : [me.tenant === null && me.role !== "inference" ? "Tenant" : "Adapter", ...USAGE_COLUMNS];
    byId("tenant-columns").replaceChildren(
      ...titles.map((title) =>
        make("th", { scope: "col", class: USAGE_COLUMNS.includes(title) ? "number" : "", text: title }),
      ),
    );
    setText(byId("tenants-title"), me.tenant === null ? "Tenants" : `Tenant ${me.tenant}`);
  }

  /** Whether there is something to show; an error 400 says that the server has no tenants. */
  async refresh() {
    try {
      await (this.me.may_manage ? this.showAll() : this.showUsage());
      return true;
    } catch (error) {
      if (error.status === 400) return false;
      throw error;
    }
  }

  async showAll() {
    const [[sums, isCut], tenants, shares] = await Promise.all([
      usageToday("tenant"),
      ask("/v1/tenants"),
      ask("/v1/shares"),
    ]);
    const shared = new Map();
    for (const { adapter } of shares.data) {
      const owner = adapter.slice(0, Math.max(0, adapter.indexOf("/")));
      shared.set(owner, (shared.get(owner) ?? 0) + 1);
    }
    const rows = tenants.data.map(({ name, quota }) => ({
      name,
      sum: sums.get(name),
      limits: limitsOf(quota) || "none",
      shared: shared.get(name) ?? 0,
    }));
    if (sums.has("")) rows.push({ name: "", sum: sums.get(""), limits: "", shared: 0 });
    rows.sort((a, b) => (b.sum?.generated_tokens ?? 0) - (a.sum?.generated_tokens ?? 0));
    this.fill(rows.slice(0, MOST_ROWS), (row) => [
      [row.name || "keys of no tenant", "isolated"],
      ...usageCells(row.sum),
      [row.limits],
      [format.count(row.shared)],
    ]);
    this.say(rows.length, "tenants", isCut);
  }

  async showUsage() {
    const field = this.me.tenant === null && this.me.role !== "inference" ? "tenant" : "adapter";
    const [sums, isCut] = await usageToday(field);
    const rows = [...sums]
      .map(([name, sum]) => ({ name, sum }))
      .sort((a, b) => b.sum.generated_tokens - a.sum.generated_tokens);
    const empty = field === "tenant" ? "keys of no tenant" : "the base model";
    this.fill(rows.slice(0, MOST_ROWS), (row) => [
      [row.name === "//mix" ? "mixes" : row.name || empty, "isolated"],
      ...usageCells(row.sum),
    ]);
    this.say(rows.length, field === "tenant" ? "tenants" : "models", isCut);
  }

  fill(rows, cells) {
    keepChildren(
      byId("tenant-rows"),
      rows,
      (row) => row.name,
      () => make("tr"),
      (element, row) => setCells(element, cells(row)),
    );
  }

  say(most, what, isCut) {
    const limits = limitsOf(this.me.quota);
    const parts = ["Usage of today (UTC)"];
    if (most > MOST_ROWS) parts.push(`the ${MOST_ROWS} of ${format.count(most)} ${what} with most tokens`);
    if (isCut) parts.push(`of the first ${format.count(PAGE)} rows; GET /v1/usage has all`);
    if (limits) parts.push(`limits: ${limits}`);
    setText(byId("usage-text"), `${parts.join("; ")}.`);
  }
}
