// The page: asks /v1 again and again, and shows what it says.

import { Api, Refusal } from "./api.js";
import { byId, element, keyed, say } from "./elements.js";
import { Events } from "./events.js";
import { bytes, count, counted, duration, percent, short, time } from "./format.js";
import { MemoryMap } from "./memory_map.js";
import { Operating } from "./operating.js";
import { Prefixes } from "./prefixes.js";
import { Sessions } from "./sessions.js";
import { showSpaces, showTenants, showTiers } from "./tiers.js";
import { tenantClass } from "./tenants.js";
import { Traffic, showFlows } from "./traffic.js";

const POLL_MILLISECONDS = 2000;
/** Lists are asked for in every so many polls. */
const LISTS_EVERY = 2;
const THEMES = ["system", "light", "dark"];

const api = new Api();
const operating = new Operating(api, () => soon());
const map = new MemoryMap();
const traffic = new Traffic();
const prefixes = new Prefixes(api, operating);
const sessions = new Sessions(api, operating);
const events = new Events(api);

let polls = 0;
let timer = null;
let polling = false;
let again = false;
let heardAt = null;
let heardOf = null;
let lost = false;

/** Poll now, lists too: somebody changed something. */
function soon() {
  polls = 0;
  if (polling) again = true;
  else poll();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  polling = true;
  try {
    await show();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    showAway(error);
  } finally {
    polling = false;
    timer = setTimeout(poll, again ? 0 : POLL_MILLISECONDS);
    again = false;
  }
}

async function show() {
  const status = await api.get("v1/status");
  const lists = polls % LISTS_EVERY === 0;
  polls += 1;
  const [tiers, hostMap] = await Promise.all([
    Promise.all(status.tiers.map((tier) => orNull(api.get(`v1/tiers/${tier}`)))),
    orNull(api.get("v1/tiers/host/map", { cells: map.cells }), map),
    ...(lists ? [orNull(prefixes.poll(), prefixes), sessions.poll()] : []),
  ]);
  const details = tiers.filter((tier) => tier !== null);
  heardAt = Date.now() / 1000;
  for (const space of status.spaces) tenantClass(space.tenant);
  operating.role = status.role;
  showState(status);
  traffic.add(status, heardAt);
  const host = details.find((tier) => tier.tier === "host");
  showFigures(status, host, hostMap);
  showTiers(details, status.cold);
  showTenants(host?.tenants ?? []);
  showSpaces(status.spaces);
  if (hostMap !== null) {
    map.show(hostMap, details.find((tier) => tier.last_blocks_bytes !== null)?.last_blocks_bytes ?? null);
  }
  showFlows(details);
  sessions.sum(status);
}

/**
 * What is asked for, or null where the sidecar has no such thing: a tier that went meanwhile, a map of memory that
 * no records tell of. `part` says why in its place. That nobody answers is another matter, and thrown.
 */
async function orNull(asked, part = null) {
  try {
    return await asked;
  } catch (error) {
    if (error.status !== 404 && error.status !== 409) throw error;
    part?.refuse(error);
    return null;
  }
}

function showState(status) {
  if (lost)
    events.note(
      "connected",
      status.boot_id === heardOf ? "it answers again" : "it answers again, started anew",
    );
  lost = false;
  heardOf = status.boot_id;
  document.body.classList.remove("stale");
  byId("away").hidden = true;
  const state = byId("state");
  state.dataset.state = status.draining ? "draining" : status.degraded.length > 0 ? "degraded" : "ready";
  say(state, status.draining ? "Draining" : status.degraded.length > 0 ? "Serving, degraded" : "Serving");
  keyed(
    byId("facts"),
    [
      `kvpager ${status.version}`,
      `up ${duration(status.uptime_seconds)}`,
      counted(status.clients, "client"),
      `boot ${status.boot_id.slice(0, 8)}`,
    ],
    (text) => text.split(" ")[0],
    () => element("span"),
    say,
  );
  document.title = status.degraded.length > 0 ? "kvpager, degraded" : "kvpager";
  const degraded = byId("degraded");
  degraded.hidden = status.degraded.length === 0;
  const line = () => element("li", {}, element("strong"), element("span"));
  keyed(
    degraded,
    [...status.degraded.entries()],
    ([place]) => String(place),
    line,
    (item, [, part]) => {
      say(item.firstElementChild, part.part);
      say(item.lastElementChild, ` ${part.reason}, since ${time(part.since)}`);
    },
  );
  say(byId("age"), `as of ${time(heardAt - status.age_seconds)}`);
}

