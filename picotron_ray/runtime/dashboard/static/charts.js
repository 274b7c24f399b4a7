// Curves and the timeline, as thin SVG.
import { s, h, number, percent, colour, clock, DASH } from "./dom.js";

const HEIGHT = 170, LEFT = 52, RIGHT = 8, TOP = 14, BOTTOM = 22;

function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * unit).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

export class Chart {
  constructor(title, form, empty) {
    this.title = title;
    this.form = form;
    this.empty = empty;
    this.points = [];
    this.dots = [];
    this.marks = [];
    this.plot = h("div", { class: "chart" });
    this.said = h("output", { class: "muted" });
    this.range = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": `Read a step of: ${title}` });
    this.range.addEventListener("input", () => { this.held = true; this.read(); });
    this.element = h("figure", {}, h("figcaption", {}, title), this.plot, this.range, this.said);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(points, marks, dots = []) {
    this.points = points;
    this.marks = marks;
    this.dots = dots;
    this.range.max = Math.max(0, points.length - 1);
    if (!this.held) this.range.value = this.range.max;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width < 40) return;
    this.range.hidden = this.said.hidden = !this.points.length;
    if (!this.points.length) {
      if (this.empty) this.plot.replaceChildren(h("p", { class: "empty" }, this.empty));
      return;
    }
    const all = [...this.points, ...this.dots];
    const xs = this.points.map((p) => p[0]);
    this.low = Math.min(...xs);
    this.high = Math.max(...xs, this.low + 1);
    let bottom = Math.min(...all.map((p) => p[1])), top = Math.max(...all.map((p) => p[1]));
    if (top - bottom < 1e-12) { bottom -= Math.abs(bottom) * 0.05 || 0.5; top += Math.abs(top) * 0.05 || 0.5; }
    this.x = (step) => LEFT + ((width - LEFT - RIGHT) * (step - this.low)) / (this.high - this.low);
    const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (top - value)) / (top - bottom);
    const last = this.points[this.points.length - 1];
    const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
      "aria-label": `${this.title}: ${this.form(last[1])} at step ${last[0]}, from ${this.form(bottom)} to ${this.form(top)}` });
    for (const value of ticks(bottom, top, 4)) {
      svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, this.form(value)));
    }
    for (const step of ticks(this.low, this.high, Math.max(2, Math.floor(width / 110)))) {
      if (step >= this.low) svg.append(s("text", { x: this.x(step), y: HEIGHT - 6, "text-anchor": "middle" }, number(step)));
    }
    for (const mark of this.marks) {
      if (mark.step < this.low || mark.step > this.high) continue;
      const x = this.x(mark.step);
      svg.append(s("g", { class: mark.kind === "failure" ? "failure" : "generation" },
        s("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
        s("text", { x, y: 10, "text-anchor": "middle" }, mark.kind === "failure" ? "!" : "▸"),
        s("title", {}, `step ${mark.step}: ${mark.text}`)));
    }
    svg.append(s("path", { class: "curve", d: this.points.map((p, i) => `${i ? "L" : "M"}${this.x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("") }));
    for (const dot of this.dots) {
      if (dot[0] >= this.low && dot[0] <= this.high) svg.append(s("circle", { class: "dot", cx: this.x(dot[0]), cy: y(dot[1]), r: 3.5 }, s("title", {}, `held-out ${this.form(dot[1])} at step ${dot[0]}`)));
    }
    this.cursor = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    svg.append(this.cursor);
    svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.replaceChildren(svg);
    this.read();
  }

  point(x) {
    let nearest = 0;
    this.points.forEach((p, i) => { if (Math.abs(this.x(p[0]) - x) < Math.abs(this.x(this.points[nearest][0]) - x)) nearest = i; });
    this.range.value = nearest;
    this.held = nearest < this.points.length - 1;
    this.read();
  }

  read() {
    const point = this.points[Number(this.range.value)];
    if (!point || !this.cursor) return;
    this.cursor.setAttribute("x1", this.x(point[0]));
    this.cursor.setAttribute("x2", this.x(point[0]));
    this.range.setAttribute("aria-valuetext", `step ${point[0]}: ${this.form(point[1])}`);
    this.said.replaceChildren(`step ${number(point[0])}: ${this.form(point[1])}`);
  }
}

export const CHARTS = {
  loss: ["Loss, and held-out loss as dots", number, "no step was finished yet"],
  tokens_per_s: ["Throughput in tokens/s", number, "no step was finished yet"],
  mfu_ratio: ["Model FLOPs utilisation", percent, "not known: this device has no published or probed peak, or no round of telemetry has ended"],
  goodput_ratio: ["Goodput: share of the time that undisturbed steps would have taken", percent, "no two steps were finished yet"],
};

// Generations over steps, coloured by layout.
export function timeline(width, generations, marks) {
  const high = Math.max(1, ...generations.map((g) => g.end_step));
  const low = Math.min(...generations.map((g) => g.start_step));
  const layouts = [...new Set(generations.map((g) => g.layout))];
  const x = (step) => 4 + ((width - 8) * (step - low)) / Math.max(1, high - low);
  const svg = s("svg", { viewBox: `0 0 ${width} 66`, role: "img",
    "aria-label": generations.map((g) => `${g.id} ${g.layout} steps ${g.start_step} to ${g.end_step}`).slice(-12).join("; ") });
  for (const g of generations) {
    const from = x(g.start_step), wide = Math.max(1.5, x(g.end_step) - from - 1);
    const words = `${g.id} ${g.layout}`;
    svg.append(s("rect", { x: from, y: 16, width: wide, height: 26, rx: 2, fill: colour(layouts.indexOf(g.layout)) },
      s("title", {}, `generation ${words}: steps ${g.start_step} to ${g.end_step}, ${g.reason}`)));
    const shown = wide > 7.2 * words.length ? words : wide > 7.2 * g.id.length ? g.id : "";
    if (shown) svg.append(s("text", { class: "on", x: from + 4, y: 33 }, shown));
  }
  for (const mark of marks.filter((m) => m.kind === "failure")) {
    svg.append(s("g", { class: "failure" }, s("line", { x1: x(mark.step), x2: x(mark.step), y1: 10, y2: 46 }),
      s("text", { x: x(mark.step), y: 9, "text-anchor": "middle" }, "!"), s("title", {}, `step ${mark.step}: ${mark.text}`)));
  }
  for (const step of ticks(low, high, Math.max(2, Math.floor(width / 110)))) svg.append(s("text", { x: x(step), y: 60, "text-anchor": "middle" }, number(step)));
  return svg;
}

export const lasted = (from, to) => (from && to ? to - from : null);
export const began = (value) => (value ? clock(value) : DASH);
