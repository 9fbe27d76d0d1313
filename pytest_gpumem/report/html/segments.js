// Segments: the memory that the allocator holds from the driver, and its unused parts.

const FIRST_SEGMENTS = 24;

// Bytes of segments in use, of their free parts, and of unused segments.
function shares(segments) {
  const sums = { allocated: 0, split: 0, cached: 0 };
  for (const segment of segments) {
    const free = segment.parts.reduce((sum, [holds, bytes]) => sum + (holds < 0 ? bytes : 0), 0);
    if (free === segment.bytes) sums.cached += free;
    else {
      sums.allocated += segment.bytes - free;
      sums.split += free;
    }
  }
  return sums;
}

function segmentBar(segment, largest, coloured) {
  const stops = [];
  let done = 0;
  for (const [holds, bytes] of segment.parts) {
    const color = holds < 0 ? "var(--free)" : coloured ? `var(--category-${holds})` : "var(--layer-0)";
    stops.push(`${color} ${100 * done / segment.bytes}% ${100 * (done + bytes) / segment.bytes}%`);
    done += bytes;
  }
  const free = segment.parts.filter(([holds]) => holds < 0);
  const unused = free.reduce((sum, [, bytes]) => sum + bytes, 0);
  const blocks = segment.parts.reduce((sum, [holds, , count]) => sum + (holds < 0 ? 0 : count), 0);
  const said = `segment of ${size(segment.bytes)}${segment.small ? ", for small blocks" : ""}${segment.stream ? `, stream ${segment.stream}` : ""}: ${blocks.toLocaleString("en-US")} ${blocks === 1 ? "block" : "blocks"}, ${size(unused)} free${free.length > 1 ? ` in ${free.length} parts` : ""}`;
  const fill = el("div", { class: "segment", role: "img", "aria-label": said, title: said });
  fill.style.width = `${Math.max(0.6, 100 * segment.bytes / largest)}%`;
  fill.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  return el("li", null, el("span", { class: "number", text: size(segment.bytes) }), el("div", null, fill), el("span", { class: "number", text: unused ? `${size(unused)} free` : "full" }));
}

function segmentList(segments, coloured) {
  const largest = Math.max(...segments.map((one) => one.bytes), 1);
  const list = el("ul", { class: "segments", "aria-label": "Segments, the largest first" });
  const add = (some) => list.append(...some.map((one) => segmentBar(one, largest, coloured)));
  // Segments with most free memory first: they explain the reserved bytes.
  const free = (one) => one.parts.reduce((sum, [holds, bytes]) => sum + (holds < 0 ? bytes : 0), 0);
  const ordered = [...segments].sort((a, b) => free(b) - free(a) || b.bytes - a.bytes);
  add(ordered.slice(0, FIRST_SEGMENTS));
  if (ordered.length <= FIRST_SEGMENTS) return list;
  const rest = ordered.slice(FIRST_SEGMENTS);
  const more = el("button", { type: "button", class: "all", onclick: () => { add(rest); more.remove(); },
    text: `show ${rest.length} more, ${size(rest.reduce((sum, one) => sum + one.bytes, 0))} together` });
  return el("div", null, list, more);
}

// The segments of each run of a recording at its peak and at its end.
function momentsOf(runs) {
  return Object.entries(runs).flatMap(([name, run]) => [
    ["when most was reserved", run.segments.peak], ["at the end", run.segments.end],
  ].map(([when, segments]) => ({ name: Object.keys(runs).length > 1 ? `${name}, ${when}` : when, segments: segments.length, ...shares(segments),
    reserved: segments.reduce((sum, one) => sum + one.bytes, 0) })));
}

// Stacked bars of moments: {name, reserved, allocated, split, cached, segments}.
function fragmentation(rows) {
  const scale = Math.max(...rows.map((row) => row.reserved), 1);
  const parts = [["allocated", "var(--layer-0)"], ["split", "var(--layer-7)"], ["cached", "var(--free)"]];
  const words = { allocated: "allocated", split: "free parts of segments in use", cached: "unused segments" };
  const bars = rows.map((row) => {
    let done = 0;
    const stops = parts.map(([part, color]) => {
      const stop = `${color} ${100 * done / Math.max(row.reserved, 1)}% ${100 * (done + row[part]) / Math.max(row.reserved, 1)}%`;
      done += row[part];
      return stop;
    });
    const said = `${row.name}: ${size(row.reserved)} reserved, ${parts.map(([part]) => `${words[part]} ${size(row[part])}`).join(", ")}`;
    const fill = el("div", { class: "fill" });
    fill.style.width = `${100 * row.reserved / scale}%`;
    fill.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
    return el("div", { class: "source" }, el("span", { text: row.name }), el("div", { class: "bar", role: "img", "aria-label": said, title: said }, fill),
      el("span", { class: "number", text: size(row.reserved) }));
  });
  const key = el("ul", { class: "key-list", "aria-label": "What the colours stand for" }, ...parts.map(([part, color]) => {
    const mark = el("span", { class: "swatch", "aria-hidden": "true" });
    mark.style.background = color;
    return el("li", null, mark, words[part]);
  }));
  const columns = [
    { title: "Moment", header: true, of: (row) => row.name },
    { title: "Reserved", number: true, of: (row) => size(row.reserved) },
    { title: "Allocated", number: true, of: (row) => size(row.allocated) },
    { title: "Free parts", number: true, of: (row) => `${size(row.split)}, ${percent(row.split, row.reserved)}` },
    { title: "Unused segments", number: true, of: (row) => `${size(row.cached)}, ${percent(row.cached, row.reserved)}` },
    { title: "Segments", number: true, of: (row) => row.segments.toLocaleString("en-US"), optional: (row) => row.segments },
  ];
  return el("div", null, key, ...bars, grid("What is reserved", columns, rows));
}
