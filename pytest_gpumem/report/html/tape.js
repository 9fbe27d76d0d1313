// Every event of a recorded device: what it allocated, reserved and left split, and by whom.

const MOST_LAYERS = 9;
const OTHERS = "var(--unknown)";

// A column of numbers, as columns.py packs it.
function column(bytes, told) {
  const Numbers = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[told.width];
  return { ids: new Numbers(bytes, told.begin, told.count), values: Float64Array.from(told.values) };
}

// What a column of changes comes to after each event; `first` is before them.
function summed(bytes, told, first) {
  const { ids, values } = column(bytes, told);
  const sums = new Float64Array(told.count + 1);
  sums[0] = first;
  for (let i = 0; i < ids.length; i++) sums[i + 1] = sums[i] + values[ids[i]];
  return sums;
}

function highestOf(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

class Tape {
  constructor(device, bytes) {
    this.device = device;
    this.length = device.events;
    this.kinds = device.kinds;
    const { ids, values } = column(bytes, device.blocks);
    this.did = Int32Array.from(ids, (id) => values[id]);
    this.start = new Int32Array(this.kinds.length);
    for (const [kind, count] of device.start) this.start[kind] = count;
    this.allocated = new Float64Array(this.length + 1);
    this.allocated[0] = this.kinds.reduce((sum, [size], kind) => sum + size * this.start[kind], 0);
    for (let i = 0; i < this.length; i++) this.allocated[i + 1] = this.allocated[i] + this.change(i);
    this.peak = highestOf(this.allocated);
    this.runs = { recorded: device.recorded, ...(device.what_if ? { "what if": device.what_if } : {}) };
    this.reserved = {};
    this.split = {};
    for (const [name, run] of Object.entries(this.runs)) {
      this.reserved[name] = summed(bytes, run.reserved, run.first[1]);
      this.split[name] = summed(bytes, run.split, run.first[2]);
    }
    this.grouping = null;
  }

  // The block that the event number `index` allocated or freed: number of its kind, else null.
  kindAt(index) {
    const did = this.did[index];
    return did ? (did - 1) >> 1 : null;
  }

  change(index) {
    const did = this.did[index];
    if (!did) return 0;
    const bytes = this.kinds[(did - 1) >> 1][0];
    return did & 1 ? bytes : -bytes;
  }

  // How many blocks of each kind are live after a number of events.
  liveAt(position) {
    const counts = Int32Array.from(this.start);
    for (let i = 0; i < position; i++) {
      const did = this.did[i];
      if (did) counts[(did - 1) >> 1] += did & 1 ? 1 : -1;
    }
    return counts;
  }

  // Rows of a table of what is live then, by place, most bytes first.
  sitesAt(position) {
    const rows = new Map();
    this.liveAt(position).forEach((count, kind) => {
      if (count <= 0) return;
      const [bytes, place] = this.kinds[kind];
      if (!rows.has(place)) rows.set(place, { ...this.device.places[place], bytes: 0, count: 0, each: bytes });
      const row = rows.get(place);
      row.bytes += bytes * count;
      row.count += count;
      if (row.each !== bytes) row.each = null;
    });
    return [...rows.values()].sort((a, b) => b.bytes - a.bytes);
  }

  // Stack by `what`: category, line or size. The groups are those that hold most at the peak.
  group(what) {
    const name = {
      category: ([, place]) => this.device.places[place].category,
      line: ([, place]) => placeName(this.device.places[place]),
      size: ([bytes]) => `blocks of ${size(bytes)}`,
    }[what];
    const names = this.kinds.map(name);
    const bytes = new Map();
    this.liveAt(this.peak).forEach((count, kind) => {
      bytes.set(names[kind], (bytes.get(names[kind]) || 0) + Math.max(count, 0) * this.kinds[kind][0]);
    });
    const ranked = [...bytes.keys()].sort((a, b) => bytes.get(b) - bytes.get(a));
    const kept = what === "category" ? CATEGORIES.filter((one) => bytes.has(one)) : ranked.slice(0, MOST_LAYERS - 1);
    const rest = kept.length < ranked.length;
    const groups = kept.map((one, i) => ({ name: one, color: what === "category" ? categoryColor(one) : `var(--layer-${i})` }));
    if (rest) groups.push({ name: `${(ranked.length - kept.length).toLocaleString("en-US")} other ${what === "line" ? "lines" : "sizes"}`, color: OTHERS });
    const number = new Map(kept.map((one, i) => [one, i]));
    this.grouping = { what, groups, of: Int32Array.from(names, (one) => number.get(one) ?? kept.length) };
    return groups;
  }

  // What a chart draws of the events from `from` to `to`.
  sample(from, to, stretches) {
    const names = Object.keys(this.runs);
    const series = [this.allocated, ...names.flatMap((name) => [this.reserved[name], this.split[name]])];
    const positions = extremes(series, from, to, stretches);
    return {
      positions, layers: this.layersAt(positions),
      // What runs out of memory has no end.
      lines: series.slice(1).map((values) => positions.map((position) => (position < values.length ? values[position] : null))),
    };
  }

  layersAt(positions) {
    const { groups, of } = this.grouping;
    const sums = new Float64Array(groups.length);
    this.start.forEach((count, kind) => { sums[of[kind]] += count * this.kinds[kind][0]; });
    const layers = groups.map(() => new Array(positions.length));
    const sizes = Float64Array.from(this.kinds, ([bytes]) => bytes);
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
