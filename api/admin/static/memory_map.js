// The arena from its first byte to its last, as a grid of cells: where room is, in how many pieces, and who has
// the rest. A cell is filled as far as its bytes are in use, so that holes show at any zoom.

import { byId, element, keyed, say } from "./elements.js";
import { bytes, count, counted, duration, percent, spaceName, tenantName } from "./format.js";
import { tenantClass, tenantsSeen } from "./tenants.js";
import { STATES, number, swatch } from "./tiers.js";

const AGES = [
  [1, "1 s"],
  [10, "10 s"],
  [60, "1 min"],
  [600, "10 min"],
  [3600, "1 h"],
  [Infinity, "more"],
];
const USED = ["leased", "pinned", "reserved", "idle"];
const ROWS_OF_TABLE = 16;
const GAP = 1;

export class MemoryMap {
  #canvas = byId("map");
  #at = byId("map-at");
  #map = null;
  #grid = null;

  constructor() {
    byId("map-by").addEventListener("change", () => this.draw());
    this.#at.addEventListener("input", () => this.#look(Number(this.#at.value)));
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerdown", (event) => this.#point(event));
    new ResizeObserver(() => this.draw()).observe(this.#canvas);
  }

  /** How many cells are worth asking for. */
  get cells() {
    return this.#canvas.clientWidth < 480 ? 512 : 2048;
  }

  /** Show `/v1/tiers/host/map`, with what `/v1/tiers/{tier}` says of last blocks (null: nobody told). */
  show(map, lastBlocksBytes) {
    this.#map = map;
    byId("map-empty").hidden = true;
    byId("map-shown").hidden = false;
    for (const space of map.spaces) tenantClass(space.tenant);
    this.#at.max = String(Math.max(0, map.count - 1));
    this.#tell(lastBlocksBytes);
    this.#tabulate();
    this.draw();
  }

  /** Say why there is none. */
  refuse(refusal) {
    byId("map-empty").hidden = false;
    byId("map-shown").hidden = true;
    say(byId("map-empty"), `There is no map: ${refusal.message}.`);
  }

  get #by() {
    return document.querySelector("#map-by input:checked").value;
  }

