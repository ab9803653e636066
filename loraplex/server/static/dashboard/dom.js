// The only way text comes onto the page: as text. Names and messages of others never become markup.

/** The element with this id, which dashboard.html has. */
export const byId = (id) => document.getElementById(id);

/** A new element. `attributes`: by name; `text` is its text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Sets a text if it is another one: what is selected or read aloud stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setShown(element, isShown) {
  element.hidden = !isShown;
}

/**
 * Makes the children of `parent` those of `items`, in their order. An element whose key is still there is kept, with
 * its focus. `create(item)` makes one, `update(element, item)` fills it.
 */
export function keepChildren(parent, items, keyOf, create, update) {
  const known = parent.keptChildren ?? new Map();
  const kept = new Map();
  for (const item of items) kept.set(keyOf(item), known.get(keyOf(item)) ?? create(item));
  for (const [key, element] of known) if (!kept.has(key)) element.remove();
  let place = parent.firstElementChild;
  for (const item of items) {
    const element = kept.get(keyOf(item));
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  parent.keptChildren = kept;
}

/** A row of a table: cells of [text, class]. */
export function setCells(row, cells) {
  while (row.cells.length > cells.length) row.deleteCell(-1);
  cells.forEach(([text, kind], index) => {
    const cell = row.cells[index] ?? row.insertCell();
    cell.className = kind ?? "";
    setText(cell, text);
  });
}

/** Bars with a label and a value: `[{label, share, text, color}]`, share 0 to 1. */
export function showBars(parent, bars, nothing) {
  const items = bars.length ? bars : [{ label: nothing, share: 0, text: "", isNothing: true }];
  const create = () =>
    make(
      "div",
      { class: "bar" },
      make("span", { class: "bar-label isolated" }),
      make("span", { class: "bar-text" }),
      make("span", { class: "bar-track" }, make("span", { class: "bar-fill" })),
    );
  keepChildren(
    parent,
    items,
    (bar) => bar.label,
    create,
    (element, bar) => {
      const [label, text, track] = element.children;
      setText(label, bar.label);
      setText(text, bar.text);
      label.classList.toggle("muted", Boolean(bar.isNothing));
      setShown(track, !bar.isNothing);
      track.firstElementChild.style.width = `${Math.max(0, Math.min(1, bar.share)) * 100}%`;
      track.firstElementChild.style.background = `var(--${bar.color ?? "c1"})`;
    },
  );
}
