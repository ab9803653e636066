// Requests to this server, with the key of this tab.

const STORED = "loraplex-key";
const TIMEOUT_MS = 15000;
const MAX_EVENT_CHARS = 1 << 20;

/** An answer that is none: `status` 0 when there was no answer at all. */
export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

async function send(path, method, signal) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      signal,
      credentials: "omit",
      redirect: "error",
      cache: "no-store",
    });
  } catch (error) {
    throw new Failure(
      0,
      error.name === "TimeoutError" ? "The server did not answer in time." : "The server does not answer.",
    );
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Failure(answer.status, body?.error?.message ?? `The server answered with ${answer.status}.`);
}

/** The JSON of an answer. Raises Failure. */
export async function ask(path, method = "GET") {
  return (await send(path, method, AbortSignal.timeout(TIMEOUT_MS))).json();
}

export async function askText(path) {
  return (await send(path, "GET", AbortSignal.timeout(TIMEOUT_MS))).text();
}

/** A verb may take as long as its adapter's load. */
export async function call(path, method) {
  return (await send(path, method, undefined)).json();
}

/** A path with a query; empty values are left out. */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const adapterPath = (name) => `/v1/adapters/${name.split("/").map(encodeURIComponent).join("/")}`;

/**
 * Server-sent events until the stream ends: `onEvent(kind, data)`. With fetch, since an EventSource sends no key.
 */
export async function follow(path, onEvent, signal) {
  const answer = await send(path, "GET", signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    if (rest.length > MAX_EVENT_CHARS) throw new Failure(0, "An event is too long.");
    for (const block of blocks) {
      const fields = new Map(
        block
          .split("\n")
          .map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()]),
      );
      if (fields.has("data")) onEvent(fields.get("event"), JSON.parse(fields.get("data")));
    }
  }
}
