// The page of a recorded snapshot: its summary, events, segments, and the holders of the bytes.

const RUN_LINES = {
  recorded: [{ name: "reserved", color: "var(--mark)" }, { name: "inactive split", color: "var(--mark)", dash: [5, 3] }],
  "what if": [{ name: "reserved, what if", color: "var(--bad)" }, { name: "inactive split, what if", color: "var(--bad)", dash: [2, 3] }],
};
const STACKS = { category: "category", line: "source line", size: "size of block" };

const charts = [];

function order(position) {
  return position.toLocaleString("en-US");
}

function eventText(tape, position, layer) {
  const parts = [`after event ${order(position)} of ${order(tape.length)}: ${size(tape.allocated[position])} allocated`];
  parts.push(`${size(tape.reserved.recorded[position])} reserved, ${size(tape.split.recorded[position])} of it inactive split`);
  const tried = tape.reserved["what if"];
  if (tried) parts.push(position < tried.length ? `what if: ${size(tried[position])} reserved` : "what if: it had run out of memory");
  const kind = position ? tape.kindAt(position - 1) : null;
  if (kind !== null) {
    const did = tape.did[position - 1] & 1 ? "allocated by" : "freed, from";
    parts.push(`a block of ${size(tape.sizes[kind])} ${did} ${placeName(tape.device.places[tape.places[kind]])}`);
  }
  if (layer !== undefined && layer !== null) {
    const bytes = tape.layersAt([position])[layer][0];
    parts.push(`under the pointer: ${tape.grouping.groups[layer].name}, ${size(bytes)}`);
  }
  return parts.join("; ");
}

function sourceOf(tape) {
  return {
    length: tape.length, peak: tape.peak, label: "Allocated and reserved memory", phases: [],
    layers: () => tape.grouping.groups,
    lines: Object.keys(tape.runs).flatMap((name) => RUN_LINES[name]),
    total: (position) => tape.allocated[position],
    sample: (from, to, stretches) => tape.sample(from, to, stretches),
    text: (position, layer) => eventText(tape, position, layer),
  };
}

// The first grouping: by category or line if frames give them for most bytes, else by size.
function firstStack(tape) {
  const known = tape.sitesAt(tape.peak);
  const bytes = (rows) => rows.reduce((sum, row) => sum + row.bytes, 0);
  if (2 * bytes(known.filter((row) => row.category !== "other")) > bytes(known)) return "category";
  return 2 * bytes(known.filter((row) => row.site)) > bytes(known) ? "line" : "size";
}

function overTime(tape, pinnedAt) {
  const first = firstStack(tape);
  tape.group(first);
  const source = sourceOf(tape);
  const drawn = chart(source, pinnedAt);
  charts.push({ tape, ...drawn });
  const key = el("div", null, keyOf(source));
  const select = el("select", { onchange: (event) => {
    tape.group(event.target.value);
    drawn.restack();
    key.replaceChildren(keyOf(source));
  } }, ...Object.entries(STACKS).map(([name, text]) => el("option", { value: name, text, selected: name === first })));
  return section("Over time", el("label", { class: "pick" }, "Stacked by ", select), key, drawn.element);
}

function holders(tape) {
  const box = el("div");
  const moments = [["the peak", tape.peak], ["the end", tape.length]];
  const select = el("select", { onchange: () => show() });
  const show = () => {
    const [name, position] = moments[select.selectedIndex];
    const rows = tape.sitesAt(position);
    const said = `What held the ${size(tape.allocated[position])} at ${name}`;
    box.replaceChildren(rows.length ? el("div", null, treemap(rows, `${said}, by category and line`), longGrid(said, sites(), rows), stacks(rows))
      : el("p", { text: `Nothing was allocated at ${name}.` }));
  };
  const list = () => select.replaceChildren(...moments.map(([name, position]) => el("option", { text: `${name}, after event ${order(position)}, ${size(tape.allocated[position])}` })));
  list();
  show();
  const pin = (position) => {
    moments[2] = ["the event that was clicked", position];
    list();
    select.selectedIndex = 2;
    show();
  };
  return { pin, element: section("Who holds the bytes", el("label", { class: "pick" }, "At ", select), box) };
}

// The stacks of the largest blocks.
function stacks(rows) {
  const known = rows.filter((row) => row.stack.length > 1).slice(0, 5);
  if (!known.length) return null;
  return el("details", null, el("summary", { text: "Calls that led to the largest" }), ...known.map((row) => el("div", { class: "stack" },
    el("p", { text: `${size(row.bytes)}, ${placeName(row)}` }), el("ol", null, ...row.stack.map((line) => el("li", { class: "code", text: line }))))));
}

const USAGE = [
  ["peak allocated", (usage) => usage.peak_allocated], ["peak reserved", (usage) => usage.peak_reserved],
  ["reserved and unused at that peak", (usage) => usage.fragmentation],
  ["largest inactive split", (usage) => usage.largest_split],
  ["segments", (usage) => usage.segments, true],
];