function showFigures(status, host, hostMap) {
  const saved = status.hits.saved_tokens;
  const { host: inHost, cold, tokens } = traffic.lately;
  const figures = [
    [
      "Hit rate",
      inHost === null ? "–" : percent(inHost + cold),
      inHost === null ? "nothing asked for lately" : `host ${percent(inHost)} · cold ${percent(cold)}`,
    ],
    [
      "Tokens saved",
      short(saved),
      saved === null
        ? "the sidecar does not say"
        : tokens === null
          ? "since its start"
          : `${short(tokens)}/s lately`,
    ],
    [
      "Host memory",
      host?.capacity_bytes ? percent(host.used_bytes / host.capacity_bytes) : "–",
      host ? `${bytes(host.used_bytes)} of ${bytes(host.capacity_bytes)}` : "",
    ],
    [
      "Largest free run",
      bytes(hostMap?.largest_free_run_bytes),
      hostMap === null
        ? "not known"
        : hostMap.free_bytes > 0
          ? `of ${bytes(hostMap.free_bytes)} free`
          : "nothing is free",
    ],
    [
      "Sessions",
      count(status.sessions_awake + status.sessions_asleep),
      `${count(status.sessions_awake)} awake · ${count(status.sessions_asleep)} asleep`,
    ],
    [
      "Only in host",
      bytes(host?.dirty_bytes),
      status.cold === null ? "there is no cold tier" : "no copy in the cold tier yet",
    ],
  ];
  keyed(
    byId("figures"),
    figures,
    ([name]) => name,
    ([name]) =>
      element(
        "div",
        {},
        element("dt", {}, name),
        element("dd", { class: "value" }),
        element("dd", { class: "about" }),
      ),
    (item, [, value, about]) => {
      say(item.children[1], value);
      say(item.children[2], about);
    },
  );
}

function showAway(refusal) {
  traffic.miss(Date.now() / 1000);
  const state = byId("state");
  state.dataset.state = "away";
  if (refusal.wantsToken) {
    say(state, "A token is needed");
    // One that is not known any more is of no use: looking may need none.
    const known = !api.hasToken;
    api.forgetToken();
    // Asked for once: who closes the dialog has the button.
    if (known && polls === 0) operating.ask("Looking from another machine needs a token.");
    polls += known ? 1 : 0;
    return;
  }
  if (refusal.status === null && heardAt !== null && !lost) {
    lost = true;
    events.note("disconnected", refusal.message);
  }
  document.body.classList.add("stale");
  say(state, refusal.isAway ? "Away" : "No answer");
  document.title = "kvpager, away";
  byId("degraded").hidden = true;
  const away = byId("away");
  const why = refusal.isAway
    ? `The sidecar is away: ${refusal.message}.`
    : `The API does not answer: ${refusal.message}.`;
  const shown = heardAt === null ? "" : ` What is shown is of ${time(heardAt)}.`;
  say(away, `${why}${shown} It is asked again every ${POLL_MILLISECONDS / 1000} seconds.`);
  away.hidden = false;
  polls = 0;
}

function followTheme() {
  const button = byId("theme");
  const chosen = () => document.documentElement.dataset.theme ?? "system";
  const name = () => say(button, `Theme: ${chosen()}`);
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length];
    if (next === "system") {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("kvpager-theme");
    } else {
      document.documentElement.dataset.theme = next;
      localStorage.setItem("kvpager-theme", next);
    }
    name();
    map.draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.draw());
  name();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) events.stop();
  else {
    events.start();
    soon();
  }
});
followTheme();
// Beside the map there is room for it; on a phone it is one tap away.
byId("spaces-more").open = window.innerWidth > 760;
events.start();
poll();
