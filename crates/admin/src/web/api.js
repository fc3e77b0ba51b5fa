// API client of the page: one token for all requests, problem details as errors, and an event stream that reconnects by itself.
// EventSource cannot send a token, so fetch reads the stream.

const KEPT = "turnpike-token";
const LONGEST_PAUSE_MS = 15000;
const POLL_MS = 5000;
const HIDDEN_MS = 60000;

let token = sessionStorage.getItem(KEPT) ?? "";

export const hasToken = () => token !== "";

export function setToken(text) {
  token = text;
  if (text === "") sessionStorage.removeItem(KEPT);
  else sessionStorage.setItem(KEPT, text);
}

// An error response of the server (RFC 9457).
export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }

  get needsToken() {
    return this.status === 401;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (token !== "") headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Problem(response.status, problem.code ?? "", problem.detail ?? `${response.status} ${response.statusText}`);
}

export const ask = async (path, options) => (await request(path, options)).json();
export const text = async (path) => (await request(path)).text();

// Calls `on.history(columns)`, `on.live(reading)` and `on.state(word, why)` for as long as the page is open. `word` is "live", "polling",
// "lost", "token" or "hidden".
export async function watch(on) {
  let pause = 1000;
  for (;;) {
    await visible();
    const hidden = new AbortController();
    const guard = whenHidden(() => hidden.abort());
    try {
      await stream(on, hidden.signal, () => {
        pause = 1000;
        on.state("live");
      });
      on.state("lost", "the server closed the stream");
    } catch (problem) {
      if (hidden.signal.aborted) on.state("hidden");
      else if (problem.code === "too_many_watchers") await poll(on).catch((error) => on.state("lost", error.message));
      else if (problem.needsToken) {
        on.state("token", problem.message);
        await new Promise((resolve) => addEventListener("token", resolve, { once: true }));
      } else on.state("lost", problem.message);
    } finally {
      guard();
    }
    if (!hidden.signal.aborted) await sleep(pause);
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

async function stream(on, signal, begun) {
  const response = await request("/v1/live/events", { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const { name, data } = parse(event);
      if (name === "history") on.history(data);
      if (name === "live") {
        begun();
        on.live(data);
      }
    }
  }
}

function parse(event) {
  const field = (name) => event.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
  return { name: field("event"), data: JSON.parse(field("data") ?? "null") };
}

// Polls while the server has the maximum number of watchers, and tries to subscribe once a minute.
async function poll(on) {
  for (let asked = 0; asked < 60000 / POLL_MS; asked += 1) {
    on.history(await ask("/v1/live/history"));
    on.live(await ask("/v1/live"));
    on.state("polling");
    await sleep(POLL_MS);
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// A tab that has been hidden for a while unsubscribes.
function whenHidden(act) {
  let timer;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(act, HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

const visible = () => new Promise((resolve) => {
  if (!document.hidden) return resolve();
  const look = () => {
    if (document.hidden) return;
    document.removeEventListener("visibilitychange", look);
    resolve();
  };
  return document.addEventListener("visibilitychange", look);
});
