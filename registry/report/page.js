const FIRST_ROWS = 40;

// --- one op ----------------------------------------------------------------------------------------------------------

function rowsOf(columns, sheet) {
  return columns.case.map((number, row) => {
    const made = { row };
    for (const key of Object.keys(columns)) made[key] = columns[key][row];
    made.caseNumber = number; made.variantNumber = made.variant;
    made.variant = sheet.variants[made.variantNumber]; made.shape = spaced(sheet.cases[number].shape);
    made.speed = made.tflops || 1000 / made.ms;
    return made;
  });
}

function opSection(op, sheets) {
  const body = el("div"), name = slug(op);
  const choose = el("select", { id: name + "-run", on: { change: () => show(Number(choose.value)) } },
    sheets.map((sheet, i) => el("option", { value: i }, `${sheet.run}: ${sheet.cases.length} shapes`)));
  const show = (number) => { body.replaceChildren(); opBody(body, op, sheets[number]); };
  const section = el("section", { id: name, "aria-labelledby": name + "-title" }, el("h2", { id: name + "-title" }, op),
    el("div", { class: "controls" }, el("label", { for: name + "-run" }, "Results", choose)), body);
  show(0);
  return section;
}

function opBody(body, op, sheet) {
  const rows = rowsOf(sheet.rows, sheet);
  const pick = (row) => openCell(op, sheet, rows[row].caseNumber, rows[row].variantNumber);
  body.append(headline(sheet, rows), ...sheet.notes.map((note) => el("p", { class: "quiet" }, note)));
  heat(body, op, sheet, rows);
  const drawn = rows.filter((row) => row.panel !== "" && row.x > 0);
  if (drawn.length) figure(body, `Speed over ${sheet.over.replaceAll("_", " ")}`, "Each point is a shape with the variant's best config; lines follow the fastest shape of about each size. Click a point for its samples.",
    sheet.specs.speed, { rows: drawn }, pick);
  roofline(body, sheet, rows, pick);
  if (sheet.groups) {
    const grouped = rowsOf(sheet.groups, sheet).filter((row) => row.panel !== "" && row.x > 0);
    if (grouped.length) figure(body, "Warp groups", "The best config of each number of consumer warp groups, for variants that declare several.", sheet.specs.groups, { rows: grouped });
  }
  regret(body, op, sheet);
  coverage(body, sheet);
}

function headline(sheet, rows) {
  const best = new Map(), peers = new Set();
  for (const row of rows) {
    if (!sheet.own[row.variantNumber]) peers.add(row.variant);
    else if (row.ratio) best.set(row.caseNumber, Math.max(best.get(row.caseNumber) || 0, row.ratio));
  }
  const facts = [[sheet.cases.length, "shapes"], [sheet.variants.length, "variants"]];
  if (best.size) {
    const ratios = [...best.values()];
    facts.push([geomean(ratios).toFixed(3) + "×", `our best kernel to the best of ${counted(peers.size, "peer")}, geometric mean`]);
    facts.push([percent(ratios.filter((r) => r >= 1).length / ratios.length, 0), "of shapes where ours is the fastest"]);
    facts.push([Math.min(...ratios).toFixed(2) + "×", "the least of these ratios"]);
  }
  const off = sheet.regret.findLast((line) => line.mean !== undefined);
  if (off) facts.push([percent(off.mean), `mean regret of the tables ${off.where}`]);
  return el("ul", { class: "facts" }, facts.map(([value, text]) => el("li", {}, el("b", {}, String(value)), el("span", {}, text))));
}

function tint(ratio) {
  if (!ratio) return {};
  const far = Math.min(1, Math.abs(Math.log2(ratio)) / 0.7);
  return { "--tint": ratio >= 1 ? "var(--good)" : "var(--bad)", "--much": `${(6 + 44 * far).toFixed(0)}%` };
}

