// Shared devices: their use over time, and the tests of each worker.

const LANE = 22;
const LEVELS = 90;
const USE_WIDTH = 1000;

// The granted bytes from each moment on: [[seconds, bytes], ...].
function levels(spans) {
  const changes = spans.flatMap((span) => [[span.begin, span.bytes], [span.end, -span.bytes]]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let level = 0;
  return changes.map(([time, bytes]) => [time, level += bytes]);
}

function useOf(device) {
  const { spans, capacity } = device;
  const end = Math.max(...spans.map((span) => span.end), 0.001);
  const workers = [...new Set(spans.map((span) => span.worker))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const steps = levels(spans);
  const most = Math.max(...steps.map((step) => step[1]), 0);
  const scale = Math.max(capacity, most);
  const x = (time) => USE_WIDTH * time / end;
  const y = (bytes) => LEVELS - (LEVELS - 4) * bytes / scale;
  const path = `M0,${LEVELS}${steps.map(([time, bytes]) => `H${x(time).toFixed(1)}V${y(bytes).toFixed(1)}`).join("")}H${USE_WIDTH}V${LEVELS}Z`;
  const height = LEVELS + 8 + LANE * workers.length;
  const note = el("p", { class: "hovered", text: "Point at a test to read it; the table holds the same numbers." });
  const lanes = spans.map((span) => {
    const said = `${span.nodeid} on ${span.worker}: ${size(span.bytes)} from ${seconds(span.begin)} to ${seconds(span.end)}`;
    const box = svg("rect", { class: "run", x: x(span.begin).toFixed(1), y: LEVELS + 8 + LANE * workers.indexOf(span.worker) + 2,
      width: Math.max(1, x(span.end - span.begin)).toFixed(1), height: LANE - 4, rx: 2 }, svg("title", {}, document.createTextNode(said)));
    box.addEventListener("mouseenter", () => { note.textContent = said; });
    return box;
  });
  const label = `${size(most)} of ${size(capacity)} were granted at most, to ${workers.length} ${workers.length === 1 ? "worker" : "workers"} in ${seconds(end)}`;
  const picture = svg("svg", { viewBox: `0 0 ${USE_WIDTH} ${height}`, preserveAspectRatio: "none", class: "use", role: "img", "aria-label": label },
    svg("path", { d: path, class: "level" }), svg("line", { x1: 0, x2: USE_WIDTH, y1: y(capacity), y2: y(capacity), class: "capacity" }), ...lanes);
  picture.style.height = `${height}px`;
  const columns = [
    { title: "Test", header: true, kind: "code", of: (row) => row.nodeid }, { title: "Worker", of: (row) => row.worker },
    { title: "Granted", number: true, of: (row) => size(row.bytes) },
    { title: "From", number: true, of: (row) => seconds(row.begin) }, { title: "To", number: true, of: (row) => seconds(row.end) },
  ];
  const names = el("div", { class: "lanes", "aria-hidden": "true" }, el("span", { class: "levels", text: size(scale) }), ...workers.map((worker) => el("span", { text: worker })));
  return el("div", null, heading(3, device.device), el("p", { text: `${label}.` }), el("div", { class: "use-box" }, names, picture),
    el("p", { class: "axis" }, el("span", { text: "0 s" }), el("span", { text: seconds(end) })), note,
    el("details", null, el("summary", { text: "as a table" }), grid("Tests on the device, in the order they came", columns, spans)));
}

function showUsage() {
  const box = document.getElementById("usage");
  box.hidden = overview.usage.length === 0;
  document.getElementById("usage-list").append(...overview.usage.map(useOf));
}
