
function timelineSection(timelines) {
  const section = el("section", { id: "timeline", "aria-labelledby": "timeline-title" }, el("h2", { id: "timeline-title" }, "Timeline"),
    el("p", { class: "quiet" }, "Greys are waits, warm colours a warp's own work, cool ones products in flight. Scroll or pinch to zoom, drag to move. Recording takes time of its own: some tens of cycles a span."));
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
  figure(section, "Memory plan", `${DATA.shared.toLocaleString("en")} bytes of shared memory a block. Every buffer lives as long as the kernel does; within it the slots of a ring are used again and again.`, DATA.memory.spec, { rows: DATA.memory.rows });
  section.append(table(["buffer", "kind", "shape", "first byte", "bytes", "written by", "read by", "waited for by", "lives"],
    DATA.buffers.map((one) => [one.buffer, one.kind, one.shape, String(one.offset), String(one.bytes), one.written, one.read, one.waited, one.lives]), "Buffers in shared memory"));
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
