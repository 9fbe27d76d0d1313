// The history of a test's peak over earlier reports.

const SPARK = { width: 110, height: 24, pad: 3 };

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function trendText(test) {
  const peaks = test.trend.map((point) => point[1]);
  const [first, last] = [peaks[0], peaks.at(-1)];
  const steps = test.steps.length ? `, ${test.steps.length} ${test.steps.length === 1 ? "step" : "steps"}` : "";
  return first === last && !steps ? `${size(last)} in ${peaks.length} ${peaks.length === 1 ? "report" : "reports"}`
    : `${size(first)} to ${size(last)} (${change(last - first)}) in ${peaks.length} reports${steps}`;
}

// A line over all reports, scaled from the lowest to the highest peak, with dots at steps.
function sparkline(test, { width, height, pad } = SPARK) {
  const peaks = test.trend.map((point) => point[1]);
  const [low, high] = [Math.min(...peaks), Math.max(...peaks)];
  const last = Math.max(overview.moments.length - 1, 1);
  const x = (moment) => pad + (width - 2 * pad) * moment / last;
  const y = (peak) => (high === low ? height / 2 : height - pad - (height - 2 * pad) * (peak - low) / (high - low));
  const points = test.trend.map(([moment, peak], i) => `${i ? `H${x(moment).toFixed(1)}V` : `M${x(moment).toFixed(1)},`}${y(peak).toFixed(1)}`).join("");
  const steps = new Set(test.steps.map((step) => step[0]));
  const dots = test.trend.filter(([moment]) => steps.has(overview.moments[moment]))
    .map(([moment, peak]) => svg("circle", { cx: x(moment).toFixed(1), cy: y(peak).toFixed(1), r: 2.5, class: "step" }));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", role: "img", "aria-label": trendText(test) },
    svg("title", {}, document.createTextNode(trendText(test))), svg("path", { d: points }), ...dots);
  picture.style.width = `${width}px`;
  return picture;
}

function trendCell(test) {
  return test.trend ? sparkline(test) : "–";
}

// The larger version below a test, with each step and the first report after it.
function trendSection(test) {
  if (!test.trend || test.trend.length < 2) return null;
  const columns = [
    { title: "Report", header: true, of: (row) => row[0] },
    { title: "Before", number: true, of: (row) => size(row[1]) },
    { title: "Peak", number: true, of: (row) => size(row[2]) },
    { title: "Change", number: true, of: (row) => change(row[2] - row[1]) },
  ];
  return section("History", sparkline(test, { width: 460, height: 70, pad: 5 }), el("p", { text: trendText(test) }),
    test.steps.length ? grid("Steps", columns, test.steps, (row) => (row[2] > row[1] ? "more" : "less")) : el("p", { text: "No change was more than a small one." }),
    test.crept ? el("p", { text: `Small changes come to ${change(test.crept)}.` }) : null);
}
