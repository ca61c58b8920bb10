
function timelineSection(timelines) {
  const section = el("section", { id: "timeline", "aria-labelledby": "timeline-title" }, el("h2", { id: "timeline-title" }, "Timeline"),
    el("p", { class: "quiet" }, "Greys are waits, warm colours a warp's own work, cool ones products in flight; below, when each buffer and slot of shared memory is in use. Scroll or pinch to zoom, drag to move. Recording takes time of its own: some tens of cycles a span."));
  for (const one of timelines) figure(section, `Block ${one.block}`, "", one.spec, { rows: one.rows });
  return section;
}

function figuresSection(found) {
  const section = el("section", { id: "figures", "aria-labelledby": "figures-title" }, el("h2", { id: "figures-title" }, "What it adds up to"),
    el("ul", { class: "facts" }, [...(found.any_in_flight === null ? [] : [[percent(found.any_in_flight), "of the time a product of some role is in flight"]]), ...found.roles.map((one) => [percent(one.stalled), `of ${one.role}'s time is waiting`]),
      [String(found.blocks), `blocks, ${found.cycles.toLocaleString("en")} cycles of each`]].map(([value, text]) => el("li", {}, el("b", {}, value), el("span", {}, text)))));
  section.append(el("h3", {}, "Overlap"), table(["role", "stalled", "own product in flight", "own work beside any product", "beside its own"],
    found.roles.map((one) => [one.role, percent(one.stalled), percent(one.in_flight), percent(one.covered), percent(one.covered_by_own)]), "Overlap by role"));
  for (const one of found.roles)
    section.append(el("h3", {}, one.role), table(["span", "share of its time", "times", "median cycles", "longest"], one.spans.map(([name, share, ...counts]) => [name, percent(share), ...counts.map(String)]), one.role));
  return section;
}

function resourcesSection() {
  const section = el("section", { id: "resources", "aria-labelledby": "resources-title" }, el("h2", { id: "resources-title" }, "Registers and shared memory"),
    table(["role", "warps", "registers a thread"], DATA.roles.map((role) => [role.role, role.warps, role.registers === null ? "as launched" : String(role.registers)]), "Roles"));
  figure(section, "Memory plan", `${DATA.shared.toLocaleString("en")} bytes of shared memory a block. Buffers keep their place as long as the kernel runs; the slots of a ring are used again and again.`, DATA.memory.spec, { rows: DATA.memory.rows });
  section.append(table(["buffer", "kind", "shape", "first byte", "bytes", "written by", "read by", "waited for by", "lives"],
    DATA.buffers.map((one) => [one.buffer, one.kind, one.shape, String(one.offset), String(one.bytes), one.written, one.read, one.waited, one.lives]), "Buffers in shared memory"));
  if (DATA.uses.length)
    section.append(el("h3", {}, "When they are in use"), el("p", { class: "quiet" }, "Ahead: from when the role that fills a slot found it empty until the first reader found it full (the copy is on its way, or waits to be asked for). Held: until the last reader let go of it. Of buffers that are no ring: written, and read. The rest of the time it is free. Slots that are ahead for long hide more latency than there is; slots that are never free are what the producer waits for."),
      table(["buffer", "slots", "ahead or written", "held or read", "free", "uses", "median cycles ahead", "median cycles held", "bytes in use, mean", "of"],
        DATA.uses.map((one) => [one.buffer, String(one.slots), percent(one.ahead), percent(one.held), percent(Math.max(0, 1 - one.ahead - one.held)), String(one.times), one.median_ahead === null ? "" : String(one.median_ahead), String(one.median_held), one.in_use.toLocaleString("en"), one.bytes.toLocaleString("en")]), "When buffers are in use"));
  return section;
}

function main() {
  const sections = [];
  if (DATA.timelines.length) sections.push(["timeline", "Timeline", timelineSection(DATA.timelines)]);
  if (DATA.figures) sections.push(["figures", "Figures", figuresSection(DATA.figures)]);
  sections.push(["resources", "Registers and memory", resourcesSection()]);
  const about = Object.entries(DATA.about).filter(([name]) => name !== "title").map(([name, text]) => `${name} ${text}`).join(" · ");
  frame(sections, [about, DATA.damaged ? ` · ${counted(DATA.damaged, "damaged event")} passed over` : ""], `kernel-registry ${DATA.version}, kreg profile.`);
}

main();
