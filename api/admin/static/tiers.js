// A bar for each tier: above what its blocks are, below whose they are.

import { byId, element, keyed, say, shape } from "./elements.js";
import { bytes, count, percent, spaceName, tenantName } from "./format.js";
import { tenantClass } from "./tenants.js";

/** What a block is, of several the first that holds; in the order in which bars and map show it. */
export const STATES = [
  ["leased", "leased", "somebody relies on them"],
  ["pinned", "pinned", "kept, and not leased"],
  ["reserved", "reserved", "being written"],
  ["idle", "idle", "cached; these may go"],
  ["free", "free", "room for more"],
];

const NAMES = { device: "Device", host: "Host", cold: "Cold" };
const PLACES = {
  device: "memory of the engines' GPUs",
  host: "pinned memory of this machine",
  cold: "Redis or a disk",
};

/** Draws a tier's bar, legend and words from `/v1/tiers/{tier}`. */
export function showTiers(details, cold) {
  keyed(
    byId("tiers"),
    details,
    (tier) => tier.tier,
    makeTier,
    (place, tier) => updateTier(place, tier, cold),
  );
}

/** A square of a colour. */
export function swatch(colour) {
  return shape(
    "svg",
    { class: `swatch ${colour}`, viewBox: "0 0 10 10", "aria-hidden": "true" },
    shape("rect", { width: 10, height: 10, rx: 2 }),
  );
}

function makeTier() {
  const bar = () => shape("svg", { class: "bar", preserveAspectRatio: "none", "aria-hidden": "true" });
  return element(
    "article",
    { class: "tier" },
    element(
      "h3",
      {},
      element("span", { class: "name" }),
      element("span", { class: "where" }),
      element("span", { class: "chip" }),
    ),
    element("p", { class: "fill" }),
    bar(),
    bar(),
    element("p", { class: "what" }),
    element("p", { class: "note problem" }),
  );
}

function updateTier(place, tier, cold) {
  const [name, where, chip] = place.querySelector("h3").children;
  say(name, NAMES[tier.tier]);
  say(where, tier.tier === "cold" && cold !== null ? cold.url : PLACES[tier.tier]);
  say(chip, tier.state);
  chip.dataset.state = tier.state;
  const [byState, byTenant] = place.querySelectorAll(".bar");
  const known = filledWith(tier);
  const whole = tier.capacity_bytes ?? known.reduce((sum, [, held]) => sum + held, 0);
  say(place.querySelector(".fill"), filling(tier));
  fillBar(
    byState,
    known.map(([state, held]) => [`state-${state}`, held]),
    whole,
  );
  byState.classList.toggle("gone", tier.used_bytes === null);
  const tenants = tier.tenants ?? [];
  byTenant.classList.toggle("gone", tenants.length === 0);
  fillBar(
    byTenant,
    tenants.map((share) => [tenantClass(share.tenant), share.used_bytes]),
    whole,
  );
  const told = known.filter(([state, held]) => held > 0 && state !== "free");
  place
    .querySelector(".what")
    .replaceChildren(
      ...told.flatMap(([state, held]) => [
        element("span", {}, swatch(`state-${state}`), `${bytes(held)} ${state}`),
        " ",
      ]),
    );
  say(place.querySelector(".problem"), tier.state === "ready" ? "" : (tier.reason ?? ""));
}

/** What a tier's bytes are, in the order of the bar. What it does not tell apart is `used`. */
function filledWith(tier) {
  const known = STATES.map(([state]) => [state, tier[`${state}_bytes`]]).filter(([, held]) => held !== null);
  const told = known.reduce((sum, [state, held]) => (state === "free" ? sum : sum + held), 0);
  const rest = Math.max(0, (tier.used_bytes ?? 0) - told);
  return rest > 0 ? [["used", rest], ...known] : known;
}

function filling(tier) {
  if (tier.used_bytes === null) return "it does not say how full it is";
  if (tier.capacity_bytes === null) return `${bytes(tier.used_bytes)} in use, with no bound`;
  const blocks = tier.blocks === null ? "" : ` · ${count(tier.blocks)} blocks`;
  const share = tier.capacity_bytes > 0 ? ` (${percent(tier.used_bytes / tier.capacity_bytes)})` : "";
  return `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}${share}${blocks}`;
}

function fillBar(bar, parts, whole) {
  let at = 0;
  const rects = [];
  for (const [colour, size] of parts) {
    if (size <= 0 || whole <= 0) continue;
    const wide = (100 * size) / whole;
    rects.push(
      shape("rect", { class: colour, x: `${at.toFixed(3)}%`, width: `${wide.toFixed(3)}%`, height: "100%" }),
    );
    at += wide;
  }
  bar.replaceChildren(...rects);
}

/** The table of tenants, from the host tier's shares. */
export function showTenants(shares) {
  byId("tenants-empty").hidden = shares.length > 0;
  byId("tenants").parentElement.hidden = shares.length === 0;
  keyed(
    byId("tenants"),
    shares,
    (share) => share.tenant,
    () => element("tr"),
    (row, share) => {
      const quota =
        share.quota_bytes === null
          ? "none"
          : `${bytes(share.quota_bytes)} (${percent(share.used_bytes / share.quota_bytes)})`;
      row.replaceChildren(
        element("th", { scope: "row" }, swatch(tenantClass(share.tenant)), tenantName(share.tenant)),
        ...[bytes(share.used_bytes), bytes(share.leased_bytes), bytes(share.pinned_bytes)].map(number),
        element("td", { class: "number wide" }, quota),
      );
    },
  );
}

/** The table of spaces, from the status. */
export function showSpaces(spaces) {
  byId("spaces-empty").hidden = spaces.length > 0;
  byId("spaces").parentElement.hidden = spaces.length === 0;
  keyed(
    byId("spaces"),
    spaces,
    (space) => space.id,
    () => element("tr"),
    (row, space) => {
      const layout =
        `${space.num_layers} layers × ${space.num_kv_heads} heads × ${space.head_dim}, ${space.dtype}, ` +
        `${bytes(space.block_bytes)} a block`;
      row.replaceChildren(
        element(
          "th",
          { scope: "row", title: space.id },
          swatch(tenantClass(space.tenant)),
          spaceName(space),
          element("span", { class: "sub" }, layout),
        ),
        ...[space.resident_blocks, space.leased_blocks, space.pinned_blocks, space.free_blocks].map((held) =>
          number(count(held)),
        ),
      );
    },
  );
}

/** A cell with a number. */
export function number(text) {
  return element("td", { class: "number" }, text);
}
