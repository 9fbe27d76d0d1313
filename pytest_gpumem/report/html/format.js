// Texts and elements. All text of a report becomes text nodes, never markup.

const UNITS = [["KiB", 1024, 1], ["MiB", 1024 ** 2, 1], ["GiB", 1024 ** 3, 2], ["TiB", 1024 ** 4, 2]];

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const sign = bytes < 0 ? "−" : "";
  const value = Math.abs(bytes);
  if (value < 1024) return `${sign}${value} B`;
  let text = "";
  for (const [unit, factor, digits] of UNITS) {
    const scale = 10 ** digits;
    const rounded = Math.floor((2 * value * scale + factor) / (2 * factor));
    text = `${sign}${(rounded / scale).toFixed(digits)} ${unit}`;
    if (rounded < 1024 * scale) break;
  }
  return text;
}

function exact(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  return Math.abs(bytes) < 1024 ? size(bytes) : `${size(bytes)} (${bytes.toLocaleString("en-US")} B)`;
}

function change(bytes) {
  return bytes > 0 ? `+${size(bytes)}` : size(bytes);
}

function percent(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(1)} %` : "–";
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${Math.round(1000 * value)} ms`;
}

// A number stays on one line with its unit.
function tight(text) {
  return text.replace(/(\d) (?=(?:%|[KMGT]iB|B)(?![A-Za-z]))/g, "$1\u00a0");
}

function el(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function heading(level, text) {
  return el(`h${level}`, { text });
}

// A table of `rows` (objects) by `columns`: {title, of(row) -> text or node, number, header}.
function grid(caption, columns, rows, rowClass) {
  const used = columns.filter((column) => !column.optional || rows.some(column.optional));
  const head = el("tr", null, ...used.map((column) => el(
    "th", { scope: "col", class: column.number ? "number" : null, text: column.title })));
  const body = rows.map((row) => el("tr", { class: rowClass && rowClass(row) }, ...used.map((column) => {
    const cell = el(column.header ? "th" : "td", {
      scope: column.header ? "row" : null, class: column.number ? "number" : column.kind || null,
    });
    cell.append(column.of(row) ?? "");
    return cell;
  })));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: "grid" }, el("caption", { text: caption }),
      el("thead", null, head), el("tbody", null, ...body)));
}

function facts(pairs) {
  return el("dl", { class: "facts" }, ...pairs.filter((pair) => pair[1] !== null && pair[1] !== undefined)
    .map(([name, value]) => el("div", null, el("dt", { text: name }), el("dd", { text: value }))));
}
