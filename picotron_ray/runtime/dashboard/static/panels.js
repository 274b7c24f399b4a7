// One function a section: data in, elements out.
import { at, put, h, cells, number, percent, bytes, seconds, clock, colour, swatch, parts, DASH } from "./dom.js";
import { Chart, CHARTS, timeline, lasted, began } from "./charts.js";

const GOOD = ["running", "finished"], BAD = ["failed", "storage", "fenced", "cut-off"];
const charts = {};
let marks = [], generations = [];

export function head(d) {
  document.title = `${d.run} ${number(d.step)}/${number(d.steps)} – picotron-ray`;
  at("run").textContent = d.run;
  at("state").textContent = d.stopping && !d.done ? "stopping" : d.state;
  at("state").className = `badge ${GOOD.includes(d.state) ? "good" : BAD.includes(d.state) ? "bad" : "warn"}`;
  at("source").textContent = d.source === "live" ? "live, from its coordinator" : `from storage alone, as of ${clock(d.heard_s)}${d.detail ? `: ${d.detail}` : ""}`;
  at("progress").max = d.steps || 1;
  at("progress").value = Math.min(d.step || 0, d.steps || 1);
  put("notes", ...d.notes.map((note) => h("li", {}, note)));
  const rows = [["Step", `${number(d.step)} of ${number(d.steps)}`], ["Loss", number(d.loss)],
    ["Held-out loss", d.baseline_loss ? `${number(d.eval_loss)} (bigram ${number(d.baseline_loss)})` : number(d.eval_loss)],
    ["Tokens/s", number(d.tokens_per_s)], ["MFU", percent(d.mfu_ratio)], ["Goodput", percent(d.goodput_ratio)],
    ["Committed", `step ${number(d.committed)}`], ["Not durable yet", `${number(d.lag_steps)} steps`],
    ["Generation", d.generation ?? DASH], ["Layout", d.layout || DASH], ["Ranks", number(d.ranks)], ["Precision", d.precision ?? DASH]];
  put("figures", ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function curves(d) {
  marks = d.marks;
  for (const [name, [title, form, empty]] of Object.entries(CHARTS)) {
    if (!charts[name]) { charts[name] = new Chart(title, form, empty); charts[name].element.id = `chart-${name}`; at("curves").append(charts[name].element); }
    charts[name].show(d.figures[name] ?? [], d.marks, name === "loss" ? d.figures.eval_loss : []);
  }
  drawTimeline();
}

export function drawTimeline() {
  const place = at("timeline");
  if (place.clientWidth > 40) place.replaceChildren(generations.length ? timeline(place.clientWidth, generations, marks) : h("p", { class: "empty" }, "no generation yet"));
}

export function generationsTable(d) {
  generations = d.generations;
  drawTimeline();
  const now = Date.now() / 1000;
  put("generation-rows", ...[...generations].reverse().slice(0, 100).map((g, place) => cells(g.id, g.layout, number(g.workers), `${number(g.start_step)}–${number(g.end_step)}`,
    began(g.from_s), seconds(lasted(g.from_s, g.to_s ?? (place === 0 && at("source").textContent.startsWith("live") ? now : null))), g.source, h("td", { class: "text" }, g.reason))));
}

export function checkpoints(d) {
  at("lag").textContent = `Committed: step ${number(d.committed)}; ${number(d.lag_steps)} steps are not durable yet${d.uncommitted ? "; storage fails, and the run keeps them in memory" : ""}.`;
  put("commit-rows", ...[...d.commits].reverse().map((c) => cells(number(c.step), clock(c.at_s), bytes(c.bytes), seconds(c.commit_s), seconds(c.stall_s))));
}

export function ranks(d) {
  const mean = d.phases.map((phase) => d.mean_s[phase] ?? 0);
  const total = mean.reduce((a, b) => a + b, 0);
  at("ranks-said").textContent = !total ? "No round of telemetry is known (telemetry.interval_s)."
    : `Mean step ${seconds(total)}: ${d.phases.map((p, i) => [p, mean[i]]).filter(([, v]) => v > 0.005 * total).sort((a, b) => b[1] - a[1]).map(([p, v]) => `${p} ${Math.round((100 * v) / total)} %`).join(", ")}.${d.waits_seen ? "" : " Waits inside passes are not told from computing here, so nobody is known to be slow."}`;
  put("phase-legend", ...d.phases.map((phase, place) => swatch(colour(place), d.waiting.includes(phase) ? `${phase} (waits)` : phase)));
  const most = Math.max(0, ...d.slow.map((row) => row.phase_s.reduce((a, b) => a + (b ?? 0), 0)));
  put("slow-rows", ...d.slow.map((row) => cells(row.rank, row.worker, row.node || DASH, row.ratio ? row.ratio.toFixed(2) : DASH,
    row.phase ? `${row.phase}, +${seconds(row.excess_s)}` : DASH, seconds(row.step_s), h("td", { class: "bar" }, parts(row.phase_s, most, seconds, d.phases)))));
}

export function memory(d) {
  const f = d.fullest, words = [];
  if (f.peak_bytes) words.push(`Fullest rank: peak ${bytes(f.peak_bytes)}${f.device_bytes ? ` of ${bytes(f.device_bytes)}` : ""}${f.allocated_bytes ? `, ${bytes(f.allocated_bytes)} allocated` : ""}.`);
  const predicted = Object.entries(d.predicted).filter(([, v]) => v);
  if (predicted.length) words.push(`Predicted by the planner: ${predicted.map(([k, v]) => `${k} ${bytes(v)}`).join(", ")}.`);
  at("memory-said").textContent = words.join(" ") || "Nothing is known of memory yet.";
  put("memory-legend", ...d.classes.map((kind, place) => swatch(colour(place), kind)));
  const most = Math.max(0, ...d.rows.map((row) => (row.classes ?? []).reduce((a, b) => a + (b ?? 0), 0)));
  put("memory-rows", ...d.rows.map((row) => cells(row.rank, row.worker, bytes(row.peak_bytes),
    row.classes ? h("td", { class: "bar" }, parts(row.classes, most, bytes, d.classes)) : "no step was accounted yet")));
  at("gpus").hidden = !d.gpus.length;
  put("gpu-rows", ...d.gpus.map((g) => cells(g.node.slice(0, 8), g.gpu, percent(g.utilization_ratio), `${bytes(g.used_bytes)} of ${bytes(g.size_bytes)}`, number(g.temperature_c), number(g.power_w))));
}

const LEVELS = { error: "bad", critical: "bad", warning: "warn", stderr: "warn" };
const line = (level, ...words) => h("li", {}, h("span", { class: LEVELS[level] ?? "muted" }, words[0]), ...words.slice(1));

export function findings(d) {
  put("findings", ...(d.findings.length ? d.findings.map((f) => line(f.level, `${f.t ? `${clock(f.t)} ` : ""}${f.level}: `, f.text)) : [h("li", {}, "nothing was found")]));
}

export function events(d) {
  put("events", ...[...d.events].reverse().map((e) => line(e.level, `${clock(e.t)} `, e.level === "info" ? e.text : `${e.level}: ${e.text}`)));
}

export function logLines(d) {
  const said = d.problem || (d.lines.length ? "" : "no lines yet");
  const place = at("log-lines").parentElement, low = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  put("log-lines", ...d.lines.map((e) => line(e.level, `${(e.time ?? "").slice(11, 19)} ${e.level} `,
    `${[e.generation, e.rank === null ? null : `rank ${e.rank}`, e.step === null ? null : `step ${e.step}`, e.worker, e.node].filter(Boolean).join(" ")}: ${e.text}`)));
  if (low) place.scrollTop = place.scrollHeight;
  return said;
}

export function config(d) {
  put("analysis", ...(d.analysis ?? []).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  if (d.problem) put("analysis", h("div", {}, h("dt", {}, "Analysis"), h("dd", {}, d.problem)));
  at("yaml").textContent = (d.yaml ?? "") + (d.cut ? "\n# cut here" : "");
}

export function rankRows(d) {
  put("rank-rows", ...d.rows.map((r) => cells(r.rank, r.worker, r.node || DASH, r.health, Object.entries(r.at).map(([a, p]) => `${a} ${p}`).join(", ") || DASH, number(r.step), r.doing ?? DASH, seconds(r.step_s))));
}
