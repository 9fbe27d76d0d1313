// The details that open below a test.

const unpacked = new Map();

async function detailAt(index) {
  const together = document.querySelectorAll("script.details");
  const place = Math.floor(index / overview.together);
  if (!unpacked.has(place)) unpacked.set(place, unpack(together[place].textContent).then((response) => response.json()));
  return (await unpacked.get(place))[index % overview.together];
}

function showDetail(cell, record, environment, row) {
  const devices = [record.measurement, ...record.other_devices].filter(Boolean);
  const parts = [judgement(record)];
  if (record.out_of_memory) parts.push(outOfMemory(record.out_of_memory));
  for (const measured of devices) parts.push(...device(record, measured, devices.length > 1));
  parts.push(trendSection(row), conditions(record, environment));
  cell.append(el("div", { class: "body" }, ...parts.filter(Boolean)));
}

function judgement(record) {
  if (!record.verdicts.length && !record.improvements.length && !record.missing_baseline) return null;
  let shown = 0;
  const printed = new Set(); // lines of explanations, and commands
  const explained = (verdict) => !verdict.passed && verdict.explanation.length && verdict.reference !== null;
  const compared = new Set(record.verdicts.filter(explained).map((verdict) => verdict.phase));
  const causes = [...new Set(record.verdicts.map((verdict) => verdict.cause).filter(Boolean))];
  const list = record.verdicts.map((verdict) => {
    const item = el("li", { class: verdict.passed ? "passed" : "broken" },
      el("p", null, el("span", { class: "tick", "aria-hidden": "true", text: verdict.passed ? "✓ " : "✗ " }),
        el("span", { class: "aside", text: verdict.passed ? "passed: " : "broken: " }), tight(verdict.text)));
    const reasons = JSON.stringify(verdict.explanation);
    const covered = verdict.reference === null && compared.has(verdict.phase);
    if (verdict.explanation.length && !covered && !printed.has(reasons)) {
      const lines = explanation(verdict);
      item.append(shown++ ? el("details", null, el("summary", { text: verdict.reference === null ? "what was there" : "what changed" }), lines) : lines);
      printed.add(reasons);
    }
    for (const line of verdict.remedy) {
      if (!printed.has(line)) item.append(command(line));
      printed.add(line);
    }
    return item;
  });
  list.push(...record.improvements.map((better) => el("li", { class: "better" }, el("p", { text: `↓ ${tight(better.text)}` }))));
  if (record.missing_baseline) list.push(el("li", null, el("p", { text: "There is no baseline for this environment yet." })));
  return section("Verdicts", ...causes.map((cause) => el("p", { class: "reason", text: tight(cause) })), el("ul", { class: "verdicts" }, ...list));
}

function command(line) {
  const text = line.slice(line.indexOf(": ") + 2);
  const button = el("button", { type: "button", text: "copy", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(button.previousSibling); }
  } });
  return el("p", { class: "command" }, `${line.slice(0, line.indexOf(": "))}: `, el("code", { text }), button);
}

function explanation(verdict) {
  const signed = verdict.reference !== null;
  const columns = [
    { title: signed ? "Change" : "Bytes", of: (row) => (signed ? change(row.bytes) : size(row.bytes)), number: true, header: true },
    ...PLACE,
    ...(signed ? [{ title: "How", of: (row) => row.change }] : []),
  ];
  return longGrid(signed ? "What changed" : "What was there", columns, verdict.explanation,
    (row) => (signed ? (row.bytes > 0 ? "more" : "less") : null));
}

function device(record, measured, several) {
  const title = several ? ` on ${measured.device}` : "";
  const fragments = measured.timeline && reservedOf(measured.timeline);
  return [
    measured.timeline ? section(`Over time${title}`, timeline(measured.timeline)) : null,
    section(`Numbers${title}`, numbers(record, measured)),
    fragments ? section(`Fragmentation${title}`, fragments) : null,
    phases(record, measured, title),
    sharesOf(record, measured, title),
    peaks(measured, title),
    measured.leaks && measured.leaks.length ? section(`Left behind${title}`, longGrid("What was left behind", sites(), measured.leaks)) : null,
    measured.notes.length ? section(`Notes${title}`, el("ul", null, ...measured.notes.map((text) => el("li", { text })))) : null,
  ];
}

