// The largest, hottest and most shared prefixes, with what can be done to them.

import { byId, element, keyed, say } from "./elements.js";
import { bytes, count, counted, duration, shortHash, spaceName, tenantName } from "./format.js";
import { tenantClass, tenantsSeen } from "./tenants.js";
import { swatch } from "./tiers.js";

/** As many rows as stand beside the other panels; fewer on a phone. */
const FIRST_PAGE = window.innerWidth < 760 ? 8 : 20;
const MOST = 200;

export class Prefixes {
  #api;
  #operate;
  #limit = FIRST_PAGE;
  #asked = 0;
  #shown = new WeakMap();

  /**
   * @param {Api} api
   * @param operate does what is given to it with a token that may, tells how it went, and shows what is so now
   */
  constructor(api, operate) {
    this.#api = api;
    this.#operate = operate;
    for (const id of ["prefix-order", "prefix-tenant"]) {
      byId(id).addEventListener("change", () => {
        this.#limit = FIRST_PAGE;
        operate.refresh();
      });
    }
    byId("prefixes-more").addEventListener("click", () => {
      this.#limit = Math.min(MOST, this.#limit * 2);
      operate.refresh();
    });
  }

  /** Ask for them and show them. */
  async poll() {
    this.#asked += 1;
    const asked = this.#asked;
    const tenant = byId("prefix-tenant").value;
    const page = await this.#api.get("v1/prefixes", {
      order: document.querySelector("#prefix-order input:checked").value,
      tenant: tenant === "*" ? null : tenant.slice(1),
      limit: this.#limit,
    });
    // An answer to an earlier choice may come after that to a later one.
    if (asked === this.#asked) this.#show(page, tenant);
  }

  /** Say why there are none to be shown. */
  refuse(refusal) {
    this.#show({ items: [], next_cursor: null }, "*");
    say(byId("prefixes-empty"), `Prefixes cannot be told: ${refusal.message}.`);
  }

  #show(page, tenant) {
    const empty = byId("prefixes-empty");
    empty.hidden = page.items.length > 0;
    say(
      empty,
      tenant === "*"
        ? "No block is cached yet: prefixes appear as soon as an engine has stored some."
        : "This tenant has no block cached.",
    );
    byId("prefixes").parentElement.hidden = page.items.length === 0;
    byId("prefixes-more").hidden = page.next_cursor === null || this.#limit >= MOST;
    keyed(
      byId("prefixes"),
      page.items,
      (prefix) => `${prefix.space} ${prefix.hash}`,
      () => this.#make(),
      (row, prefix) => this.#update(row, prefix),
    );
    const choices = ["*", ...tenantsSeen().map((name) => `=${name}`)];
    keyed(
      byId("prefix-tenant"),
      choices,
      (choice) => choice,
      (choice) => element("option", { value: choice }, choice === "*" ? "all" : tenantName(choice.slice(1))),
      () => {},
    );
  }

  #make() {
    const row = element(
      "tr",
      {},
      element(
        "th",
        { scope: "row" },
        element("button", { type: "button", class: "hash" }),
        element("span", { class: "sub phone" }),
      ),
      ...[
        "wide",
        "number wide",
        "number wide",
        "number wide",
        "wide",
        "number wide",
        "number wide",
        "number wide",
        "number wide",
      ].map((name) => element("td", { class: name })),
      element(
        "td",
        { class: "actions" },
        element("button", { type: "button", class: "pin" }),
        element("button", { type: "button", class: "evict" }, "Evict…"),
      ),
    );
    row.querySelector(".hash").addEventListener("click", () => this.#copy(this.#shown.get(row)));
    row.querySelector(".pin").addEventListener("click", () => this.#pin(this.#shown.get(row)));
    row.querySelector(".evict").addEventListener("click", () => this.#evict(this.#shown.get(row)));
    return row;
  }

  #update(row, prefix) {
    this.#shown.set(row, prefix);
    const [, tenant, tokens, size, own, tier, shared, leases, hits, idle] = row.children;
    const hash = row.querySelector(".hash");
    say(hash, shortHash(prefix.hash));
    hash.title = `${prefix.hash}: copy it`;
    say(
      row.querySelector(".sub"),
      `${tenantName(prefix.tenant)} · ${counted(prefix.tokens, "token")} · ${counted(prefix.hits, "hit")}`,
    );
    if (tenant.dataset.tenant !== prefix.tenant || tenant.childElementCount === 0) {
      tenant.dataset.tenant = prefix.tenant;
      tenant.replaceChildren(swatch(tenantClass(prefix.tenant)), spaceName(prefix));
    }
    say(tokens, count(prefix.tokens));
    say(size, bytes(prefix.bytes));
    say(own, bytes(prefix.own_bytes));
    say(tier, prefix.tier === "host" && prefix.in_cold ? "host + cold" : prefix.tier);
    say(shared, count(prefix.continuations));
    say(leases, count(prefix.references));
    say(hits, count(prefix.hits));
    say(idle, prefix.idle_seconds === null ? "–" : duration(prefix.idle_seconds));
    const pin = row.querySelector(".pin");
    const pinned = prefix.pins > 0;
    say(pin, pinned ? "Unpin" : "Pin");
    pin.setAttribute("aria-label", `${pinned ? "Unpin" : "Pin"} ${shortHash(prefix.hash)}`);
    row.querySelector(".evict").setAttribute("aria-label", `Evict ${shortHash(prefix.hash)}`);
    row.classList.toggle("pinned", pinned);
  }

  async #copy(prefix) {
    try {
      await navigator.clipboard.writeText(prefix.hash);
      this.#operate.tell(`Copied ${prefix.hash}.`);
    } catch {
      // Not allowed here, as over plain HTTP from elsewhere: then it is to be read.
      this.#operate.tell(prefix.hash);
    }
  }

  #pin(prefix) {
    const pinned = prefix.pins > 0;
    this.#operate.run(pinned ? "Unpinning" : "Pinning", async () => {
      const answer = await this.#api.send(pinned ? "DELETE" : "PUT", `v1/prefixes/${prefix.hash}/pin`, {
        query: { space: prefix.space },
      });
      return `${answer.pinned ? "Pinned" : "Unpinned"} ${shortHash(prefix.hash)}: ${counted(answer.changed_blocks, "block")}.`;
    });
  }

  #evict(prefix) {
    const body = { tier: prefix.tier, spaces: [prefix.space], prefixes: [prefix.hash] };
    this.#operate.run("Evicting", async () => {
      const would = await this.#api.send("POST", "v1/evict", { body: { ...body, dry_run: true } });
      if (would.blocks === 0)
        return `Nothing of ${shortHash(prefix.hash)} may go: what is leased or pinned stays.`;
      const lost =
        would.lost_blocks === 0
          ? "All of them are in another tier, too."
          : `${counted(would.lost_blocks, "block")} of them ${would.lost_blocks === 1 ? "is" : "are"} nowhere else: ` +
            "who asks for them again computes them again.";
      const agreed = await confirmed(
        `This takes ${counted(would.blocks, "block")} (${bytes(would.bytes)}) of ` +
          `${shortHash(prefix.hash)} out of the ${prefix.tier} tier. ${lost}`,
      );
      if (!agreed) return null;
      const went = await this.#api.send("POST", "v1/evict", { body });
      return `Evicted ${counted(went.blocks, "block")} (${bytes(went.bytes)}) of ${shortHash(prefix.hash)}.`;
    });
  }
}

/** Whether it is agreed to, by the dialog that asks. */
function confirmed(words) {
  const dialog = byId("evict-dialog");
  say(byId("evict-words"), words);
  dialog.returnValue = "";
  dialog.showModal();
  byId("evict-cancel").focus();
  return new Promise((resolve) => {
    byId("evict-cancel").onclick = () => dialog.close("");
    byId("evict-do").onclick = () => dialog.close("agreed");
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "agreed"), { once: true });
  });
}
