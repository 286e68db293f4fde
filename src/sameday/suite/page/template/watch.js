"use strict";
// Looks at data.json every two seconds. Texts become text nodes and pictures are built element by element: nothing that
// comes from a suite is read as markup.

const EVERY = 2000;
const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "line", "text", "circle", "rect", "title"]);
const GIVEN = new Set(["viewBox", "class", "role", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width",
  "height", "data-job"]);
const COLUMNS = ["state", "done", "loss", "samples/s", "GPU", "left", "finish", "took"];

const $ = (id) => document.getElementById(id);
let chosen = null;
let data = null;
const shown = new Map();

function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === "") continue;
    if (key in element) element[key] = value; else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function draw([name, given, content]) {
  if (!DRAWN.has(name)) return document.createTextNode("");
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(given)) if (GIVEN.has(key)) element.setAttribute(key, value);
  for (const child of content) element.append(Array.isArray(child) ? draw(child) : String(child));
  return element;
}

function clock(seconds) {
  const then = new Date(seconds * 1000), today = new Date();
  const hours = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  if (then.toDateString() === today.toDateString()) return hours;
  return `${then.toLocaleDateString([], { month: "short", day: "numeric" })} ${hours}`;
}

const said = (cell) => (cell.time !== undefined ? clock(cell.time) : cell.text ?? "");

// Only what changed is built again: a reader's selection, focus and place stay.
function put(place, value, build) {
  const now = JSON.stringify(value) ?? "";
  if (shown.get(place) === now) return;
  shown.set(place, now);
  $(place).replaceChildren(...build(value));
}

const chip = (state, text) => make("span", { className: `chip s-${state}` }, text ?? state);

function cell(given, column) {
  const children = given.state !== undefined ? [chip(given.state)] : [said(given)];
  if (typeof given.share === "number") {
    children.push(make("progress", { max: 1, value: given.share, "aria-label": "share that is done" }));
  }
  if (given.note) children.push(make("small", {}, given.note));
  return make("td", { className: given.text === "–" ? "none" : "", "data-label": COLUMNS[column] }, ...children);
}

function row(given) {
  const button = make("button", { className: "job", type: "button", "data-job": given.job }, given.job);
  const head = make("th", { scope: "row" }, button, make("small", {}, given.do));
  return make("tr", { "data-job": given.job, className: given.job === chosen ? "chosen" : "" }, head, ...given.cells.map(cell));
}

function tile(given) {
  const value = make("dd", { className: given.mood }, said(given));
  if (given.note) value.append(make("small", { className: given.mood }, given.note));
  return make("div", {}, make("dt", {}, given.name), value);
}

function chart(given) {
  return make("figure", { className: "card" }, make("h3", {}, given.name), ...given.drawn.map(draw));
}

function failure(given) {
  return make("div", {}, make("h3", {}, `${given.job}: `, chip(given.cells[0].state)), make("pre", { className: "why" }, given.why));
}

function gpu(given) {
  const use = typeof given.use === "number"
    ? [`${Math.round(given.use)}%`, make("progress", { max: 100, value: given.use, "aria-label": "use" })] : ["–"];
  return make("tr", {}, make("th", { scope: "row" }, `${given.host} ${given.gpu}`), make("td", {}, given.job), make("td", {}, ...use));
}

function show() {
  document.title = `${data.name} · sameday suite`;
  $("name").textContent = data.name;
  $("out").textContent = data.out;
  $("problem").textContent = data.problem;
  $("problem").hidden = !data.problem;
  put("states", data.states, (states) => states.map((each) => chip(each.state, `${each.jobs} ${each.state}`)));
  put("tiles", data.tiles, (tiles) => tiles.map(tile));
  put("graph", data.graph, (graph) => [draw(graph)]);
  const held = document.activeElement?.closest?.("#jobs [data-job]")?.dataset.job;
  const before = shown.get("rows"), now = JSON.stringify([data.rows, chosen]);
  if (before !== now) {
    shown.set("rows", now);
    $("jobs").tBodies[0].replaceChildren(...data.rows.map(row));
    if (held) [...$("jobs").querySelectorAll("button")].find((each) => each.dataset.job === held)?.focus();
  }
  put("failures", data.rows.filter((each) => each.why), (rows) => rows.map(failure));
  $("time-section").hidden = !data.time;
  if (data.time) put("time", data.time, (time) => [draw(time)]);
  $("curves-section").hidden = !data.charts.length;
  put("legend", data.legend, (legend) => legend.map((each) => make("span", {}, make("i", { className: `dot c${each.colour}` }), each.job)));
  put("charts", data.charts, (charts) => charts.map(chart));
  $("gpus-section").hidden = !data.gpus.length;
  const gpus = JSON.stringify(data.gpus);
  if (shown.get("gpus") !== gpus) {
    shown.set("gpus", gpus);
    $("gpus").tBodies[0].replaceChildren(...data.gpus.map(gpu));
  }
  const names = data.rows.map((each) => each.job);
  if (chosen === null || !names.includes(chosen)) {
    const first = ["failed", "running"].map((state) => data.rows.find((each) => each.cells[0].state === state));
    chosen = (first.find(Boolean) ?? data.rows[0]).job;
  }
  put("chosen", names, (all) => all.map((name) => make("option", { value: name }, name)));
  $("chosen").value = chosen;
}

async function ask(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer;
}

async function log() {
  if (chosen === null) return;
  const name = chosen, text = await (await ask(`log/${encodeURIComponent(name)}`)).text();
  const place = $("log");
  if (name !== chosen || place.textContent === text) return;
  const follow = place.scrollTop + place.clientHeight >= place.scrollHeight - 24 || place.dataset.job !== name;
  place.textContent = text || "nothing yet";
  place.dataset.job = name;
  if (follow) place.scrollTop = place.scrollHeight;
}

async function look() {
  try {
    data = await (await ask("data.json")).json();
    show();
    await log();
    $("live").className = "note";
    $("live").textContent = `as of ${new Date(data.now * 1000).toLocaleTimeString()}, looked at every 2 s`;
  } catch (error) {
    $("live").className = "bad";
    const since = data ? `; this is how it was at ${new Date(data.now * 1000).toLocaleTimeString()}` : "";
    $("live").textContent = `sameday suite watch does not answer (${error.message})${since}`;
  }
}

async function forever() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((done) => setTimeout(done, EVERY));
  }
}

function choose(name) {
  chosen = name;
  if (data) show();
  log().catch(() => {});
}

document.addEventListener("click", (event) => {
  const job = event.target.closest?.("button.job, svg [data-job]");
  if (job) choose(job.dataset.job);
});
$("chosen").addEventListener("change", (event) => choose(event.target.value));
forever();
