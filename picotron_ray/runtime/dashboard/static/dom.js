// Elements made of data. What comes from a run is put in as text alone: nothing here takes markup.
const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== null) element.setAttribute(name, String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const cells = (...values) => h("tr", {}, ...values.map((v) => (v instanceof Node && v.tagName === "TD" ? v : h("td", {}, v))));
export const put = (id, ...children) => at(id).replaceChildren(...children);

export const DASH = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined) return DASH;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}
export const percent = (value) => (value === null || value === undefined ? DASH : `${(100 * value).toFixed(1)} %`);
export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${Number(value.toPrecision(3))} ${units[at]}`;
}
export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value < 0.001) return `${Number((1e6 * value).toPrecision(3))} µs`;
  if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Number((value / 3600).toPrecision(3))} h`;
}
export const clock = (value) => (value ? new Date(1000 * value).toLocaleTimeString("en-GB") : DASH);

// Twelve colours on which dark text has a contrast of 4.5 and more, in light and dark.
export const COLOURS = ["#6db3f2", "#f2b15c", "#7fd08a", "#f08b8b", "#c3a3f0", "#e6d25a",
  "#6fd3d0", "#f29ecb", "#b5c47a", "#a9b7c6", "#ffa97a", "#8fb9a8"];
export const colour = (at) => COLOURS[((at % COLOURS.length) + COLOURS.length) % COLOURS.length];

export function swatch(fill, ...words) {
  const box = s("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("rect", { width: 10, height: 10, rx: 2, fill }));
  return h("li", {}, box, ...words);
}

// A bar of parts, side by side; its words say the same.
export function parts(values, total, form, names) {
  const svg = s("svg", { viewBox: "0 0 400 16", preserveAspectRatio: "none", height: 16, role: "img" });
  let x = 0;
  const words = [];
  values.forEach((value, place) => {
    if (!value) return;
    const width = total ? (400 * value) / total : 0;
    svg.append(s("rect", { x: x.toFixed(2), y: 0, width: Math.max(0, width).toFixed(2), height: 16, fill: colour(place) },
      s("title", {}, `${names[place]} ${form(value)}`)));
    x += width;
    words.push(`${names[place]} ${form(value)}`);
  });
  svg.setAttribute("aria-label", words.join(", ") || "nothing is known");
  return svg;
}
