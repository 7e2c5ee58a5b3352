// What happens, as it happens.

import { byId, element, say } from "./elements.js";
import { counted, time } from "./format.js";

const MOST = 200;
const AGAIN_MILLISECONDS = 2000;

export class Events {
  #api;
  #stop = null;
  #heard = 0;

  constructor(api) {
    this.#api = api;
    byId("events-hold").addEventListener("click", (event) => {
      const held = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(held));
      say(event.currentTarget, held ? "Go on" : "Hold");
    });
    byId("events-blocks").addEventListener("change", (event) =>
      byId("events").classList.toggle("without-blocks", !event.currentTarget.checked),
    );
  }

  /** Listen, again and again, until `stop`. */
  async start() {
    if (this.#stop !== null) return;
    this.#stop = new AbortController();
    const { signal } = this.#stop;
    while (!signal.aborted) {
      try {
        await this.#api.events((event) => this.add(event), signal);
      } catch {
        // The banner says that nobody answers, or that a token is wanted; here there is only to try again.
      }
      if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, AGAIN_MILLISECONDS));
    }
  }

  /** Listen no more. A page that nobody sees holds no connection: a browser has few for one host. */
  stop() {
    this.#stop?.abort();
    this.#stop = null;
  }

  /** Show that the sidecar, with its admin process, was lost or is back: nobody else can tell of it. */
  note(kind, reason) {
    this.add({ kind, at: Date.now() / 1000, tier: null, blocks: 0, lost: 0, part: null, reason });
  }

  /** Show an event at the top. */
  add(event) {
    if (byId("events-hold").getAttribute("aria-pressed") === "true") return;
    const list = byId("events");
    this.#heard += 1;
    byId("events-empty").hidden = true;
    const about = event.kind === "stored" || event.kind === "removed" ? "blocks" : "parts";
    list.prepend(
      element(
        "li",
        { class: about, "data-kind": event.kind },
        element("time", { datetime: new Date(event.at * 1000).toISOString() }, time(event.at)),
        element("span", { class: "chip", "data-state": event.kind }, event.kind),
        element("span", {}, words(event)),
      ),
    );
    while (list.childElementCount > MOST) list.lastElementChild.remove();
  }
}

function words(event) {
  const parts = [];
  if (event.tier !== null) parts.push(`${counted(event.blocks, "block")} · ${event.tier}`);
  else if (event.kind === "connected") parts.push(event.reason ?? "the sidecar answers");
  else if (event.kind === "disconnected") parts.push(event.reason ?? "the sidecar does not answer");
  else parts.push([event.part, event.reason].filter((said) => said !== null).join(": "));
  if (event.lost > 0) parts.push(`${counted(event.lost, "event")} before this one lost`);
  return parts.join("; ");
}
