// A chart over time: areas on each other, with axes that say their unit. SVG of its own, no library: two charts of a
// few hundred points need none.

import { element, say, shape } from "./elements.js";
import { swatch } from "./tiers.js";
import { duration } from "./format.js";

const HEIGHT = 168;
const MARGIN = { top: 10, right: 8, bottom: 20, left: 46 };
const LEAST_SPAN = 120;
/** Of an axis that goes as far as its values: half of it is a whole number, too. */
const LEAST_MOST = 10;

/** A value that is round and no smaller: 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

export class TimeChart {
  #figure;
  #series;
  #format;
  #most;
  #points = [];
  #svg = shape("svg", { class: "chart", role: "img", height: HEIGHT });
  #summary = element("p", { class: "summary" });
  #told = element("output", { class: "told" });
  #empty = element("p", { class: "empty" });

  /**
   * @param {Element} figure where it is drawn
   * @param {Array<{key: string, name: string}>} series from the lowest; the class of each is its key
   * @param {(value: number) => string} format says a value with its unit
   * @param {number|null} most of the axis; null: as it comes
   * @param {string} empty what is said where there is nothing to draw
   */
  constructor(figure, series, format, most, empty) {
    this.#figure = figure;
    this.#series = series;
    this.#format = format;
    this.#most = most;
    say(this.#empty, empty);
    const legend = element(
      "ul",
      { class: "legend" },
      ...(series.length > 1 ? series : []).map(({ key, name }) => element("li", {}, swatch(key), name)),
    );
    figure.replaceChildren(
      this.#summary,
      this.#svg,
      this.#empty,
      element("figcaption", {}, legend, this.#told),
    );
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#unpoint());
    new ResizeObserver(() => this.#draw()).observe(figure);
  }

  /**
   * @param {Array<{at: number, values: Record<string, number>|null}>} points by time in seconds; null: a gap
   * @param {string} summary what they come to, in words
   */
  show(points, summary) {
    this.#points = points;
    say(this.#summary, summary);
    this.#svg.setAttribute("aria-label", `${summary} Over the last ${duration(this.#span)}.`);
    this.#draw();
  }

  get #span() {
    const first = this.#points[0]?.at ?? 0;
    return Math.max(LEAST_SPAN, (this.#points.at(-1)?.at ?? 0) - first);
  }

  #scales() {
    const wide = Math.max(120, this.#figure.clientWidth);
    const inner = wide - MARGIN.left - MARGIN.right;
    const deep = HEIGHT - MARGIN.top - MARGIN.bottom;
    const end = this.#points.at(-1)?.at ?? 0;
    const most =
      this.#most ??
      roundUp(
        Math.max(
          LEAST_MOST,
          ...this.#points.map(({ values }) =>
            values === null ? 0 : this.#series.reduce((sum, { key }) => sum + values[key], 0),
          ),
        ),
      );
    return {
      wide,
      most,
      x: (at) => MARGIN.left + inner * (1 - (end - at) / this.#span),
      y: (value) => MARGIN.top + deep * (1 - Math.min(1, value / most)),
    };
  }

  #draw() {
    const some = this.#points.some(({ values }) => values !== null);
    this.#empty.hidden = some;
    this.#svg.classList.toggle("gone", !some);
    if (!some) return;
    const { wide, most, x, y } = this.#scales();
    this.#svg.setAttribute("viewBox", `0 0 ${wide} ${HEIGHT}`);
    this.#svg.setAttribute("width", wide);
    const parts = [];
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const level = y(most * share);
      parts.push(
        shape("line", { class: "rule", x1: MARGIN.left, x2: wide - MARGIN.right, y1: level, y2: level }),
      );
      if ((share * 2) % 1 === 0) {
        parts.push(
          shape(
            "text",
            { class: "tick", x: MARGIN.left - 6, y: level + 4, "text-anchor": "end" },
            this.#format(most * share),
          ),
        );
      }
    }
    const end = this.#points.at(-1).at;
    for (const share of [0, 0.5, 1]) {
      const text = share === 0 ? "now" : `−${duration(this.#span * share)}`;
      const anchor = share === 0 ? "end" : share === 1 ? "start" : "middle";
      parts.push(
        shape(
          "text",
          { class: "tick", x: x(end - this.#span * share), y: HEIGHT - 5, "text-anchor": anchor },
          text,
        ),
      );
    }
    for (const run of this.#runs()) parts.push(...this.#areas(run, x, y));
    this.#svg.replaceChildren(...parts);
  }

  /** The points between gaps. */
  #runs() {
    const runs = [[]];
    for (const point of this.#points) {
      if (point.values === null) runs.push([]);
      else runs.at(-1).push(point);
    }
    return runs.filter((run) => run.length > 0);
  }

  #areas(run, x, y) {
    let below = run.map(() => 0);
    const made = [];
    for (const { key } of this.#series) {
      const above = run.map(({ values }, place) => below[place] + values[key]);
      const top = run.map(({ at }, place) => `${x(at).toFixed(1)},${y(above[place]).toFixed(1)}`);
      const foot = run.map(({ at }, place) => `${x(at).toFixed(1)},${y(below[place]).toFixed(1)}`).reverse();
      made.push(shape("polygon", { class: `area ${key}`, points: [...top, ...foot].join(" ") }));
      made.push(shape("polyline", { class: `line ${key}`, points: top.join(" ") }));
      below = above;
    }
    return made;
  }

  #point(event) {
    const { wide, x } = this.#scales();
    const at = (event.offsetX * wide) / this.#svg.clientWidth;
    const known = this.#points.filter(({ values }) => values !== null);
    if (known.length === 0) return;
    const near = known.reduce((best, point) =>
      Math.abs(x(point.at) - at) < Math.abs(x(best.at) - at) ? point : best,
    );
    this.#svg.querySelector(".cursor")?.remove();
    const place = x(near.at);
    this.#svg.append(
      shape("line", { class: "cursor", x1: place, x2: place, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
    );
    const ago = this.#points.at(-1).at - near.at;
    const values = this.#series.map(({ key, name }) => `${name} ${this.#format(near.values[key])}`);
    say(this.#told, `${ago < 1 ? "now" : `${duration(ago)} ago`}: ${values.join(", ")}`);
  }

  #unpoint() {
    this.#svg.querySelector(".cursor")?.remove();
    say(this.#told, "");
  }
}
