// Asks /v1. Addresses are relative to the page's, so it works under any prefix that a program mounts it at.

const TOKEN = "kvpager-token";
const ANSWER_MILLISECONDS = 10_000;

/** Why something was not done: what the API said (`status`, `detail`), or that nobody answered (`status` null). */
export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.name = "Refusal";
    this.status = status;
  }

  /** Whether it is for want of an answer: of the admin process, or of the sidecar behind it. */
  get isAway() {
    return this.status === null || this.status === 502 || this.status === 503 || this.status === 504;
  }

  /** Whether a token, or another one, is needed. */
  get wantsToken() {
    return this.status === 401 || this.status === 403;
  }
}

export class Api {
  #token = sessionStorage.getItem(TOKEN);

  /** Whether a token was given. It stays in this tab, never in an address. */
  get hasToken() {
    return this.#token !== null;
  }

  /** What a token may, if it is known: then it is kept and said from now on. */
  async tryToken(token) {
    const { role } = await this.#ask("GET", "v1/status", { token });
    this.#token = token;
    sessionStorage.setItem(TOKEN, token);
    return role;
  }

  forgetToken() {
    this.#token = null;
    sessionStorage.removeItem(TOKEN);
  }

  /** What a GET gives. `query`: what is null is left out. */
  get(path, query = {}) {
    return this.#ask("GET", path, { query });
  }

  /** What another method gives; `body` goes as JSON. */
  send(method, path, { query, body } = {}) {
    return this.#ask(method, path, { query, body });
  }

  /**
   * Calls `heard` with the data of every server-sent event until `signal` is aborted or the stream breaks.
   * EventSource sends no token, so the stream is read here.
   */
  async events(heard, signal) {
    const response = await fetch("v1/events", { headers: headersOf(this.#token), signal });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const messages = (text + value).replaceAll("\r\n", "\n").split("\n\n");
      text = messages.pop();
      for (const message of messages) {
        const data = message.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length > 0) heard(JSON.parse(data.map((line) => line.slice(5)).join("\n")));
      }
    }
  }

  async #ask(method, path, { query = {}, body, token = this.#token }) {
    const said = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
    const address = said.length > 0 ? `${path}?${new URLSearchParams(said)}` : path;
    const headers = headersOf(token);
    if (body !== undefined) headers.set("Content-Type", "application/json");
    let response;
    let answer;
    try {
      const signal = AbortSignal.timeout(method === "GET" ? ANSWER_MILLISECONDS : 6 * ANSWER_MILLISECONDS);
      const content = body === undefined ? undefined : JSON.stringify(body);
      response = await fetch(address, { method, headers, body: content, signal });
      if (response.ok) answer = await response.json();
    } catch (error) {
      throw new Refusal(null, error.name === "TimeoutError" ? "no answer in time" : "nobody answers");
    }
    if (!response.ok) throw await refusal(response);
    return answer;
  }
}

function headersOf(token) {
  return new Headers(token === null ? {} : { Authorization: `Bearer ${token}` });
}

async function refusal(response) {
  let detail = response.statusText;
  try {
    const problem = await response.json();
    detail = problem.detail ?? problem.title ?? detail;
  } catch {
    // Not a problem of the API's own, such as a proxy's page: the status says what there is to say.
  }
  return new Refusal(response.status, detail || `HTTP ${response.status}`);
}
