// The table of adapters, page by page as the server gives it, and what may be done to one.

import { adapterPath, ask, call, withQuery } from "./api.js";
import { byId, keepChildren, make, setCells, setShown, setText } from "./dom.js";
import * as format from "./format.js";

const PAGE = 25;
const WAIT_MS = 250;
const COLUMNS = [
  ["State", "", (card) => stateOf(card)],
  ["Bytes", "number", (card) => format.bytes(card.bytes)],
  ["Rank", "number", (card) => format.count(card.rank || null)],
  ["Running", "number", (card) => format.count(card.references)],
  ["Requests", "number", (card) => format.count(card.requests)],
  ["Last used", "number", (card) => format.ago(card.last_used_time)],
  ["Version", "number", (card) => format.count(card.version)],
];
const BRIEF = new Set(["Rank", "Version"]);
const VERBS = {
  pin: { label: "Pin", text: "Pin it: bring it to the device and keep it there?", method: "POST" },
  unpin: { label: "Unpin", text: "Unpin it, so that it may be evicted?", method: "POST" },
  preload: { label: "Preload", text: "Bring it to the device now?", method: "POST" },
  evict: {
    label: "Evict",
    text: "Move it one tier down, and lift its pin? The next request brings it back.",
    method: "POST",
  },
  unload: {
    label: "Unload",
    text: "Unload it? Its name resolves to nothing at once; requests that run on it finish.",
    method: "DELETE",
  },
};

function stateOf(card) {
  const state = card.error ? "failed" : card.is_loading ? `${card.tier}, loading` : card.tier;
  return card.is_pinned ? `${state}, pinned` : state;
}

export class AdaptersView {
  /** `me`: of /v1/key; `refused(error)`: of every answer that is none. */
  constructor(me, refused) {
    this.me = me;
    this.refused = refused;
    this.isOperator = me.role === "admin" || me.role === "operator";
    this.columns = COLUMNS.filter(([title]) => this.isOperator || BRIEF.has(title));
    this.before = [];
    this.after = "";
    this.last = null;
    byId("adapter-columns").replaceChildren(
      make("th", { scope: "col", text: "Name" }),
      ...this.columns.map(([title, kind]) => make("th", { scope: "col", class: kind, text: title })),
    );
    document.querySelectorAll(".of-operators").forEach((element) => setShown(element, this.isOperator));
    this.listen();
  }

  listen() {
    let timer;
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("input", () => {
      clearTimeout(timer);
      this.asked = null; // what is under way is of the filters before
      byId("next").disabled = byId("previous").disabled = true;
      timer = setTimeout(() => this.go([], ""), WAIT_MS);
    });
    byId("next").addEventListener("click", () => this.last && this.go([...this.before, this.after], this.last));
    byId("previous").addEventListener("click", () => this.go(this.before.slice(0, -1), this.before.at(-1) ?? ""));
    byId("adapter-close").addEventListener("click", () => byId("adapter").close());
    byId("confirm-no").addEventListener("click", () => this.confirm(null));
    byId("confirm-yes").addEventListener("click", () => this.run());
  }

  go(before, after) {
    [this.before, this.after] = [before, after];
    return this.refresh().catch(this.refused);
  }

  /** Rows stay where they are while one is pointed at: a click is of the row that was aimed at. */
  async poll() {
    if (!byId("adapter-rows").matches(":hover")) await this.refresh();
  }

  async refresh() {
    const query = { contains: byId("name-filter").value, limit: PAGE, after: this.after };
    if (this.isOperator) {
      Object.assign(query, {
        state: byId("state-filter").value,
        order: byId("order-filter").value,
        pinned: byId("pinned-filter").checked ? "true" : "",
      });
    }
    const asked = JSON.stringify(query);
    this.asked = asked;
    let page;
    try {
      page = await ask(withQuery("/v1/adapters", query));
    } catch (error) {
      if (error.status !== 400 || !this.after) throw error;
      [this.before, this.after] = [[], ""]; // the adapter that the page began behind has left the list
      return this.refresh();
    }
    if (this.asked === asked) this.show(page);
  }