function heat(body, op, sheet, rows) {
  const cells = new Map(rows.map((row) => [row.caseNumber + ":" + row.variantNumber, row]));
  const hasPeers = rows.some((row) => row.ratio);
  const id = slug(op + "-" + sheet.run);
  let all = sheet.cases.length <= FIRST_ROWS, wanted = "";
  const tbody = el("tbody");
  const count = el("p", { class: "quiet", role: "status" });
  const more = el("button", { type: "button", on: { click: () => { all = true; fill(); } } }, "Show all shapes");
  const filter = el("input", { id: id + "-filter", type: "search", placeholder: "d=128 causal", autocomplete: "off",
    on: { input: () => { wanted = filter.value.trim().toLowerCase(); fill(); } } });
  const grid = el("table", { role: "grid", "aria-label": `${op}: shapes by variants` }, el("thead", {}, el("tr", { role: "row" }, el("th", { scope: "col", role: "columnheader" }, "shape"),
    sheet.variants.map((name, i) => el("th", { scope: "col", role: "columnheader" }, name, sheet.own[i] ? "" : el("div", { class: "quiet" }, "peer"))))), tbody);

  function cell(number, variant) {
    const row = cells.get(number + ":" + variant), one = sheet.cases[number], name = sheet.variants[variant];
    const mark = { type: "button", tabindex: "-1", "data-case": number, "data-variant": variant };
    if (!row) {
      const why = one.illegal[name] ? "illegal" : "not timed";
      return el("td", { role: "gridcell" }, el("button", { ...mark, class: "none", "aria-label": `${name}: ${why}` }, one.illegal[name] ? "–" : "·"));
    }
    const text = row.ratio ? row.ratio.toFixed(2) : digits(row.speed);
    const fastest = rows.fastest[number] === row;
    const said = `${name}: ${row.ratio ? text + " times the best peer's speed" : text + " " + sheet.unit}, ${time(row.ms)}${fastest ? ", the fastest" : ""}`;
    return el("td", { role: "gridcell" }, el("button", { ...mark, class: fastest ? "fastest" : null, style: tint(row.ratio), "aria-label": said }, text));
  }
  rows.fastest = [];
  for (const row of rows) if (!rows.fastest[row.caseNumber] || row.ms < rows.fastest[row.caseNumber].ms) rows.fastest[row.caseNumber] = row;

  function fill() {
    const words = wanted.split(/[\s,]+/).filter(Boolean);
    const fits = sheet.cases.map((_, i) => i).filter((i) => words.every((word) => spaced(sheet.cases[i].shape).toLowerCase().split(/, /).some((part) => part === word || (!word.includes("=") && part.includes(word)))));
    const shown = all || words.length ? fits : fits.slice(0, FIRST_ROWS);
    tbody.replaceChildren(...shown.map((i) => el("tr", { role: "row" }, el("th", { scope: "row", role: "rowheader" }, spaced(sheet.cases[i].shape)), sheet.variants.map((_, v) => cell(i, v)))));
    const first = tbody.querySelector("button");
    if (first) first.tabIndex = 0;
    count.textContent = `${shown.length} of ${sheet.cases.length} shapes`;
    more.hidden = shown.length >= fits.length;
  }
  tbody.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) { focusCell(tbody, button); openCell(op, sheet, Number(button.dataset.case), Number(button.dataset.variant)); }
  });
  tbody.addEventListener("keydown", (event) => moveInGrid(event, tbody));
  const scale = hasPeers ? el("p", { class: "scale" }, "slower than the best peer", ...[0.62, 0.85, 1.15, 1.62].map((r) => el("i", { style: tint(r) })), "faster") : null;
  body.append(el("h3", {}, hasPeers ? "Speed as a ratio to the best peer" : `Speed in ${sheet.unit}`),
    el("p", { class: "quiet" }, hasPeers ? "1.20 is 1.2 times as fast as the fastest kernel that is not ours; bold is the fastest of the row. Choose a cell for its samples, config, reasons and the command that measures it again." : "No peer was measured here. Choose a cell for its samples."),
    scale ?? "", el("div", { class: "controls" }, el("label", { for: id + "-filter" }, "Only shapes with", filter), more), count,
    el("div", { class: "scroll heat", role: "region", "aria-label": `${op}, shapes by variants`, tabindex: "-1" }, grid));
  fill();
}

