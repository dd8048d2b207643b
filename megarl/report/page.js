"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const byId = (id) => document.getElementById(id);
const specs = read("specs");
const views = new Map();

/* Colours: the system's choice until the button is pressed. */
const system = window.matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
function scheme() { return chosen ?? (system.matches ? "dark" : "light"); }
function chartConfig() {
  const style = getComputedStyle(document.documentElement);
  const [text, quiet, grid] = ["--text", "--quiet", "--grid"].map((name) => style.getPropertyValue(name).trim());
  return {
    background: null, font: "system-ui, sans-serif", view: { stroke: null },
    axis: { labelColor: quiet, titleColor: text, gridColor: grid, domainColor: quiet, tickColor: quiet, labelFontSize: 12, titleFontSize: 13, titleFontWeight: 500 },
    legend: { labelColor: text, titleColor: text, labelFontSize: 12 },
  };
}

/* Which runs are shown. */
function shownRuns() { return [...document.querySelectorAll("#shown input:checked")].map((box) => box.value); }
function applyShown() {
  const all = shownRuns(), one = byId("detail").value;
  for (const [key, view] of views) {
    const detail = document.querySelector(`[data-figure="${key}"]`).hasAttribute("data-detail");
    if (view.signal && key !== "scaling") view.signal("shown", detail ? [one] : all).runAsync();
  }
  for (const label of document.querySelectorAll(".one")) label.textContent = "· " + one;
}

async function draw() {
  document.documentElement.dataset.scheme = scheme();
  const button = byId("scheme");
  button.setAttribute("aria-pressed", String(scheme() === "dark"));
  for (const holder of document.querySelectorAll(".chart")) {
    const key = holder.dataset.figure;
    views.get(key)?.finalize();
    const result = await vegaEmbed(holder, specs[key], { actions: false, renderer: "svg", config: chartConfig(), tooltip: { theme: scheme() } });
    views.set(key, result.view);
  }
  applyShown();
  document.documentElement.dataset.ready = "yes";
}

async function save(key, kind) {
  const url = await views.get(key).toImageURL(kind, 2);
  const link = document.createElement("a");
  link.href = url;
  link.download = `${key}.${kind}`;
  link.click();
}

byId("scheme").addEventListener("click", () => { chosen = scheme() === "dark" ? "light" : "dark"; draw(); });
system.addEventListener("change", () => { if (chosen === null) draw(); });
byId("shown").addEventListener("change", applyShown);
byId("detail").addEventListener("change", applyShown);
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-save]");
  if (button) save(button.dataset.of, button.dataset.save);
});

/* Tokens. */
const dumps = read("tokens").filter((dump) => dump.responses.length > 0);
const [runBox, stepBox, responseBox, text] = ["token-run", "token-step", "token-response", "token-text"].map(byId);
let current = -1;
function fill(box, labels) {
  box.replaceChildren(...labels.map(([value, label]) => Object.assign(document.createElement("option"), { value, textContent: label })));
}
function dump() { return dumps.find((one) => one.run === runBox.value && String(one.step) === stepBox.value); }
function response() { return dump().responses[Number(responseBox.value)]; }
function measure() { return document.querySelector("#shade input:checked").value; }
function fillSteps() {
  fill(stepBox, dumps.filter((one) => one.run === runBox.value).map((one) => [String(one.step), String(one.step)]));
  fillResponses();
}
function fillResponses() {
  fill(responseBox, dump().responses.map((one, i) => [String(i), `${i + 1} (prompt ${one.group + 1}, reward ${one.reward})`]));
  showResponse();
}
function showResponse() {
  const shown = response();
  byId("token-prompt").textContent = shown.prompt;
  const marks = new Set(shown.selected ?? []);
  text.replaceChildren(...shown.tokens.flatMap((token, i) => {
    const span = document.createElement("span");
    span.className = "token" + (marks.has(i) ? " selected" : "");
    span.id = `token-${i}`;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    span.textContent = token === "" ? "␀" : token.replaceAll("\n", "⏎");
    return token.includes("\n") ? [span, document.createTextNode("\n")] : [span];
  }));
  if (shown.length > shown.tokens.length) {
    text.append(Object.assign(document.createElement("span"), { className: "break", textContent: ` … (${shown.length} tokens in all)` }));
  }
  current = -1;
  text.removeAttribute("aria-activedescendant");
  byId("token-info").textContent = "";
  shade();
}
function shade() {
  const shown = response(), name = measure(), values = shown[name];
  const marked = shown.selected === null ? "this loss selects no tokens" : `${shown.selected.length} selected tokens are bold and underlined`;
  if (!values) {
    text.querySelectorAll(".token").forEach((span) => { span.style.background = ""; });
    byId("token-scale").textContent = `No ${name} was measured at this step; ${marked}.`;
    return;
  }
  const most = values.reduce((peak, value) => Math.max(peak, Math.abs(value)), 1e-12);
  text.querySelectorAll(".token").forEach((span, i) => {
    const colour = values[i] < 0 ? "--shade-negative" : "--shade";
    span.style.background = `rgba(var(${colour}), ${(0.6 * Math.abs(values[i]) / most).toFixed(3)})`;
  });
  const sign = values.some((value) => value < 0) ? "orange is positive, blue negative; " : "";
  byId("token-scale").textContent = `Full shade is ${name} ${most.toPrecision(3)}${name === "entropy" ? " nats" : ""}; ${sign}${marked}.`;
}
function choose(i) {
  const shown = response();
  if (i < 0 || i >= shown.tokens.length) return;
  if (current >= 0) {
    const before = byId(`token-${current}`);
    before.classList.remove("current");
    before.setAttribute("aria-selected", "false");
  }
  current = i;
  const span = byId(`token-${i}`);
  span.classList.add("current");
  span.setAttribute("aria-selected", "true");
  text.setAttribute("aria-activedescendant", span.id);
  span.scrollIntoView({ block: "nearest" });
  const number = (name, unit) => shown[name] && shown[name][i] !== null ? `${name} ${shown[name][i]}${unit}` : null;
  const parts = [`Token ${i + 1} of ${shown.tokens.length} ${JSON.stringify(shown.tokens[i])}`, number("entropy", " nats"), number("covariance", ""), number("probability", "")];
  if ((shown.selected ?? []).includes(i)) parts.push("selected");
  byId("token-info").textContent = parts.filter(Boolean).join(", ");
}
if (dumps.length > 0) {
  byId("token-view").hidden = false;
  fill(runBox, [...new Set(dumps.map((one) => one.run))].map((name) => [name, name]));
  runBox.addEventListener("change", fillSteps);
  stepBox.addEventListener("change", fillResponses);
  responseBox.addEventListener("change", showResponse);
  byId("shade").addEventListener("change", shade);
  text.addEventListener("click", (event) => {
    const span = event.target.closest(".token");
    if (span) choose(Number(span.id.slice(6)));
  });
  text.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const shown = response().tokens.length;
    const goal = event.key === "Home" ? 0 : event.key === "End" ? shown - 1 : event.key in moves ? current + moves[event.key] : null;
    if (goal === null) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(shown - 1, goal)));
  });
  fillSteps();
}
draw();
