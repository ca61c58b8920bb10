"use strict";
const PACKED = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
const DATA = JSON.parse(await new Response(new Blob([PACKED]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
const redraws = [];

// --- small things ----------------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
    else if (name === "style") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");
const percent = (share, digits = 1) => (share === null || share === undefined ? "" : (100 * share).toFixed(digits) + "%");
const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toPrecision(3));
const time = (ms) => (ms >= 1 ? digits(ms) + " ms" : digits(ms * 1e3) + " µs");
const spaced = (shape) => shape.replaceAll(",", ", ");
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const geomean = (values) => Math.exp(values.reduce((sum, v) => sum + Math.log(v), 0) / values.length);

const NUMBER = /^[-+±]?[\d.,]+ ?(%|ms|µs|×|TFLOPS)?$/;

function table(head, rows, label) {
  const textual = head.map((_, i) => rows.some((cells) => cells[i] !== "" && (cells[i] instanceof Node ? !NUMBER.test(cells[i].textContent) : !NUMBER.test(String(cells[i] ?? "")))));
  const kind = (i) => ({ class: textual[i] ? "text" : null });
  const line = (cells) => cells.map((cell, i) => el(i ? "td" : "th", i ? kind(i) : { scope: "row" }, cell instanceof Node ? cell : String(cell ?? "")));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((text, i) => el("th", { scope: "col", ...kind(i) }, text)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, line(cells))))));
}

// --- charts ----------------------------------------------------------------------------------------------------------

const isDark = () => document.documentElement.dataset.theme === "dark";

function look() {
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink").trim();
  const quiet = style.getPropertyValue("--quiet").trim(), line = style.getPropertyValue("--line").trim();
  return {
    font: "system-ui, sans-serif", view: { stroke: line },
    axis: { labelColor: quiet, titleColor: quiet, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: "normal" },
    legend: { labelColor: ink, titleColor: quiet, orient: "top", direction: "horizontal", columns: innerWidth < 640 ? 2 : 6, labelLimit: 240 },
    header: { labelColor: ink, titleColor: quiet }, style: { "guide-label": { fontSize: 12 } },
  };
}

async function chart(holder, spec, datasets, pick) {
  const drawn = structuredClone(spec);
  drawn.config = look();
  drawn.datasets = datasets;
  if (drawn.facet) { // as many panels beside each other as there is room for
    const room = holder.clientWidth || 320, panels = [...new Set(datasets.rows.map((row) => row.panel))];
    const columns = Math.max(1, Math.min(3, panels.length, Math.floor(room / 300)));
    drawn.columns = columns;
    drawn.facet.sort = panels;
    drawn.spec.width = Math.max(190, Math.floor(room / columns) - 75);
  }
  holder.replaceChildren();
  const { view } = await vegaEmbed(holder, drawn, { actions: false, renderer: "canvas", tooltip: { theme: isDark() ? "dark" : "light" } });
  if (pick) view.addEventListener("click", (event, item) => { if (item?.datum?.row !== undefined) pick(item.datum.row); });
  holder.dataset.drawn = "yes";
}

function lazily(holder, draw) { // charts are drawn when they come near the screen, and again when the colours change
  let seen = false;
  const now = () => draw().catch((error) => { holder.textContent = "This chart could not be drawn: " + error.message; throw error; });
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); seen = true; now(); }
  }, { rootMargin: "600px" });
  watch.observe(holder);
  redraws.push(() => seen && holder.isConnected && now());
}

function figure(into, title, text, spec, datasets, pick) {
  const holder = el("div", { class: "chart" });
  into.append(el("h3", {}, title), text ? el("p", { class: "quiet" }, text) : "", holder);
  lazily(holder, () => chart(holder, spec, datasets, pick));
}

// --- the frame ------------------------------------------------------------------------------------------------------

function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let asked = null;
  const button = el("button", { type: "button", on: { click: () => { asked = isDark() ? "light" : "dark"; set(); } } });
  const set = () => {
    document.documentElement.dataset.theme = asked ?? (system.matches ? "dark" : "light");
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
    redraws.forEach((draw) => draw());
  };
  system.addEventListener("change", set);
  set();
  return button;
}

function frame(sections, about, foot) { // what every page has: contents, a choice of colours, and that it is there
  const button = theme();
  document.getElementById("about").append(...about);
  document.getElementById("main").append(...sections.map(([, , made]) => made));
  document.getElementById("contents").append(...sections.map(([id, title]) => el("a", { href: "#" + id }, title)), button);
  document.getElementById("foot").textContent = foot;
  let width = innerWidth;
  addEventListener("resize", () => { if (Math.abs(innerWidth - width) > 60) { width = innerWidth; redraws.forEach((draw) => draw()); } });
  document.documentElement.dataset.ready = "yes";
}