function focusCell(tbody, button) {
  for (const other of tbody.querySelectorAll('button[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

function moveInGrid(event, tbody) {
  const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], PageDown: [10, 0], PageUp: [-10, 0], Home: [0, -1e4], End: [0, 1e4] };
  const step = steps[event.key], button = event.target.closest("button");
  if (!step || !button) return;
  event.preventDefault();
  const line = button.closest("tr"), at = [...tbody.rows].indexOf(line), place = [...line.querySelectorAll("button")].indexOf(button);
  const clamp = (value, most) => Math.max(0, Math.min(most, value));
  const row = tbody.rows[clamp(at + step[0], tbody.rows.length - 1)].querySelectorAll("button");
  focusCell(tbody, row[clamp(place + step[1], row.length - 1)]);
}

function roofline(body, sheet, rows, pick) {
  const points = rows.filter((row) => row.intensity && row.tflops);
  if (!points.length) return;
  const limits = DATA.limits[sheet.device], dtypes = new Set(points.map((row) => row.dtype));
  const roof = (DATA.roofs[sheet.device] ?? []).filter((point) => dtypes.has(point.line));
  const text = limits ? `Dashed: what this card was measured to reach, ${digits(limits.gbs)} GB/s of copies and the fastest library products of each dtype. Bytes count every operand once; points above a slope found theirs in the cache. The flat parts are what those products reached under the card's power cap: a kernel may run above them.`
    : "This card's own limits were not measured with these results, so there is no roof.";
  const spec = structuredClone(sheet.specs.roofline);
  if (!limits) spec.layer = spec.layer.slice(2);
  figure(body, "Roofline", text, spec, limits ? { rows: points, roof } : { rows: points }, pick);
}

function regret(body, op, sheet) {
  if (!sheet.regret.length) return;
  const rows = [];
  for (const [where, lost] of Object.entries(sheet.lost)) {
    lost.forEach((value, i) => rows.push({ lost: value, share: (i + 1) / lost.length, where }));
    if (lost.length) rows.push({ lost: 0, share: lost.filter((v) => v <= 0).length / lost.length, where });
  }
  if (rows.length) figure(body, "Dispatch regret", "What the tables in force pick, over the best that these results hold of each shape: the share of shapes within so much. Only shapes that are new to the table say how well it guesses: the others were in the fit.", DATA.specs.regret, { rows });
  const worst = (line) => line.worst_case === undefined ? "" : el("button", { type: "button", on: { click: () => openCell(op, sheet, line.worst_case, null) } }, spaced(sheet.cases[line.worst_case].shape));
  body.append(table(["", "shapes", "mean", "median", "95th percentile", "worst", "the worst shape", "pick not measured"],
    sheet.regret.map((l) => [l.where, l.shapes, percent(l.mean), percent(l.median), percent(l.p95), percent(l.worst), worst(l), l.unmeasured]), "Dispatch regret"));
}

function coverage(body, sheet) {
  if (!sheet.rules.length) return;
  body.append(el("h3", {}, "What each table rule covers"), el("p", { class: "quiet" }, "First match wins. “Measured on” are the sizes of the shapes beside the table; “not measured” names what a rule reaches and no shape does."),
    table(["rule", "when", "what runs", "measured on", "shapes here", "mean regret", "evidence", "not measured"],
      sheet.rules.map((rule) => [rule.rule, rule.when, rule.use, rule.measured, rule.shapes, percent(rule.lost), rule.evidence, rule.beyond.join("; ")]), "Coverage of table rules"));
}

// --- one cell --------------------------------------------------------------------------------------------------------

function spark(samples) {
  const most = Math.max(...samples), least = Math.min(...samples) * 0.97;
  return el("span", { class: "spark", "aria-hidden": "true" }, samples.map((ms) => el("i", { style: { height: `${Math.max(8, (100 * (ms - least)) / (most - least))}%` } })));
}

function openCell(op, sheet, number, variant) {
  const one = sheet.cases[number], name = variant === null ? one.pick?.[0] : sheet.variants[variant];
  const nameOf = (entry) => (typeof entry[0] === "number" ? sheet.variants[entry[0]] : entry[0]);
  const own = one.entries.filter((entry) => nameOf(entry) === name), timed = own.filter((entry) => entry[2] !== null);
  const speed = (ms) => (one.flops ? digits(one.flops / ms / 1e9) + " TFLOPS" : "");
  const dialog = document.getElementById("cell"), before = document.activeElement;
  const samples = (entry) => entry[4].length ? el("span", {}, spark(entry[4]), " ", entry[4].map((ms) => digits(ms * 1e3)).join(" · "), " µs") : "not kept in this page";
  const inner = el("div", { class: "inner" },
    el("button", { type: "button", class: "close", on: { click: () => dialog.close() } }, "Close"),
    el("h2", { id: "cell-title" }, `${op} · ${name} · ${spaced(one.shape)}`));
  if (timed.length) {
    const best = timed[0];
    inner.append(el("p", {}, el("b", {}, time(best[2])), one.flops ? `, ${speed(best[2])}` : "", `; between rounds ±${percent(best[3])}`, best[5].length ? `; SM clock ${[...new Set(best[5])].join("–")} MHz` : ""),
      el("h3", {}, "Samples, one a round"), el("p", {}, samples(best)), el("h3", {}, timed.length > 1 ? `Configs measured: ${timed.length}` : "Config"),
      table(["config", "median", "speed", "spread", "samples"], timed.map((e) => [DATA.configs[e[1]] || "none", time(e[2]), speed(e[2]), "±" + percent(e[3]), samples(e)]), "Configs"));
  } else inner.append(el("p", { class: "warn" }, one.illegal[name] ? `Illegal here: ${one.illegal[name]}` : "Not timed on this shape."));
  const failed = own.filter((entry) => entry[6]);
  if (failed.length) inner.append(el("h3", {}, "Failed"), el("ul", {}, failed.map((e) => el("li", {}, `${DATA.configs[e[1]]}: ${e[6]}`))));
  if (one.pick) inner.append(el("h3", {}, "Dispatch"), el("p", {}, `The tables in force pick ${one.pick[0]}, by ${one.pick[1]}: `, one.pick[2] === null ? "that config was not measured here." : one.pick[2] === 0 ? "the best measured." : `${percent(one.pick[2])} slower than the best measured.`));
  const others = Object.entries(one.illegal).filter(([other]) => other !== name);
  if (others.length) inner.append(el("h3", {}, "Why others were illegal"), el("dl", {}, others.flatMap(([other, why]) => [el("dt", {}, other), el("dd", {}, why)])));
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const how = one.recorded ? [quoted(one.recorded), "--recorded"] : [quoted(one.shape), "--shapes"];
  const stranger = sheet.strangers.includes(name);
  inner.append(el("h3", {}, "Facts"), el("dl", {}, Object.entries(one.facts).flatMap(([fact, value]) => [el("dt", {}, fact), el("dd", {}, String(value))])),
    el("h3", {}, "Measure it again"), el("pre", { tabindex: "0" }, `echo ${how[0]} | ${sheet.rerun.replace("VARIANT", quoted(name ?? "*"))}${stranger ? " --plugin FILE" : ""} ${how[1]} /dev/stdin`),
    stranger ? el("p", { class: "quiet" }, `FILE is the plugin that brings ${name}: it was not among the variants when this page was made.`) : "");
  dialog.replaceChildren(inner);
  dialog.onclose = () => before?.isConnected && before.focus();
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  dialog.showModal();
}

// --- what concerns all ops -------------------------------------------------------------------------------------------

function againstSection(found) {
  const line = (row) => [el("span", {}, `${row.op} `, el("span", { class: "quiet" }, spaced(row.shape))), row.variant,
    el("span", { class: row.change > 0 ? "slower" : "faster" }, (row.change > 0 ? "+" : "") + percent(row.change)), time(row.ms[0]), time(row.ms[1]), "±" + percent(row.noise), row.config, row.source];
  const section = el("section", { id: "against", "aria-labelledby": "against-title" }, el("h2", { id: "against-title" }, "What changed"),
    el("ul", { class: "facts" }, [[found.slower, "got slower"], [found.faster, "got faster"], [found.same, "the same within noise"], [found.only_new, "only in the new results"], [found.only_old, "only in the old"]]
      .map(([value, text]) => el("li", {}, el("b", {}, String(value)), el("span", {}, text)))));
  if (found.machines.length) section.append(el("div", { class: "warn" }, el("p", {}, "The two were measured on different ground, so not every change is a kernel's: "), el("ul", {}, found.machines.map((text) => el("li", {}, text)))));
  const head = ["shape", "variant", "time", "before", "now", "noise", "config", "source"];
  for (const [title, rows] of [["Slower", found.rows.filter((r) => r.change > 0)], ["Faster", found.rows.filter((r) => r.change < 0).reverse()]])
    if (rows.length) section.append(el("h3", {}, title), table(head, rows.slice(0, 200).map(line), title), rows.length > 200 ? el("p", { class: "quiet" }, `and ${rows.length - 200} more`) : "");
  return section;
}

function callsSection(calls) {
  const section = el("section", { id: "calls", "aria-labelledby": "calls-title" }, el("h2", { id: "calls-title" }, "CPU cost of a call"));
  for (const one of calls) {
    const where = `${one.machine.device} host, torch ${one.machine.torch}, ${one.machine.date}. ${one.unit}; bars are medians, lines the middle half.`;
    figure(section, one.name, where, one.spec, { rows: one.rows });
    section.append(el("details", {}, el("summary", {}, "As a table"), table(["call", "median µs", "middle half"], one.rows.map((r) => [r.call, r.median.toFixed(2), `${r.low.toFixed(2)} to ${r.high.toFixed(2)}`]), one.name)));
  }
  return section;
}

function timelinesSection(rows) {
  const waits = (found) => found.map(([name, share]) => `${name.replace("wait ", "")} ${percent(share)}`).join(", ");
  return el("section", { id: "timelines", "aria-labelledby": "timelines-title" }, el("h2", { id: "timelines-title" }, "Inside the kernels"),
    el("p", { class: "quiet" }, "Recorded by kreg profile, which slows a kernel down a little: shares of each role's time. “In flight” is the time in which a matrix product of some role is; “beside a product” the part of a role's own work that runs meanwhile."),
    table(["variant", "shape", "config", "in flight", "role", "stands still", "mostly for", "work beside a product"],
      rows.flatMap((row) => row.roles.map(([role, stalled, covered, longest]) => [row.variant, spaced(row.shape), row.config, row.in_flight === null ? "" : percent(row.in_flight), role, percent(stalled), waits(longest), covered === null ? "" : percent(covered)])), "What each role of recorded kernels does"));
}

function runsSection(runs) {
  const range = (found) => (found ? `${found[1]} (${found[0]} to ${found[2]})` : "");
  return el("section", { id: "runs", "aria-labelledby": "runs-title" }, el("h2", { id: "runs-title" }, "Measured on"),
    el("p", { class: "quiet" }, "Clock, power and temperature while it was measured: the usual value, and the least and most."),
    table(["results", "device", "date", "torch", "triton", "driver", "cudnn", "timed by", "shapes", "SM MHz", "W", "°C", "held back by", "damaged lines"],
      runs.map((r) => [r.name, r.machine.device, r.machine.date, r.machine.torch, r.machine.triton, r.machine.driver, String(r.machine.cudnn ?? ""), r.mode, Object.entries(r.shapes).map(([op, n]) => `${op} ${n}`).join(", "),
        range(r.clocks.sm_mhz), range(r.clocks.watts), range(r.clocks.celsius), Object.entries(r.clocks.throttle ?? {}).map(([why, share]) => `${why} (${percent(share, 0)})`).join(", "), r.bad]), "Versions, clocks and power"));
}

function notesSection(notes) {
  return el("section", { id: "notes", "aria-labelledby": "notes-title" }, el("h2", { id: "notes-title" }, "Passed over"),
    el("div", { class: "warn" }, el("ul", {}, notes.map((note) => el("li", {}, note)))));
}

function main() {
  const sections = [], add = (id, title, made) => sections.push([id, title, made]);
  if (DATA.against) add("against", "What changed", againstSection(DATA.against));
  for (const [op, sheets] of Object.entries(DATA.ops)) add(slug(op), op, opSection(op, sheets));
  if (DATA.calls.length) add("calls", "CPU cost", callsSection(DATA.calls));
  if (DATA.timelines.length) add("timelines", "Inside the kernels", timelinesSection(DATA.timelines));
  if (DATA.runs.length) add("runs", "Measured on", runsSection(DATA.runs));
  if (DATA.notes.length) add("notes", "Passed over", notesSection(DATA.notes));
  const devices = [...new Set(DATA.runs.map((run) => run.machine.device))].join(", ");
  const about = [`${devices} · ${DATA.runs.length} results · drawn ${DATA.made}`];
  if (DATA.notes.length) about.push(" · ", el("a", { href: "#notes" }, counted(DATA.notes.length, "remark") + " on what was passed over"));
  frame(sections, about, `kernel-registry ${DATA.version}, kreg report. Ratios are of median times over shuffled rounds.`);
}

main();
