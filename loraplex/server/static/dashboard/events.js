// Events as they come, the newest first.

import { ask, follow, withQuery } from "./api.js";
import { byId, make, setText } from "./dom.js";
import * as format from "./format.js";

const KEPT = 500;
const SHOWN = 200;
const DRAW_MS = 500;
const KINDS = [
  "load",
  "load_failed",
  "evict",
  "drop",
  "unload",
  "switch",
  "fault",
  "recovery",
  "mode",
  "compaction",
  "merge",
  "restart",
  "release",
  "resume",
  "move",
  "audit",
];
const RETRY_MS = [1000, 2000, 5000, 10000];

const itemOf = (event) =>
  make(
    "li",
    { class: `event-${KINDS.includes(event.kind) ? event.kind : "other"}` },
    make("time", { datetime: new Date(event.time * 1000).toISOString(), text: format.clock(event.time) }),
    make("span", { class: "kind", text: event.kind.replaceAll("_", " ") }),
    make("span", { class: "isolated event-text", text: event.text }),
  );

export class EventsView {
  constructor() {
    this.events = [];
    this.lastId = 0;
    this.queue = [];
    byId("event-kind").append(
      ...KINDS.map((kind) => make("option", { value: kind, text: kind.replaceAll("_", " ") })),
    );
    byId("event-kind").addEventListener("change", () => this.showAll());
  }

  /** Until `signal` ends it. The stream is opened again when it breaks off. */
  async run(signal, refused) {
    for (let failures = 0; !signal.aborted; failures += 1) {
      try {
        const page = await ask(withQuery("/v1/events", { stream: "false", last_id: this.lastId || "" }));
        if (page.last_id < this.lastId) this.events = []; // another server's
        this.add(page.data);
        this.lastId = page.last_id;
        setText(byId("events-state"), "live");
        await follow(
          `/v1/events?last_id=${this.lastId}`,
          (kind, data) => {
            failures = 0;
            this.enqueue(
              kind === "gap"
                ? { kind: "gap", time: Date.now() / 1000, text: `${data.lost} events were lost: they came too fast` }
                : data,
            );
          },
          signal,
        );
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return refused(error);
        setText(byId("events-state"), error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  /** Events of half a second are drawn at once. */
  enqueue(event) {
    this.lastId = event.id ?? this.lastId;
    this.queue.push(event);
    if (this.queue.length === 1) setTimeout(() => this.add(this.queue.splice(0)), DRAW_MS);
    else if (this.queue.length > KEPT) this.queue.splice(1, this.queue.length - KEPT);
  }

  add(events) {
    this.events = [...this.events, ...events].slice(-KEPT);
    const list = byId("event-list");
    list.prepend(...this.wanted(events).slice(-SHOWN).reverse().map(itemOf));
    while (list.childElementCount > SHOWN) list.lastElementChild.remove();
  }

  wanted(events) {
    const kind = byId("event-kind").value;
    return kind ? events.filter((event) => event.kind === kind) : events;
  }

  showAll() {
    byId("event-list").replaceChildren(...this.wanted(this.events).slice(-SHOWN).reverse().map(itemOf));
  }
}
