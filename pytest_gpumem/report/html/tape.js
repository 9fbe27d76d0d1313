// The events of a recorded device: allocated, reserved and split bytes, and where they come from.

const MOST_LAYERS = 9;
const OTHERS = "var(--unknown)";

// The running sums of a column: the bytes at the start, then their change by each event.
function summed(changes) {
  const sums = new Float64Array(Math.max(changes.length, 1));
  let sum = 0;
  for (let i = 0; i < changes.length; i++) sums[i] = sum += changes[i];
  return sums;
}

class Tape {
  constructor(device, columns) {
    this.device = device;
    this.length = device.events;
    // For each kind of block its bytes, and the number of the line that allocated it.
    this.sizes = Float64Array.from(device.kinds, ([bytes]) => bytes);
    this.places = Uint32Array.from(device.kinds, ([, place]) => place);
    this.did = Uint32Array.from(columns.blocks);
    this.start = new Int32Array(this.sizes.length);
    for (const [kind, count] of device.start) this.start[kind] = count;
    this.allocated = new Float64Array(this.length + 1);
    this.allocated[0] = this.start.reduce((sum, count, kind) => sum + count * this.sizes[kind], 0);
    for (let i = 0; i < this.length; i++) {
      const did = this.did[i];
      const change = did === 0 ? 0 : did & 1 ? this.sizes[did >> 1] : -this.sizes[(did >> 1) - 1];
      this.allocated[i + 1] = this.allocated[i] + change;
    }
    this.peak = highestOf(this.allocated);
    this.runs = { recorded: device.recorded, ...(device.what_if ? { "what if": device.what_if } : {}) };
    this.reserved = {};
    this.split = {};
    for (const [index, name] of Object.keys(this.runs).entries()) {
      this.reserved[name] = summed(columns.reserved[index]);
      this.split[name] = summed(columns.split[index]);
    }
    this.grouping = null;
  }

  // The kind of the block that event `index` allocated or freed, else null.
  kindAt(index) {
    const did = this.did[index];
    return did ? (did - 1) >> 1 : null;
  }

  // The number of live blocks of each kind after a number of events.
  liveAt(position) {
    const counts = Int32Array.from(this.start);
    for (let i = 0; i < position; i++) {
      const did = this.did[i];
      if (did) counts[(did - 1) >> 1] += did & 1 ? 1 : -1;
    }
    return counts;
  }

  // Rows of a table of the live blocks then, by line, most bytes first.
  sitesAt(position) {
    const rows = new Map();
    this.liveAt(position).forEach((count, kind) => {
      if (count <= 0) return;
      const [bytes, place] = [this.sizes[kind], this.places[kind]];
      if (!rows.has(place)) rows.set(place, { ...this.device.places[place], bytes: 0, count: 0, each: bytes });
      const row = rows.get(place);
      row.bytes += bytes * count;
      row.count += count;
      if (row.each !== bytes) row.each = null;
    });
    return [...rows.values()].sort((a, b) => b.bytes - a.bytes);
  }

  // Stack by `what`: category, line or size. The groups with most bytes at the peak are layers.
  group(what) {
    const { places } = this.device;
    const names = {
      category: () => places.map((place) => place.category),
      line: () => places.map(placeName),
      size: () => null,
    }[what]();
    const nameOf = (kind) => (names ? names[this.places[kind]] : `blocks of ${size(this.sizes[kind])}`);
    const bytes = new Map();
    this.liveAt(this.peak).forEach((count, kind) => {
      if (count > 0) bytes.set(nameOf(kind), (bytes.get(nameOf(kind)) || 0) + count * this.sizes[kind]);
    });
    const ranked = [...bytes.keys()].sort((a, b) => bytes.get(b) - bytes.get(a));
    const kept = what === "category" ? CATEGORIES.filter((one) => names.includes(one)) : ranked.slice(0, MOST_LAYERS - 1);
    const rest = names ? new Set(names).size > kept.length : true;
    const groups = kept.map((one, i) => ({ name: one, color: what === "category" ? categoryColor(one) : `var(--layer-${i})` }));
    if (rest) groups.push({ name: what === "line" ? "other lines" : "other sizes", color: OTHERS });
    const number = new Map(kept.map((one, i) => [one, i]));
    this.grouping = { what, groups, of: Int32Array.from(this.sizes, (_, kind) => number.get(nameOf(kind)) ?? kept.length) };
    return groups;
  }

  // The chart's data on the events from `from` to `to`.
  sample(from, to, stretches) {
    const names = Object.keys(this.runs);
    const series = [this.allocated, ...names.flatMap((name) => [this.reserved[name], this.split[name]])];
    const positions = extremes(series, from, to, stretches);
    return {
      positions, layers: this.layersAt(positions),
      // A run that ran out of memory has no data for later events.
      lines: series.slice(1).map((values) => positions.map((position) => (position < values.length ? values[position] : null))),
    };
  }

  layersAt(positions) {
    const { groups, of } = this.grouping;
    const sums = new Float64Array(groups.length);
    const { sizes } = this;
    this.start.forEach((count, kind) => { sums[of[kind]] += count * sizes[kind]; });
    const layers = groups.map(() => new Array(positions.length));
    let done = 0;
    positions.forEach((position, index) => {
      for (; done < position; done++) {
        const did = this.did[done];
        if (!did) continue;
        const kind = (did - 1) >> 1;
        sums[of[kind]] += did & 1 ? sizes[kind] : -sizes[kind];
      }
      for (let group = 0; group < groups.length; group++) layers[group][index] = sums[group];
    });
    return layers;
  }
}

function placeName(place) {
  return [place.site, place.function && `in ${place.function}`, place.operator].filter(Boolean).join(" ") || "not recorded";
}