function numbers(record, measured) {
  const unused = measured.peak_reserved - measured.peak_allocated;
  return facts([
    ["peak allocated", exact(measured.peak_allocated)],
    ["peak reserved", exact(measured.peak_reserved)],
    ["reserved beyond the allocated peak", unused >= 0 ? `${size(unused)} (${percent(unused, measured.peak_reserved)})` : null],
    ["before the body", exact(measured.allocated_before)],
    ["after the body", exact(measured.allocated_after)],
    ["left behind", measured.leaked === null ? "not judged: the body failed" : exact(measured.leaked)],
    ["cuBLAS workspaces", exact(measured.cublas_workspace)],
    ["held by others, subtracted", measured.stray ? exact(measured.stray) : null],
    ["device", `${measured.device}, ${measured.simulated ? "simulated" : "measured"}`],
  ]);
}

function inOrder(phases) {
  const entries = Object.entries(phases).map(([name, phase]) => ({ name, ...phase }));
  const below = (parent, depth) => entries
    .filter((phase) => (phases[phase.parent] ? phase.parent : null) === parent)
    .flatMap((phase) => [{ ...phase, depth }, ...below(phase.name, depth + 1)]);
  return below(null, 0);
}

function phases(record, measured, title) {
  const rows = inOrder(measured.phases);
  if (!rows.length) return null;
  const highest = Math.max(...rows.map((row) => row.peak_allocated), 1);
  const said = (row, kind) => record.verdicts.find((verdict) => verdict.phase === row.name && verdict.kind === kind
    && verdict.metric === "peak_allocated" && verdict.device === measured.device);
  const before = (row) => said(row, "baseline")?.reference;
  const columns = [
    { title: "Phase", header: true, of: (row) => {
      const name = el("span", { text: row.entered > 1 ? `${row.name} (${row.entered} times)` : row.name });
      name.style.paddingLeft = `${row.depth}em`;
      return name;
    } },
    { title: "Peak", number: true, of: (row) => size(row.peak_allocated) },
    { title: "By category", kind: "bars", of: (row) => bar(partsOf(row.composition), row.peak_allocated, highest, [],
      `${row.name} peaked at ${size(row.peak_allocated)}${describedParts(row.composition) ? `: ${describedParts(row.composition)}` : ""}`) },
    { title: "Limit", number: true, of: (row) => size(said(row, "limit")?.limit), optional: (row) => said(row, "limit") },
    { title: "Baseline", number: true, of: (row) => size(before(row)), optional: (row) => said(row, "baseline") },
    { title: "Change", number: true, of: (row) => (before(row) == null ? "–" : change(row.peak_allocated - before(row))), optional: (row) => said(row, "baseline") },
    { title: "Reserved", number: true, of: (row) => size(row.peak_reserved) },
    { title: "Before", number: true, of: (row) => size(row.allocated_before) },
    { title: "After", number: true, of: (row) => size(row.allocated_after) },
    { title: "cuBLAS", number: true, of: (row) => size(row.cublas_workspace), optional: (row) => row.cublas_workspace },
  ];
  const broken = (row) => record.verdicts.some((verdict) => verdict.phase === row.name && !verdict.passed);
  return section(`Phases${title}`, grid("Memory by phase", columns, rows, (row) => (broken(row) ? "broken" : null)));
}

// The measurement beside its expectations: closed forms, the simulation, the baseline.
function sharesOf(record, measured, title) {
  const judged = measured === record.measurement;
  const sources = [{ name: measured.simulated ? "simulated" : "measured", composition: measured.composition, total: measured.peak_allocated }];
  const expected = Object.entries(measured.expected || {});
  if (expected.length) sources.push({ name: "by closed forms", composition: measured.expected, total: expected.reduce((sum, pair) => sum + pair[1], 0) });
  if (judged && record.prediction && record.prediction.peak_allocated !== undefined) {
    sources.push({ name: `predicted for ${record.prediction.gpu}`, composition: record.prediction.composition, total: record.prediction.peak_allocated });
  }
  if (judged && record.baseline) {
    sources.push({ name: "baseline", composition: record.baseline.composition || {}, total: record.baseline.peak_allocated });
  }
  const used = CATEGORIES.filter((category) => sources.some((source) => (source.composition || {})[category]));
  if (!used.length) return null;
  const scale = Math.max(...sources.map((source) => source.total), 1);
  const lines = sources.map((source) => el("div", { class: "source" }, el("span", { text: source.name }),
    bar(partsOf(source.composition), source.total, scale, [], `${source.name}: ${size(source.total)}: ${describedParts(source.composition)}`),
    el("span", { class: "number", text: size(source.total) })));
  const columns = [
    { title: "Category", header: true, of: (row) => (CATEGORIES.includes(row) ? named(row) : row) },
    ...sources.map((source) => ({ title: source.name, number: true, of: (row) => size((source.composition || {})[row]) })),
    { title: "Share of the peak", number: true, of: (row) => percent(measured.composition[row] || 0, measured.peak_allocated) },
  ];
  const problem = record.prediction && record.prediction.problem;
  return section(`At the peak${title}`, ...lines, grid("Bytes by category", columns, used),
    problem ? el("p", { text: `It could not be predicted: ${problem}` }) : null);
}

