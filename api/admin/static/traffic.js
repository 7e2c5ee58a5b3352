// What became of requests, kept in the page from one poll to the next: `/v1/status` counts since the sidecar was
// started, and rates are differences. And what moves between tiers.

import { TimeChart } from "./charts.js";
import { byId, element, keyed, say, shape } from "./elements.js";
import { bytes, counted, percent, rate, short } from "./format.js";

const KEPT_SECONDS = 900;
/** Rates are taken over so long: single polls are too jumpy to read. */
const WINDOW_SECONDS = 10;

export class Traffic {
  #polls = [];
  #boot = null;
  #hits = new TimeChart(
    byId("hits"),
    [
      { key: "tier-host", name: "host" },
      { key: "tier-cold", name: "cold" },
    ],
    percent,
    1,
    "No engine has asked for a block since this page was opened.",
  );
  #saved = new TimeChart(
    byId("saved"),
    [{ key: "tier-saved", name: "tokens saved" }],
    (value) => `${short(value)}/s`,
    null,
    "There is nothing to draw yet.",
  );

  /** Of the last minute: shares of asked blocks by where they were, null without any; and tokens a second. */
  lately = { host: null, cold: null, tokens: null };

  /** Take note of a status. */
  add(status, now) {
    if (status.boot_id !== this.#boot) {
      // Another sidecar counts from zero. What was drawn stays, with a gap.
      if (this.#boot !== null) this.miss(now);
      this.#boot = status.boot_id;
    }
    this.#polls.push({ at: now, hits: status.hits });
    this.#polls = this.#polls.filter(({ at }) => now - at <= KEPT_SECONDS);
    this.#show(status.hits);
  }

  /** Take note that nobody answered: rates do not go over it. */
  miss(now) {
    if (this.#polls.at(-1)?.hits !== null && this.#polls.length > 0)
      this.#polls.push({ at: now, hits: null });
  }

  #show(hits) {
    this.lately = this.#between(this.#polls.length - 1, 60) ?? { host: null, cold: null, tokens: null };
    const points = this.#polls.map(({ at }, place) => ({ at, values: this.#between(place, WINDOW_SECONDS) }));
    this.#hits.show(
      points.map(({ at, values }) => ({
        at,
        values:
          values === null || values.host === null
            ? null
            : { "tier-host": values.host, "tier-cold": values.cold },
      })),
      this.#hitWords(),
    );
    this.#saved.show(
      points.map(({ at, values }) => ({
        at,
        values: values === null || values.tokens === null ? null : { "tier-saved": values.tokens },
      })),
      hits.saved_tokens === null
        ? "The sidecar does not say how many."
        : `${short(hits.saved_tokens)} since the sidecar was started.`,
    );
  }

  #hitWords() {
    const { host, cold } = this.lately;
    if (host === null) return "Nothing was asked for in the last minute.";
    return (
      `Of blocks asked for in the last minute ${percent(host)} were in host memory, ` +
      `${percent(cold)} came up from the cold tier, ${percent(Math.max(0, 1 - host - cold))} were missed.`
    );
  }

  /** From the poll of the window's beginning to this one; null where there is none in one run. */
  #between(place, seconds) {
    const last = this.#polls[place];
    if (last === undefined || last.hits === null) return null;
    let first = place;
    while (first > 0 && this.#polls[first - 1].hits !== null && last.at - this.#polls[first].at < seconds)
      first -= 1;
    if (first === place) return null;
    const from = this.#polls[first];
    const grown = (key) => Math.max(0, (last.hits[key] ?? 0) - (from.hits[key] ?? 0));
    const found = grown("host_blocks");
    // What came up from the cold tier was missed in host memory first.
    const missed = grown("missed_blocks");
    const cold = Math.min(grown("cold_blocks"), missed);
    const asked = found + missed;
    return {
      host: asked > 0 ? found / asked : null,
      cold: asked > 0 ? cold / asked : null,
      tokens: last.hits.saved_tokens === null ? null : grown("saved_tokens") / (last.at - from.at),
    };
  }
}

/** The fastest that the page saw of each flow: what engines move is told as it is, without a best. */
const fastest = new Map();

/** What moves between tiers against what the machine reaches, or else the best that was seen. */
export function showFlows(details) {
  const flows = new Map(
    details.flatMap((tier) => tier.flows).map((flow) => [`${flow.source} ${flow.target}`, flow]),
  );
  const seen = [...flows.values()];
  byId("flows-empty").hidden = seen.length > 0;
  keyed(byId("flows"), seen, (flow) => `${flow.source} ${flow.target}`, makeFlow, updateFlow);
  const waiting = details.find((tier) => tier.queue_blocks !== null)?.queue_blocks ?? null;
  say(
    byId("queue"),
    waiting === null
      ? ""
      : waiting === 0
        ? "Nothing waits to be written to the cold tier."
        : `${counted(waiting, "block")} on the way to the cold tier.`,
  );
}

function makeFlow() {
  return element(
    "li",
    {},
    element("span", { class: "way" }),
    element("span", { class: "now" }),
    shape(
      "svg",
      { class: "bar thin", "aria-hidden": "true" },
      shape("rect", { class: "tier-saved", height: "100%" }),
    ),
    element("span", { class: "share" }),
    element("span", { class: "total" }),
  );
}

function updateFlow(item, flow) {
  const [way, now, bar, share, total] = item.children;
  const name = `${flow.source} → ${flow.target}`;
  const speed = flow.bytes_per_second ?? 0;
  const best = Math.max(fastest.get(name) ?? 0, flow.best_bytes_per_second ?? speed);
  fastest.set(name, best);
  const most = flow.ceiling_bytes_per_second ?? best;
  say(way, name);
  say(now, speed > 0 ? rate(speed) : "still");
  bar.firstElementChild.setAttribute(
    "width",
    `${most > 0 ? Math.min(100, (100 * speed) / most).toFixed(1) : 0}%`,
  );
  const against = flow.ceiling_bytes_per_second === null ? "the best seen" : "measured here";
  say(share, most > 0 ? `${percent(speed / most)} of ${rate(most)}, ${against}` : "nothing has moved yet");
  say(total, flow.moved_bytes === null ? "moved by engines" : `${bytes(flow.moved_bytes)} in all`);
}
