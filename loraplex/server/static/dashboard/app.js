// Asks what the key may see, then looks again and again.

import { AdaptersView } from "./adapters.js";
import { ask, askText, Failure, key } from "./api.js";
import { byId, setShown, setText } from "./dom.js";
import { EventsView } from "./events.js";
import * as format from "./format.js";
import { MemoryView } from "./memory.js";
import { TenantsView } from "./tenants.js";
import { TrafficView } from "./traffic.js";

const LOOK_MS = 2000;
const LIST_MS = 5000;
const USAGE_MS = 15000;
const SECTIONS = ["traffic", "memory", "adapters", "tenants", "events"];

const now = () => Date.now() / 1000;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const isPaused = () => byId("pause").getAttribute("aria-pressed") === "true";
const range = () => [now() - Number(byId("window").value), now()];

let lastAnswer = now();

/** `kind`: ok, busy, bad. */
function say(kind, text) {
  byId("status").className = kind;
  setText(byId("status-text"), text);
}

function open(section, isOpen = true) {
  setShown(byId(section), isOpen);
  setShown(document.querySelector(`nav a[href="#${section}"]`), isOpen);
}

function signIn(message) {
  SECTIONS.forEach((section) => open(section, false));
  setShown(byId("sign-in"), true);
  setText(byId("key-error"), message);
  byId("key").focus();
}

/** An answer that is none: without a valid key the page begins again, else its state says what is wrong. */
function refused(error) {
  if (!(error instanceof Failure)) throw error;
  if (error.status === 401) {
    key.forget();
    location.reload();
  } else if (error.status === 0) say("bad", `${error.message} Last answer at ${format.clock(lastAnswer)}.`);
  else say(error.status >= 500 ? "bad" : "busy", error.message);
}

/** `work` every `ms` after its end, while the page is not paused. */
async function repeat(ms, work) {
  for (;;) {
    if (!isPaused()) await work().catch(refused);
    await pause(ms);
  }
}

function showHealth(health, look) {
  const isLow = look?.by("loraplex:memory_mode", "mode").get("low_memory") === 1;
  const words = { ok: "Serving", degraded: "Degraded", busy: "Busy" };
  const parts = [words[health.status] ?? health.status];
  if (isLow) parts.push("low memory: admission is throttled");
  if (health.runners) parts.push(`${health.serving} of ${health.runners} runners`);
  if (health.database && health.database !== "connected") parts.push(`database ${health.database}`);
  say(health.status === "ok" && !isLow ? "ok" : "busy", parts.join(" · "));
}

/** What answers 403 is not shown. */
async function permitted(asked) {
  try {
    return await asked;
  } catch (error) {
    if (error instanceof Failure && error.status === 403) return null;
    throw error;
  }
}

async function start() {
  SECTIONS.forEach((section) => open(section, false));
  const me = await ask("/v1/key");
  const [version, models] = await Promise.all([ask("/version"), ask("/v1/models?limit=1")]);
  setText(byId("model"), models.data[0]?.id ?? "");
  byId("model").title = `Loraplex ${version.version}, ${version.backend}`;
  setShown(byId("forget"), me.id !== null);
  setShown(byId("sign-in"), false);
  open("adapters");
  const [traffic, adapters, tenants] = [new TrafficView(), new AdaptersView(me, refused), new TenantsView(me)];
  let memory = null;
  let hasMetrics = me.tenant === null;
  open("traffic", hasMetrics);
  if (me.tenant !== null) byId("main").insertBefore(byId("tenants"), byId("adapters"));
  setShown(byId("window").parentElement, hasMetrics || me.sees_inside);
  if (me.sees_inside) {
    open("memory");
    open("events");
    memory = new MemoryView();
    new EventsView().run(new AbortController().signal, refused);
  }
  const draw = () => {
    if (hasMetrics) traffic.draw(range());
    memory?.draw(range());
  };
  byId("window").addEventListener("change", draw);
  repeat(LOOK_MS, async () => {
    const [health, page, report] = await Promise.all([
      ask("/health"),
      hasMetrics ? permitted(askText("/metrics")) : null,
      memory ? ask("/v1/memory") : null,
    ]);
    lastAnswer = now();
    if (hasMetrics && page === null) {
      hasMetrics = false;
      open("traffic", false);
    }
    const look = page === null ? null : traffic.add(page, now());
    if (report) {
      memory.show(report);
      traffic.showFound(report.found);
    }
    showHealth(health, look);
    draw();
  });
  repeat(LIST_MS, () => adapters.poll());
  repeat(USAGE_MS, async () => open("tenants", await tenants.refresh()));
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given))
    return setText(byId("key-error"), "A key has no spaces and no letters beyond ASCII.");
  key.set(given);
  location.reload();
});
byId("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
byId("pause").addEventListener("click", () => {
  byId("pause").setAttribute("aria-pressed", String(!isPaused()));
  setText(byId("pause"), isPaused() ? "Resume" : "Pause");
});

async function begin() {
  for (;;) {
    try {
      return await start();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      if (error.status === 401) {
        const hadKey = key.get() !== "";
        key.forget();
        say("busy", "Key needed");
        return signIn(hadKey ? "The server does not take this key." : "");
      }
      refused(error);
    }
    await pause(LOOK_MS);
  }
}

begin();
