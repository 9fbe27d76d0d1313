// The allocated bytes of a test over time, stacked by category, with phases as bands.

const LINES = {
  reserved: { name: "reserved", color: "var(--mark)" },
  split: { name: "inactive split", color: "var(--mark)", dash: [5, 3] },
};

function timeline(line) {
  const names = CATEGORIES.filter((category) => line.categories[category]);
  const totals = line.positions.map((_, i) => names.reduce((sum, category) => sum + line.categories[category][i], 0));
  const peak = highestOf(totals);
  const known = Object.keys(LINES).filter((name) => line[name]);
  // The sample at a position: the last one that is not after it.
  const at = (position) => {
    let index = line.positions.findIndex((one) => one > position);
    index = (index < 0 ? totals.length : index) - 1;
    return Math.max(0, index);
  };
  const source = {
    length: line.events, peak: line.positions[peak], label: "Allocated memory", phases: line.phases,
    layers: () => names.map((name) => ({ name, color: categoryColor(name) })),
    lines: known.map((name) => LINES[name]),
    total: (position) => totals[at(position)],
    sample: () => ({
      positions: line.positions, layers: names.map((name) => line.categories[name]), lines: known.map((name) => line[name]),
    }),
    text: (position, layer) => sampleText(line, totals, at(position), layer === undefined || layer === null ? null : names[layer]),
  };
  return el("div", null, keyOf(source), chart(source).element);
}

function sampleText(line, totals, index, pointed) {
  const [place, bytes] = line.blocks[index];
  const parts = CATEGORIES.filter((category) => (line.categories[category] || [])[index])
    .map((category) => `${category} ${size(line.categories[category][index])}`).join(", ");
  const did = place < 0 ? "" : `; ${size(Math.abs(bytes))} ${bytes > 0 ? "allocated by" : "freed, from"} ${line.places[place]}`;
  const others = Object.keys(LINES).filter((name) => line[name]).map((name) => `, ${LINES[name].name} ${size(line[name][index])}`).join("");
  const under = pointed ? `; under the pointer: ${pointed}, ${size(line.categories[pointed][index])}` : "";
  return `after event ${line.positions[index].toLocaleString("en-US")} of ${line.events.toLocaleString("en-US")}: ${size(totals[index])} allocated${parts ? ` (${parts})` : ""}${others}${did}${under}`;
}

// The segments at the peak, when most was reserved, and at the end; null if not recorded.
function reservedOf(line) {
  if (!line.reserved || !line.split) return null;
  const names = CATEGORIES.filter((category) => line.categories[category]);
  const totals = line.positions.map((_, i) => names.reduce((sum, category) => sum + line.categories[category][i], 0));
  const moment = (name, index) => {
    const [reserved, allocated, split] = [line.reserved[index], totals[index], line.split[index]];
    return { name, reserved, allocated, split, cached: Math.max(0, reserved - allocated - split) };
  };
  return fragmentation([
    moment("at the peak", highestOf(totals)), moment("when most was reserved", highestOf(line.reserved)), moment("at the end", totals.length - 1),
  ]);
}
