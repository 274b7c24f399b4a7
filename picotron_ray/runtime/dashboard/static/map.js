// Map of ranks, or of nodes where there are many, on a canvas.
import { at, put, swatch, colour, number, DASH } from "./dom.js";

const HEALTH = { well: ["#7fd08a", ""], over: ["#a9b7c6", ""], behind: ["#e6d25a", "…"], slow: ["#ffa97a", "s"], silent: ["#c3a3f0", "?"], failed: ["#f08b8b", "!"] };
const GAP = 2;

export class RankMap {
  constructor(pick) {
    this.canvas = at("map");
    this.by = at("map-by");
    this.by.addEventListener("change", () => this.draw());
    this.canvas.addEventListener("click", (event) => { const cell = this.cellAt(event); if (cell !== null) pick(this.first(cell)); });
    this.canvas.addEventListener("pointermove", (event) => { const cell = this.cellAt(event); this.canvas.title = cell === null ? "" : this.words(cell); });
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(data) {
    this.data = data;
    const wanted = ["health", ...Object.keys(data.axes), "time"];
    if (wanted.join() !== [...this.by.options].map((o) => o.value).join()) {
      const before = this.by.value;
      this.by.replaceChildren(...wanted.map((name) => new Option(name === "health" || name === "time" ? name : `${name} axis`, name)));
      this.by.value = wanted.includes(before) ? before : "health";
    }
    this.draw();
  }

  get count() { return this.data ? this.data.cell_health.length : 0; }
  first(cell) { return this.data.first.length ? this.data.first[cell] : cell; }

  names() { return Object.keys(this.data.health); }

  paint(cell) {
    const by = this.by.value;
    const health = HEALTH[this.names()[this.data.cell_health[cell]]] ?? HEALTH.over;
    if (by === "health") return health;
    if (by === "time") {
      const ratio = this.data.slow[cell];
      return [ratio >= 1.5 ? "#f08b8b" : ratio >= 1.2 ? "#ffa97a" : ratio > 0 ? "#7fd08a" : "#a9b7c6", ratio ? ratio.toFixed(1) : ""];
    }
    const place = this.data.axes[by][cell];
    return place < 0 ? ["#d0d6dc", "*"] : [colour(place), String(place)];
  }

  words(cell) {
    const d = this.data, axes = Object.entries(d.axes).map(([axis, of]) => `${axis} ${of[cell] < 0 ? "several" : of[cell]}`);
    const who = d.level === "rank" ? `rank ${cell} on ${d.node_names[d.node[cell]] ?? "a node that is not known"}` : `${d.labels[cell]}: ${d.sizes[cell]} ranks from ${d.first[cell]}`;
    const slow = d.slow[cell] ? `, ${d.slow[cell]} of the median's time` : "";
    return `${who}: ${this.names()[d.cell_health[cell]]}${slow}${axes.length ? ` (${axes.join(", ")})` : ""}`;
  }

  draw() {
    if (!this.data) return;
    const width = this.canvas.clientWidth, count = Math.max(1, this.count);
    if (width < 20) return;
    const size = Math.max(6, Math.min(46, Math.floor(Math.sqrt((width * 260) / count))));
    this.columns = Math.max(1, Math.floor(width / size));
    this.size = size;
    const height = Math.ceil(count / this.columns) * size + 2;
    const dense = window.devicePixelRatio || 1;
    this.canvas.width = width * dense;
    this.canvas.height = height * dense;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(dense, dense);
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${Math.max(8, Math.min(12, size - 8))}px system-ui, sans-serif`;
    for (let cell = 0; cell < this.count; cell += 1) {
      const [fill, letter] = this.paint(cell);
      const x = (cell % this.columns) * size, y = Math.floor(cell / this.columns) * size;
      context.fillStyle = fill;
      context.fillRect(x, y, size - GAP, size - GAP);
      if (size < 12) continue;
      context.fillStyle = "#10151b";
      const label = size >= 26 && this.data.level === "rank" ? `${cell}${letter ? ` ${letter}` : ""}` : letter;
      if (label) context.fillText(label, x + (size - GAP) / 2, y + (size - GAP) / 2, size - GAP - 2);
    }
    this.legend();
  }

  legend() {
    const d = this.data, by = this.by.value;
    const counts = Object.entries(d.health).filter(([, many]) => many);
    const said = counts.map(([name, many]) => `${number(many)} ${name}`).join(", ") || "no rank yet";
    const what = d.level === "rank" ? "one cell a rank" : `one cell a ${d.level}`;
    at("map-said").textContent = `${number(d.ranks)} ranks on ${number(d.nodes)} nodes, ${what}: ${said}`;
    this.canvas.setAttribute("aria-label", `Map of ranks. ${at("map-said").textContent}`);
    if (by === "health") put("map-legend", ...counts.map(([name, many]) => swatch(HEALTH[name][0], `${name} ${HEALTH[name][1]} ${number(many)}`)));
    else if (by === "time") put("map-legend", swatch("#7fd08a", "own time below 1.2 of the median"), swatch("#ffa97a", "1.2 and more"), swatch("#f08b8b", "1.5 and more"), swatch("#a9b7c6", "not among the slowest that are told"));
    else {
      const places = [...new Set(d.axes[by])].sort((a, b) => a - b);
      put("map-legend", ...places.slice(0, 24).map((p) => swatch(p < 0 ? "#d0d6dc" : colour(p), p < 0 ? "several" : `${by} ${p}`)), ...(places.length > 24 ? [swatch("#ffffff00", `and ${places.length - 24} more ${DASH} the number is in the cell`)] : []));
    }
  }

  cellAt(event) {
    const cell = Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    return event.offsetX < this.columns * this.size && cell < this.count ? cell : null;
  }
}