  #tell(lastBlocksBytes) {
    const map = this.#map;
    const free = map.free_bytes;
    const words = [];
    if (map.capacity_bytes === 0) words.push("There is no host memory yet.");
    else if (free === 0) words.push("No room is free: what comes takes the place of what is idle.");
    else if (map.free_runs <= 1) words.push(`${bytes(free)} are free, in one piece.`);
    else {
      words.push(
        `${bytes(free)} are free, in ${counted(map.free_runs, "stretch", "stretches")}; ` +
          `the longest is ${bytes(map.largest_free_run_bytes)}, ${percent(map.largest_free_run_bytes / free)} of it.`,
      );
    }
    words.push(
      lastBlocksBytes === null
        ? "What unfilled last blocks waste is not known: no engine has reported sessions."
        : lastBlocksBytes === 0
          ? "No last block of a session is left unfilled."
          : `Unfilled last blocks of sessions waste ${bytes(lastBlocksBytes)} at most.`,
    );
    words.push(
      map.remainder_bytes === 0
        ? "Blocks fill their extents to the end."
        : `Ends of extents, too short for a block, waste ${bytes(map.remainder_bytes)}.`,
    );
    keyed(
      byId("map-words"),
      words,
      (text) => words.indexOf(text).toString(),
      () => element("p"),
      say,
    );
    this.#canvas.setAttribute(
      "aria-label",
      `Host memory, ${bytes(map.capacity_bytes)} in ${counted(map.count, "cell")} of ${bytes(map.cell_bytes)}`,
    );
  }

  #tabulate() {
    const { count: cells, cell_bytes: size } = this.#map;
    const step = Math.max(1, Math.ceil(cells / ROWS_OF_TABLE));
    const starts = [];
    for (let start = 0; start < cells; start += step) starts.push(start);
    keyed(
      byId("map-rows"),
      starts,
      String,
      () => element("tr"),
      (row, start) => {
        const end = Math.min(cells, start + step);
        const share = (state) => percent(this.#mean(state, start, end));
        const ages = this.#map.cells.age_seconds.slice(start, end).filter((age) => age !== null);
        row.replaceChildren(
          element("th", { scope: "row" }, bytes(start * size)),
          ...[
            percent(USED.reduce((sum, state) => sum + this.#mean(state, start, end), 0)),
            share("leased"),
            share("pinned"),
            share("idle"),
            percent(this.#mean("free", start, end) + this.#mean("vacant", start, end)),
            ages.length > 0 ? duration(ages.reduce((sum, age) => sum + age, 0) / ages.length) : "–",
          ].map(number),
          element("td", {}, this.#mostly(start, end)),
        );
      },
    );
  }

  #mean(state, start, end) {
    const shares = this.#map.cells[state];
    let sum = 0;
    for (let cell = start; cell < end; cell += 1) sum += shares[cell];
    return sum / (end - start);
  }

  #mostly(start, end) {
    const votes = new Map();
    for (const place of this.#map.cells.space.slice(start, end)) {
      if (place !== null) votes.set(place, (votes.get(place) ?? 0) + 1);
    }
    const [first] = [...votes].sort((one, other) => other[1] - one[1]);
    return first === undefined ? "nobody's" : spaceName(this.#map.spaces[first[0]]);
  }

  /** Draw the grid, in the colours and the size of now. */
  draw() {
    const wide = this.#canvas.clientWidth;
    if (this.#map === null || wide === 0 || this.#map.count === 0) return;
    const cells = this.#map.cells;
    const columns = 1 << Math.round(Math.log2(Math.sqrt(this.#map.count * (wide < 480 ? 1 : 2))));
    const rows = Math.ceil(this.#map.count / columns);
    const width = wide / columns;
    const height = Math.min(18, Math.max(10, width * 1.3));
    this.#grid = { columns, width, height };
    const scale = window.devicePixelRatio;
    this.#canvas.height = Math.round(rows * height * scale);
    this.#canvas.width = Math.round(wide * scale);
    this.#canvas.style.height = `${rows * height}px`;
    const context = this.#canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = this.#colours();
    const by = this.#by;
    for (let cell = 0; cell < this.#map.count; cell += 1) {
      const left = (cell % columns) * width;
      const top = Math.floor(cell / columns) * height;
      const room = height - GAP;
      context.fillStyle = cells.vacant[cell] > 0.5 ? colours.vacant : colours.free;
      context.fillRect(left, top, width - GAP, room);
      let low = top + room;
      for (const [colour, share] of this.#layers(by, cell, colours)) {
        const high = share * room;
        context.fillStyle = colour;
        context.fillRect(left, low - high, width - GAP, high);
        low -= high;
      }
    }
    this.#name(by);
    this.#look(Number(this.#at.value));
  }

  /** What fills a cell, from below: colours and shares. */
  #layers(by, cell, colours) {
    const cells = this.#map.cells;
    if (by === "state") return USED.map((state) => [colours[state], cells[state][cell]]);
    const used = USED.reduce((sum, state) => sum + cells[state][cell], 0);
    if (used === 0) return [];
    if (by === "tenant") {
      const place = cells.space[cell];
      return place === null ? [] : [[colours.tenants.get(this.#map.spaces[place].tenant), used]];
    }
    const age = cells.age_seconds[cell];
    return [[age === null ? colours.unknown : colours.ages[AGES.findIndex(([most]) => age < most)], used]];
  }

  #colours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    return {
      ...Object.fromEntries(
        [...STATES.map(([state]) => state), "vacant", "unknown"].map((name) => [name, read(`--${name}`)]),
      ),
      ages: AGES.map((_, step) => read(`--age-${step}`)),
      tenants: new Map(tenantsSeen().map((tenant) => [tenant, read(`--${tenantClass(tenant)}`)])),
    };
  }

  #name(by) {
    const free = [
      ["state-free", "free"],
      ["state-vacant", "no space's"],
    ];
    const named =
      by === "state"
        ? [
            ...STATES.slice(0, -1).map(([state, name, about]) => [`state-${state}`, `${name}: ${about}`]),
            ...free,
          ]
        : by === "age"
          ? [
              ...AGES.map(([most, name], step) => [
                `age-${step}`,
                most === Infinity
                  ? "longer"
                  : `${step === 0 ? "used " : ""}< ${name}${step === 0 ? " ago" : ""}`,
              ]),
              ...free,
            ]
          : [...new Set(this.#map.spaces.map((space) => space.tenant))]
              .map((tenant) => [tenantClass(tenant), tenantName(tenant)])
              .concat(free);
    keyed(
      byId("map-legend"),
      named,
      ([colour, name]) => `${colour} ${name}`,
      ([colour, name]) => element("li", {}, swatch(colour), name),
      () => {},
    );
  }

  #point(event) {
    if (this.#grid === null) return;
    const { columns, width, height } = this.#grid;
    const column = Math.min(columns - 1, Math.max(0, Math.floor(event.offsetX / width)));
    const cell = Math.floor(event.offsetY / height) * columns + column;
    if (cell < 0 || cell >= this.#map.count) return;
    this.#at.value = String(cell);
    this.#look(cell);
  }

  #look(cell) {
    if (this.#map === null || cell >= this.#map.count) return;
    const { cells, cell_bytes: size, spaces, capacity_bytes: capacity } = this.#map;
    const parts = STATES.map(([state]) => [state, cells[state][cell]])
      .filter(([, share]) => share >= 0.005)
      .map(([state, share]) => `${percent(share)} ${state}`);
    if (cells.vacant[cell] >= 0.005) parts.push(`${percent(cells.vacant[cell])} in no space's extent`);
    const place = cells.space[cell];
    const whose = place === null ? [] : [`mostly ${spaceName(spaces[place])}`];
    const age = cells.age_seconds[cell];
    if (age !== null) whose.push(`used ${duration(age)} ago`);
    const range = `${bytes(cell * size)} to ${bytes(Math.min(capacity, (cell + 1) * size))}`;
    const told = [`${range}: ${parts.join(", ")}`, ...whose].join("; ");
    say(byId("map-told"), told);
    this.#at.setAttribute("aria-valuetext", `cell ${count(cell + 1)} of ${count(this.#map.count)}, ${told}`);
  }
}
