// Conversations that engines hold: which run, which sleep, and a button that has the engine change it.

import { byId, element, keyed, say } from "./elements.js";
import { count, counted } from "./format.js";

const FIRST_PAGE = 10;
const MOST = 200;

export class Sessions {
  #api;
  #operate;
  #limit = FIRST_PAGE;
  #asked = 0;
  #shown = new WeakMap();

  constructor(api, operate) {
    this.#api = api;
    this.#operate = operate;
    byId("session-state").addEventListener("change", () => {
      this.#limit = FIRST_PAGE;
      operate.refresh();
    });
    byId("sessions-more").addEventListener("click", () => {
      this.#limit = Math.min(MOST, this.#limit * 2);
      operate.refresh();
    });
  }

  /** Say how many there are, from the status. */
  sum(status) {
    const all = status.sessions_awake + status.sessions_asleep;
    say(
      byId("sessions-sum"),
      all === 0 ? "" : `${count(status.sessions_awake)} awake, ${count(status.sessions_asleep)} asleep.`,
    );
  }

  /** Ask for them and show them. */
  async poll() {
    this.#asked += 1;
    const asked = this.#asked;
    const state = byId("session-state").value;
    const page = await this.#api.get("v1/sessions", {
      state: state === "*" ? null : state,
      limit: this.#limit,
    });
    if (asked !== this.#asked) return;
    const empty = byId("sessions-empty");
    empty.hidden = page.items.length > 0;
    say(empty, state === "*" ? "No engine has reported a session." : `No session is ${state}.`);
    byId("sessions").parentElement.hidden = page.items.length === 0;
    byId("sessions-more").hidden = page.next_cursor === null || this.#limit >= MOST;
    keyed(
      byId("sessions"),
      page.items,
      (session) => `${session.client} ${session.id}`,
      () => this.#make(),
      (row, session) => this.#update(row, session),
    );
  }

  #make() {
    const row = element(
      "tr",
      {},
      element("th", { scope: "row", class: "name" }),
      element("td", {}, element("span", { class: "chip" })),
      element("td", { class: "wide" }),
      element("td", { class: "actions" }, element("button", { type: "button" })),
    );
    row.querySelector("button").addEventListener("click", () => this.#command(this.#shown.get(row)));
    return row;
  }

  #update(row, session) {
    this.#shown.set(row, session);
    const [name, state, engine] = row.children;
    say(name, session.id);
    name.title = session.id;
    say(state.firstElementChild, session.state);
    state.firstElementChild.dataset.state = session.asleep ? "asleep" : "awake";
    say(engine, session.engine);
    const button = row.querySelector("button");
    say(button, session.asleep ? "Wake" : "Sleep");
    button.setAttribute("aria-label", `${session.asleep ? "Wake" : "Put to sleep"} ${session.id}`);
  }

  #command(session) {
    const command = session.asleep ? "wake" : "sleep";
    this.#operate.run(session.asleep ? "Waking" : "Putting to sleep", async () => {
      const answer = await this.#api.send("POST", `v1/sessions/${encodeURIComponent(session.id)}/${command}`);
      return `${session.id} ${command === "wake" ? "wakes" : "sleeps"}: ${counted(answer.blocks, "block")}.`;
    });
  }
}
