// A chart of bytes over an allocator's events: stacked layers, and lines.
//
// It draws a `source`:
//   length: number of events, peak: the position of the peak, label: text for screen readers,
//   sample(from, to, stretches) -> {positions, layers, lines}: layers and lines hold one array of
//     bytes each, by position,
//   layers() -> [{name, color}], the lowest first; lines: [{name, color, dash}],
//   total(position), text(position, layer): tooltip of a position, phases: [[name, begin, end]].

const CHART_HEIGHT = 280;
const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);
const COUNTS = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function css(color) {
  const name = /^var\((.+)\)$/.exec(color);
  return name ? getComputedStyle(document.documentElement).getPropertyValue(name[1]).trim() : color;
}

function events(count) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? "event" : "events"}`;
}

function chart(source, pinnedAt) {
  const note = el("p", { class: "hovered", text: tight(`peak, ${source.text(source.peak)}`) });
  const said = el("p", { class: "aside", role: "status" });
  const box = el("div", { class: "timeline", tabindex: "0", role: "application",
    "aria-label": `${source.label} over ${events(source.length)} of the allocator, highest ${size(source.total(source.peak))}; arrow keys read it, + and - zoom, Enter keeps what is read, Escape shows all` });
  let plot = null;
  let sample = null;
  let view = [0, source.length];
  let current = source.peak;
  let pinned = false;
  const read = (position, layer) => {
    current = Math.max(0, Math.min(source.length, position));
    note.textContent = tight(`${current === source.peak ? "peak, " : ""}${source.text(current, layer)}`);
  };
  const stretches = () => Math.max(50, Math.floor((plot ? plot.bbox.width / devicePixelRatio : box.clientWidth) / 2));
  const data = () => {
    sample = source.sample(Math.floor(view[0]), Math.ceil(view[1]), stretches());
    const sum = sample.positions.map(() => 0);
    const edges = sample.layers.map((bytes) => bytes.map((value, i) => (sum[i] += value)));
    // From the top layer down, because each layer is painted over the previous one.
    return [sample.positions, ...edges.reverse(), ...sample.lines];
  };
  const show = (from, to) => {
    const span = Math.min(source.length, Math.max(4, to - from));
    const begin = Math.max(0, Math.min(source.length - span, from));
    view = [begin, begin + span];
    if (!plot) return;
    plot.setData(data(), false);
    plot.setScale("x", { min: view[0], max: view[1] });
  };
  const zoom = (factor) => {
    const [min, max] = view;
    const centre = Math.max(min, Math.min(max, current));
    show(centre - (centre - min) * factor, centre + (max - centre) * factor);
  };
  const all = () => show(0, source.length);
  const keep = () => {
    pinned = !pinned;
    note.classList.toggle("kept", pinned);
    said.textContent = pinned ? `kept: ${note.textContent}` : "";
    if (pinned && pinnedAt) pinnedAt(current);
  };
  const move = (step) => {
    pinned = false;
    note.classList.remove("kept");
    const places = sample.positions;
    if (step === Infinity || step === -Infinity) read(step > 0 ? view[1] : view[0]);
    else {
      const next = step > 0 ? places.find((one) => one > current) : places.findLast((one) => one < current);
      read(next === undefined ? current + step : next);
    }
    const [min, max] = view;
    if (current < min || current > max) show(current - (max - min) / 2, current + (max - min) / 2);
    plot.setCursor({ left: plot.valToPos(current, "x"), top: 0 }, false);
    said.textContent = note.textContent;
  };
  // The layer at a height, in bytes, at a sampled position.
  const layerAt = (index, height) => {
    let sum = 0;
    for (const [number, bytes] of sample.layers.entries()) {
      sum += bytes[index];
      if (height < sum) return number;
    }
    return null;
  };
  const options = (width) => {
    const layers = source.layers();
    return {
      width, height: CHART_HEIGHT, legend: { show: false }, padding: [8, 30, 0, 0],
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false },
        bind: { dblclick: () => () => { all(); return null; } } },
      scales: { x: { time: false, auto: false, min: view[0], max: view[1] }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.25] } },
      axes: [
        { stroke: () => css("var(--soft)"), grid: { show: false }, ticks: { stroke: () => css("var(--line)") }, incrs: COUNTS,
          values: (_, splits) => splits.map((value) => value.toLocaleString("en-US")), label: "events of the allocator", labelSize: 20, labelFont: "12px sans-serif", size: 34, space: 70 },
        { stroke: () => css("var(--soft)"), grid: { stroke: () => css("var(--line)"), width: 1 }, ticks: { show: false }, incrs: BYTES,
          values: (_, splits) => splits.map((value) => size(value)), size: 84 },
      ],
      series: [{}, ...layers.map((layer) => ({
        label: layer.name, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), fill: () => css(layer.color),
      })).reverse(), ...source.lines.map((line) => ({
        label: line.name, width: 1.6, dash: line.dash, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), stroke: () => css(line.color),
      }))],
      hooks: {
        drawClear: [(u) => drawBands(u, source.phases)],
        draw: [(u) => drawPeak(u, source.peak, source.total(source.peak))],
        setCursor: [(u) => {
          if (pinned || u.cursor.idx === null || u.cursor.idx === undefined || u.cursor.left < 0 || u.cursor.top <= 0) return;
          read(sample.positions[u.cursor.idx], layerAt(u.cursor.idx, u.posToVal(u.cursor.top, "y")));
        }],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const [from, to] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          show(from, to);
          dragged = true;
        }],
      },
    };
  };
  let dragged = false;
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step !== undefined) move(step);
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Enter") keep();
    else if (event.key === "Escape") all();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  box.addEventListener("click", () => {
    if (!dragged) keep();
    dragged = false;
  });
  const make = () => {
    const width = box.clientWidth;
    if (!width) return;
    if (plot) {
      plot.setSize({ width, height: CHART_HEIGHT });
      show(...view);
    } else plot = new uPlot(options(width), data(), box);
  };
  new ResizeObserver(make).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot && plot.redraw());
  const button = (text, act) => el("button", { type: "button", onclick: act, text });
  const element = el("div", null, box, note, said, el("div", { class: "zoom" },
    button("zoom in", () => zoom(0.5)), button("zoom out", () => zoom(2)), button("show all", all),
    button("to the peak", () => { read(source.peak); const span = (view[1] - view[0]) / 8; show(source.peak - span, source.peak + span); }),
    el("small", { text: "Drag across the chart to zoom. A click keeps what is read." })));
  return {
    element, show, sampled: () => sample,
    // The layers have changed.
    restack: () => { if (plot) { plot.destroy(); plot = null; make(); } },
  };
}

// The legend of a chart's colours and lines.
function keyOf(source) {
  const items = source.layers().map((layer) => {
    const mark = el("span", { class: "swatch", "aria-hidden": "true" });
    mark.style.background = layer.color;
    return el("li", null, mark, layer.name);
  });
  items.push(...source.lines.map((line) => {
    const mark = el("span", { class: "stroke", "aria-hidden": "true" });
    mark.style.borderTop = `2px ${line.dash ? "dashed" : "solid"} ${line.color}`;
    return el("li", null, mark, line.name);
  }));
  return el("ul", { class: "key-list", "aria-label": "What the colours stand for" }, ...items);
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
    ctx.fillStyle = css("var(--track)");
    ctx.globalAlpha = number % 2 ? 0.45 : 0.9;
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.globalAlpha = 1;
    const from = Math.max(left, bbox.left);
    if (ctx.measureText(name).width + 8 < Math.min(right, bbox.left + bbox.width) - from) {
      ctx.fillStyle = css("var(--soft)");
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
  const text = `peak ${size(bytes)}`;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("var(--mark)");
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
  const left = x + (ctx.textAlign === "right" ? -8 : 8) * ratio;
  // A background, because lines may pass behind the words.
  const wide = ctx.measureText(text).width;
  ctx.fillStyle = css("var(--page)");
  ctx.globalAlpha = 0.8;
  ctx.fillRect(ctx.textAlign === "right" ? left - wide - 3 * ratio : left - 3 * ratio, y - 17 * ratio, wide + 6 * ratio, 15 * ratio);
  ctx.globalAlpha = 1;
  ctx.fillStyle = css("var(--mark)");
  ctx.fillText(text, left, y - 3 * ratio);
  ctx.restore();
}