  show(page) {
    this.last = page.has_more ? page.last_id : null;
    keepChildren(
      byId("adapter-rows"),
      page.data,
      (card) => card.name,
      (card) => {
        const button = make("button", { type: "button", class: "name isolated", text: card.name });
        button.addEventListener("click", () => this.open(card.name).catch(this.refused));
        const row = make("tr", {}, make("th", { scope: "row" }, button), ...this.columns.map(() => make("td")));
        return row;
      },
      (row, card) => {
        this.columns.forEach(([, kind, value], index) => {
          const cell = row.children[index + 1];
          cell.className = kind;
          setText(cell, value(card));
        });
        row.className = card.error ? "bad" : "";
      },
    );
    const first = this.before.length * PAGE;
    const last = format.count(first + page.data.length);
    const place = `${format.count(first + 1)} to ${last} of ${page.has_more ? "more" : last}`;
    setText(byId("page-text"), page.data.length ? place : "No adapter is like that.");
    byId("next").disabled = !page.has_more;
    byId("previous").disabled = !this.before.length;
  }

  async open(name) {
    this.name = name;
    await this.describe();
    setText(byId("adapter-outcome"), "");
    this.confirm(null);
    if (!byId("adapter").open) byId("adapter").showModal();
  }

  async describe() {
    const card = await ask(adapterPath(this.name));
    setText(byId("adapter-title"), card.name);
    const facts = [
      ["State", card.tier && stateOf(card)],
      ["Bytes", card.bytes == null ? null : format.bytes(card.bytes)],
      ["Rank", card.rank ? format.count(card.rank) : null],
      ["Version", format.count(card.version)],
      [
        "Versions kept",
        card.versions.map((each) => `${each.version} (${each.state}${each.tier ? `, ${each.tier}` : ""})`).join(", "),
      ],
      ["Brings", card.brings.join(", ")],
      ["Answers for", card.aliases.join(", ")],
      ["Answered by", card.alias_of],
      [
        "Requests",
        card.requests == null ? null : `${format.count(card.requests)}, ${format.count(card.references)} running`,
      ],
      ["Loads", card.loads == null ? null : format.count(card.loads)],
      ["Loaded", card.loaded_time && format.moment(card.loaded_time)],
      ["Last used", card.last_used_time && format.moment(card.last_used_time)],
      ["Path", card.path],
      ["Digest", card.digest],
      ["Error", card.error],
    ].filter(([, value]) => value);
    byId("adapter-facts").replaceChildren(
      ...facts.map(([label, value]) =>
        make("div", {}, make("dt", { text: label }), make("dd", { class: "isolated", text: value })),
      ),
    );
    const isKnown = "is_pinned" in card;
    const verbs = this.me.may_change
      ? ["pin", "unpin", "preload", "evict"].filter((verb) => !isKnown || verb !== (card.is_pinned ? "pin" : "unpin"))
      : [];
    if (this.me.may_load) verbs.push("unload");
    byId("adapter-verbs").replaceChildren(
      ...verbs.map((verb) => {
        const button = make("button", { type: "button", text: VERBS[verb].label });
        button.addEventListener("click", () => this.confirm(verb));
        return button;
      }),
    );
  }

  /** Asks whether a verb is meant; null: it is not. */
  confirm(verb) {
    this.verb = verb;
    setShown(byId("confirm"), verb !== null);
    if (verb === null) return;
    setText(byId("confirm-text"), VERBS[verb].text);
    setText(byId("confirm-yes"), VERBS[verb].label);
    setText(byId("adapter-outcome"), "");
    byId("confirm-yes").focus();
  }

  async run() {
    const [name, verb] = [this.name, this.verb];
    const path = adapterPath(name);
    this.confirm(null);
    setText(byId("adapter-outcome"), `${VERBS[verb].label}: under way`);
    try {
      const answer = await call(verb === "unload" ? path : `${path}/${verb}`, VERBS[verb].method);
      const evicted = answer.evicted?.length ? `; evicted for it: ${answer.evicted.join(", ")}` : "";
      if (this.name === name)
        setText(
          byId("adapter-outcome"),
          `${VERBS[verb].label}: ${answer.has_changed === false ? "nothing was to be done" : "done"}${evicted}`,
        );
      if (verb === "unload") byId("adapter-verbs").replaceChildren();
      else if (this.name === name) await this.describe();
    } catch (error) {
      setText(byId("adapter-outcome"), `${VERBS[verb].label}: ${error.message}`);
      if (error.status === 401) this.refused(error);
    }
    await this.refresh().catch(this.refused);
  }
}
