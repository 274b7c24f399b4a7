// The page: token, stream of sections, questions and buttons.
import { at, put, h } from "./dom.js";
import * as panels from "./panels.js";
import { RankMap } from "./map.js";

const KEY = "picotron-token";
const RETRY_MS = 2000;

function takeToken() {
  const found = /(?:^#|&)token=([\w-]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

let token = takeToken();
let newest = null, held = null; // log lines: pushed ones; those of a question

async function ask(path, body) {
  const request = { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" };
  if (body) Object.assign(request, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, request);
  if (answer.status === 401) login("the token is missing or wrong");
  return answer;
}

async function json(path, body) {
  const answer = await ask(path, body);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? `the server answered ${answer.status}`);
  return found;
}

function login(why) {
  at("login").hidden = false;
  at("page").hidden = true;
  at("state").textContent = "no access";
  at("state").className = "badge bad";
  at("login-said").textContent = why;
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value.trim().replace(/^.*token=/, "");
  at("token").value = "";
  sessionStorage.setItem(KEY, token);
  watch();
});

const map = new RankMap((rank) => { at("rank-details").open = true; at("rank-node").value = ""; at("rank-from").value = rank; showRanks(); });

function showLogs(d) { at("log-said").textContent = panels.logLines(d); }

const RENDER = {
  head: panels.head, map: (d) => map.show(d), curves: panels.curves, timeline: panels.generationsTable, checkpoints: panels.checkpoints,
  ranks: panels.ranks, memory: panels.memory, findings: panels.findings, events: panels.events, config: panels.config, doors: buttons,
  logs: (d) => { newest = d; if (!held) showLogs(d); },
};

function take(name, data) {
  const found = JSON.parse(data);
  if (found.too_large) { console.warn(`section ${name} is too large to be sent`); return; }
  RENDER[name]?.(found);
}

async function read(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
      if (found) take(found[1], found[2]);
    }
  }
}

let watching = false;
async function watch() {
  if (watching) return;
  watching = true;
  for (;;) {
    try {
      const answer = await ask("/api/stream");
      if (answer.status === 401) break;
      if (answer.ok) {
        at("login").hidden = true;
        at("page").hidden = false;
        await read(answer);
      }
    } catch { /* the server is away, or the network: asked again below */ }
    at("state").textContent = "not connected";
    at("state").className = "badge warn";
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  watching = false;
}

let shown = "";
function buttons(d) {
  const text = JSON.stringify(d);
  if (text === shown) return;
  shown = text;
  put("doors", ...d.doors.map((door) => {
    const button = h("button", { type: "button", id: `door-${door.name}`, title: door.why || null }, door.label);
    button.disabled = !door.enabled;
    button.addEventListener("click", () => press(door));
    return button;
  }));
}

async function press(door) {
  const words = { button: door.name };
  const fields = Object.entries(door.fields);
  if (door.asks || fields.length) {
    at("ask-title").textContent = door.label;
    at("ask-text").textContent = door.asks;
    put("ask-fields", ...fields.map(([name, label]) => h("label", {}, `${label} `, h("input", { name, required: "", id: `ask-${name}` }))));
    const dialog = at("ask");
    dialog.returnValue = "";
    dialog.showModal();
    await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
    if (dialog.returnValue !== "yes") return;
    for (const [name] of fields) words[name] = at(`ask-${name}`).value;
  }
  try {
    at("said").textContent = `${door.label}: ${(await json("/api/press", words)).said}`;
  } catch (error) {
    at("said").textContent = `${door.label}: ${error.message}`;
  }
}

async function showRanks() {
  const words = new URLSearchParams({ from: at("rank-from").value || "0", node: at("rank-node").value.trim() });
  try { panels.rankRows(await json(`/api/ranks?${words}`)); } catch (error) { at("said").textContent = error.message; }
}
at("rank-show").addEventListener("click", showRanks);
at("rank-details").addEventListener("toggle", () => { if (at("rank-details").open) showRanks(); });

at("log-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = new URLSearchParams();
  for (const name of ["rank", "level", "since", "grep"]) if (at(`log-${name}`).value) words.set(name, at(`log-${name}`).value.trim());
  try {
    held = await json(`/api/logs?${words}`);
    panels.logLines(held);
    at("log-said").textContent = `${held.lines.length} newest of the lines that pass${held.cut ? "; not all were read" : ""}; “Newest” goes back`;
  } catch (error) { at("log-said").textContent = error.message; }
});
at("log-newest").addEventListener("click", () => { held = null; if (newest) showLogs(newest); });
new ResizeObserver(() => panels.drawTimeline()).observe(at("timeline").parentElement);

if (token) watch(); else login("there is no token in this address");