function compared(tape) {
  const runs = Object.entries(tape.runs);
  const shown = ([, of, plain], run) => (plain ? of(run.usage).toLocaleString("en-US") : exact(of(run.usage)));
  const columns = [
    { title: "Number", header: true, of: (row) => row[0] },
    ...runs.map(([name, run]) => ({ title: name, number: true, of: (row) => shown(row, run) })),
    ...(runs.length > 1 ? [{ title: "Change", number: true, of: (row) => {
      const difference = row[1](runs[1][1].usage) - row[1](runs[0][1].usage);
      return row[2] ? `${difference > 0 ? "+" : difference < 0 ? "−" : ""}${Math.abs(difference).toLocaleString("en-US")}` : change(difference);
    } }] : []),
  ];
  return section("Numbers", grid(runs.length > 1 ? "The recording, and what if" : "The recording", columns, USAGE));
}

function segmentsOf(tape) {
  const choices = Object.entries(tape.runs).flatMap(([name, run]) => [
    [`${name}, when most was reserved`, run.segments.peak, name], [`${name}, at the end`, run.segments.end, name],
  ]).filter(([, segments]) => segments.length);
  const box = el("div");
  const select = el("select", { onchange: () => show() }, ...choices.map(([name, segments]) => el("option", { text: `${name}: ${segments.length.toLocaleString("en-US")}` })));
  const show = () => {
    const [, segments, name] = choices[select.selectedIndex];
    box.replaceChildren(segmentList(segments, name === "recorded"));
  };
  if (choices.length) show();
  return section("Segments and fragmentation", fragmentation(momentsOf(tape.runs)),
    choices.length ? el("label", { class: "pick" }, "Segments of ", select) : null, box);
}

function sentences(tape) {
  const usage = tape.device.recorded.usage;
  const rows = tape.sitesAt(tape.peak);
  const peak = tape.allocated[tape.peak];
  const told = [`Memory was highest after event ${order(tape.peak)} of ${order(tape.length)}: ${size(peak)} allocated.`];
  const line = rows.find((row) => row.site || row.operator);
  if (line) told.push(`Most of it was held by ${placeName(line)}: ${size(line.bytes)}, ${percent(line.bytes, peak)}, in ${line.count.toLocaleString("en-US")} ${line.count === 1 ? "block" : "blocks"}.`);
  if (usage.fragmentation) told.push(`When most was reserved, ${size(usage.fragmentation)} of ${size(usage.peak_reserved)} (${percent(usage.fragmentation, usage.peak_reserved)}) lay unused in ${usage.segments.toLocaleString("en-US")} segments.`);
  const left = tape.allocated[tape.length];
  told.push(left ? `${size(left)} were still allocated at the end.` : "Nothing was left at the end.");
  return el("ul", { class: "answers" }, ...told.map((text) => el("li", { text: tight(text) })));
}

function heads() {
  document.title = `GPU memory of ${overview.name}`;
  const conf = (text) => (text ? `PYTORCH_CUDA_ALLOC_CONF=${text}` : "the allocator's default settings");
  const all = overview.devices.reduce((sum, device) => sum + device.events, 0);
  document.getElementById("title").textContent = `GPU memory of ${overview.name}`;
  document.getElementById("environment").textContent = `${events(all)} on ${overview.devices.map((device) => `cuda:${device.device}`).join(", ")}, recorded with ${conf(overview.recorded_conf)}; replayed by the rules of torch ${overview.version}: ${overview.exact_addresses.toLocaleString("en-US")} of ${overview.total.toLocaleString("en-US")} addresses agree`;
  const chip = (text, value, kind) => el("span", { class: `total ${kind || ""}` }, `${text} `, el("strong", { text: value }));
  document.getElementById("totals").append(...overview.devices.flatMap((device) => {
    const name = overview.devices.length > 1 ? `cuda:${device.device} ` : "";
    const usages = [["", device.recorded.usage], ...(device.what_if ? [["what if: ", device.what_if.usage]] : [])];
    return usages.flatMap(([run, usage]) => [
      chip(`${name}${run}peak allocated`, size(usage.peak_allocated)), chip(`${name}${run}peak reserved`, size(usage.peak_reserved)),
      ...(usage.out_of_memory ? [chip(`${name}${run}`, "out of memory", "failed")] : []),
    ]);
  }));
  if (overview.gpu || overview.alloc_conf !== null) {
    const asked = [overview.alloc_conf !== null ? conf(overview.alloc_conf) : null, overview.gpu ? `on ${overview.gpu}${overview.used_elsewhere ? `, ${size(overview.used_elsewhere)} of it used elsewhere` : ""}` : null];
    document.getElementById("question").textContent = `What if: ${asked.filter(Boolean).join(" ")}`;
  }
  document.getElementById("notes").append(...overview.notes.map((text) => el("li", { text: tight(text) })));
}

async function showRecording() {
  heads();
  const packed = document.querySelectorAll("script.details");
  const main = document.getElementById("devices");
  for (const [index, device] of overview.devices.entries()) {
    const tape = new Tape(device, await (await unpack(packed[index].textContent)).json());
    const held = holders(tape);
    main.append(el("div", { class: "body recording" }, heading(2, `cuda:${device.device}, ${events(device.events)}`), sentences(tape),
      overTime(tape, held.pin), compared(tape), segmentsOf(tape), held.element));
  }
  document.getElementById("opening").remove();
}

showRecording().catch((error) => {
  document.getElementById("opening").textContent = `The recording cannot be shown: ${error.message}. It needs a browser from 2023 or later.`;
});
