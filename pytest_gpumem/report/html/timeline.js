// What a test held over time, stacked by category, its phases as bands.

const CHART_HEIGHT = 260;
const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);
const COUNTS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The top edges of the stacked categories, the highest first, so that each is painted over the last.
function stacked(line) {
  const names = CATEGORIES.filter((category) => line.categories[category]);
  const sum = line.positions.map(() => 0);
  const edges = names.map((category) => line.positions.map((_, i) => (sum[i] += line.categories[category][i])));
  return { names, totals: [...sum], edges };
}

function timeline(line) {
  const { names, totals, edges } = stacked(line);
  const peak = totals.reduce((best, total, i) => (total > totals[best] ? i : best), 0);
  const note = el("p", { class: "hovered", role: "status", text: sampleText(line, totals, peak, "peak, ") });
  const box = el("div", { class: "timeline", tabindex: "0", role: "group",
    "aria-label": `Allocated memory over ${line.events.toLocaleString("en-US")} events of the allocator, highest ${size(totals[peak])}; arrow keys read it, + and - zoom, Escape shows all` });
  let chart = null;
  let current = peak;
  let pinned = false;
  const read = (index) => {
    current = Math.max(0, Math.min(totals.length - 1, index));
    note.textContent = sampleText(line, totals, current, current === peak ? "peak, " : "");
  };
  const options = (width) => ({
    width, height: CHART_HEIGHT, legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { show: false } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.25] } },
    axes: [
      { stroke: () => css("--soft"), grid: { show: false }, ticks: { stroke: () => css("--line") }, incrs: COUNTS,
        values: (_, splits) => splits.map((value) => value.toLocaleString("en-US")), label: "events of the allocator", labelSize: 20, labelFont: "12px sans-serif", size: 34 },
      { stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, incrs: BYTES,
        values: (_, splits) => splits.map((value) => size(value)), size: 84 },
    ],
    series: [{}, ...[...names].reverse().map((category) => ({
      label: category, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }),
      fill: () => css(`--category-${CATEGORIES.indexOf(category)}`),
    }))],
    hooks: {
      drawClear: [(u) => drawBands(u, line.phases)],
      draw: [(u) => drawPeak(u, line.positions[peak], totals[peak])],
      setCursor: [(u) => { if (!pinned && u.cursor.idx !== null && u.cursor.idx !== undefined && u.cursor.left >= 0) read(u.cursor.idx); }],
    },
  });
  const data = [line.positions, ...[...edges].reverse()];
  const zoom = (factor) => {
    const { min, max } = chart.scales.x;
    const centre = Math.max(min, Math.min(max, line.positions[current]));
    chart.setScale("x", { min: Math.max(0, centre - (centre - min) * factor), max: Math.min(line.events, centre + (max - centre) * factor) });
  };
  const all = () => chart.setScale("x", { min: 0, max: line.events });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step !== undefined) {
      read(current + step);
      chart.setCursor({ left: chart.valToPos(line.positions[current], "x"), top: 0 }, false);
    } else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Escape") all();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  box.addEventListener("click", () => { pinned = !pinned; note.classList.toggle("kept", pinned); });
  new ResizeObserver(() => {
    const width = box.clientWidth;
    if (!width) return;
    if (chart) chart.setSize({ width, height: CHART_HEIGHT });
    else chart = new uPlot(options(width), data, box);
  }).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart && chart.redraw());
  const button = (text, act) => el("button", { type: "button", onclick: act, text });
  return el("div", null, box, note, el("div", { class: "zoom" },
    button("zoom in", () => zoom(0.5)), button("zoom out", () => zoom(2)), button("show all", all),
    el("small", { text: "Drag across the chart to zoom. A click keeps what is read." })));
}

function sampleText(line, totals, index, prefix) {
  const [place, bytes] = line.blocks[index];
  const parts = CATEGORIES.filter((category) => (line.categories[category] || [])[index])
    .map((category) => `${category} ${size(line.categories[category][index])}`).join(", ");
  const did = place < 0 ? "" : `; ${size(Math.abs(bytes))} ${bytes > 0 ? "allocated by" : "freed, from"} ${line.places[place]}`;
  return `${prefix}after event ${line.positions[index].toLocaleString("en-US")} of ${line.events.toLocaleString("en-US")}: ${size(totals[index])} allocated${parts ? ` (${parts})` : ""}${did}`;
}

function drawBands(u, phases) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${12 * devicePixelRatio}px sans-serif`;
  ctx.textBaseline = "top";
  phases.filter(([name]) => name !== "call").forEach(([name, begin, end], number) => {
    const left = u.valToPos(begin, "x", true);
    const right = u.valToPos(end, "x", true);
    ctx.fillStyle = css("--track");
    ctx.globalAlpha = number % 2 ? 0.45 : 0.9;
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.globalAlpha = 1;
    const from = Math.max(left, bbox.left);
    if (ctx.measureText(name).width + 8 < Math.min(right, bbox.left + bbox.width) - from) {
      ctx.fillStyle = css("--soft");
      ctx.fillText(name, from + 4, bbox.top + 3);
    }
  });
  ctx.restore();
}

function drawPeak(u, position, bytes) {
  const { ctx, bbox } = u;
  const x = u.valToPos(position, "x", true);
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  const y = u.valToPos(bytes, "y", true);
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--mark");
  ctx.lineWidth = ratio;
  ctx.setLineDash([4 * ratio, 3 * ratio]);
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.beginPath();
  ctx.arc(x, y, 3.5 * ratio, 0, 2 * Math.PI);
  ctx.fill();
  ctx.font = `bold ${12 * ratio}px sans-serif`;
  ctx.textBaseline = "bottom";
  ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
  ctx.fillText(`peak ${size(bytes)}`, x + (ctx.textAlign === "right" ? -8 : 8) * ratio, y - 2 * ratio);
  ctx.restore();
}