function peaks(measured, title) {
  const choices = [{ name: "the whole test", composition: measured.composition, sites: measured.sites, peak: measured.peak_allocated },
    ...inOrder(measured.phases).filter((phase) => phase.sites && phase.sites.length && phase.name !== "call")
      .map((phase) => ({ name: phase.name, composition: phase.composition, sites: phase.sites, peak: phase.peak_allocated }))]
    .filter((choice) => choice.sites.length);
  if (!choices.length) return null;
  const box = el("div");
  const show = (choice) => box.replaceChildren(
    treemap(choice.sites, `What held the ${size(choice.peak)} at the peak of ${choice.name}, by category, module and line`),
    longGrid(`What was live at the peak of ${choice.name}`, sites(), choice.sites));
  const select = el("select", { onchange: (event) => show(choices[event.target.selectedIndex]) },
    ...choices.map((choice) => el("option", { text: `${choice.name}, ${size(choice.peak)}` })));
  show(choices[0]);
  return section(`Who holds the bytes${title}`, el("label", { class: "pick" }, "At the peak of ", select), box);
}

function outOfMemory(said) {
  const place = [said.site, said.operator].filter(Boolean).join(" ");
  return section("Ran out of memory",
    facts([
      ["asked for", exact(said.requested)], ["by", place || null], ["free", exact(said.free)],
      ["of the device", exact(said.total)], ["allocated", exact(said.allocated)], ["reserved", exact(said.reserved)],
      ["reserved and not allocated", exact(said.fragmentation)], ["held elsewhere", said.elsewhere === undefined ? null : exact(said.elsewhere)],
      ["avoided by", said.avoided_by && said.avoided_by.length ? said.avoided_by.join(", ") : null],
    ]),
    said.holders && said.holders.length ? longGrid("What held the memory", sites(), said.holders) : null);
}

// Keywords of the marker whose numbers are bytes.
const SIZES = new Set(["max", "max_reserved", "max_leak", "min_memory", "quota", "phases"]);

function sizesIn(value) {
  if (typeof value === "number") return size(value);
  if (value === null || typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, bytes]) => `${name} ${sizesIn(bytes)}`).join(" and ") || "none";
}

function conditions(record, environment) {
  const sharing = record.sharing;
  const asked = Object.entries(record.expectation).filter(([, value]) => value !== null && value !== false)
    .map(([key, value]) => `${key} ${SIZES.has(key) ? sizesIn(value) : typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
  const device = record.nvml && Object.entries(record.nvml).map(([key, value]) => `${key} ${value}`).join(", ");
  return section("How it ran", facts([
    ["environment", environmentText(environment)],
    ["outcome", record.outcome],
    ["marker", asked || null],
    ["time", record.duration === undefined ? null : seconds(record.duration)],
    ["tests beside it meanwhile", record.beside === undefined ? null : String(record.beside)],
    ["memory it needed", sharing ? (sharing.needed === null ? "not known, so it ran alone" : `${exact(sharing.needed)}, by ${sharing.source}`) : null],
    ["waited", sharing ? `${seconds(sharing.waited)}${sharing.waited_for ? `, for ${sharing.waited_for}` : ""}` : null],
    ["alone when it began", sharing ? (sharing.alone ? "yes" : "no") : null],
    ["borrowed beyond its quota", sharing && sharing.borrowed ? exact(sharing.borrowed) : null],
    ["run more than once", sharing && sharing.notes.length ? sharing.notes.join("; ") : null],
    ["NVML, whole device", device || null],
  ]));
}
