// The first view: causes, and the table of tests with search, sorting and details.

const AT_ONCE = 200;
const ORDER = Object.keys(overview.statuses);
const tests = overview.tests;
const byId = (id) => document.getElementById(id);

function environmentText(environment) {
  const parts = [`${environment.simulated ? "simulated " : ""}${environment.gpu}`, `torch ${environment.torch}`];
  if (environment.cuda) parts.push(`CUDA ${environment.cuda}`);
  if (environment.driver) parts.push(`driver ${environment.driver}`);
  if (environment.alloc_conf) parts.push(`PYTORCH_CUDA_ALLOC_CONF=${environment.alloc_conf}`);
  if (environment.partition) parts.push(environment.partition);
  if (environment.ranks) parts.push(environment.ranks);
  return parts.join(", ");
}

const several = overview.environments.length > 1;
const withWaits = tests.some((test) => test.waited);
const withTimes = tests.some((test) => test.duration !== undefined);
const unknownLast = (value) => (value === undefined || value === null ? -Infinity : value);

// A test that ran out of memory is sorted by its missing bytes among the failed tests.
function rank(test) { return ORDER.indexOf(test.status === "error" && test.over ? "failed" : test.status); }
function share(test) { return test.limit ? test.peak / test.limit : undefined; }
function grown(test) { return test.baseline === undefined || test.peak === undefined ? undefined : test.peak - test.baseline; }

const SORTS = {
  verdict: { title: "verdict", compare: (a, b) => rank(a) - rank(b) || (b.over || 0) - (a.over || 0) },
  name: { title: "name", compare: (a, b) => (a.id < b.id ? -1 : a.id > b.id ? 1 : 0) },
  peak: { title: "peak", key: (test) => test.peak },
  limit: { title: "share of the limit", key: share },
  baseline: { title: "change from the baseline", key: grown },
  reserved: { title: "reserved", key: (test) => test.reserved },
  duration: { title: "time", key: (test) => test.duration, off: !withTimes },
  waited: { title: "time waited", key: (test) => test.waited, off: !withWaits },
};

const COLUMNS = [
  { title: "Verdict", sort: "verdict", cell: verdictCell, kind: "verdict" },
  { title: "Test", sort: "name", cell: nameCell, kind: "name" },
  { title: "Peak", sort: "peak", cell: (test) => size(test.peak), kind: "number peak" },
  { title: "Peak by category", cell: barCell, kind: "bars" },
  { title: "Limit", sort: "limit", cell: limitCell, kind: "number wide" },
  { title: "Baseline", sort: "baseline", cell: baselineCell, kind: "number wide" },
  { title: "Reserved", sort: "reserved", cell: (test) => size(test.reserved), kind: "number" },
  ...(overview.moments.length ? [{ title: "History", cell: trendCell, kind: "trend" }] : []),
  ...(withTimes ? [{ title: "Time", sort: "duration", cell: (test) => seconds(test.duration), kind: "number" }] : []),
  ...(withWaits ? [{ title: "Waited", sort: "waited", cell: (test) => seconds(test.waited), kind: "number" }] : []),
];

const highest = tests.reduce((most, test) => Math.max(most, test.peak || 0, test.limit && test.limit < 4 * (test.peak || 0) ? test.limit : 0), 0);
const state = { sort: "verdict", down: true, words: [], hidden: new Set(), scale: "own", shown: AT_ONCE, only: null };
const rows = new Map();
const reasons = new Map(overview.causes.flatMap((cause) => cause.tests.map((index) => [index, cause.words.join(" ")])));

function verdictCell(test) {
  return el("span", { class: `badge ${test.status}`, title: overview.statuses[test.status], text: test.status });
}

function nameCell(test, index) {
  const cut = test.id.indexOf("::");
  const [module, name] = cut < 0 ? ["", test.id] : [test.id.slice(0, cut), test.id.slice(cut + 2)];
  const button = el("button", {
    type: "button", class: "open", "aria-expanded": "false", "aria-controls": `detail-${index}`,
    onclick: () => toggle(index), onkeydown: (event) => walk(event, index),
  }, el("span", { class: "test-name", text: name }), el("span", { class: "module", text: module }));
  const extra = [];
  if (test.why) extra.push(el("span", { class: "why", text: tight(test.why) }));
  if (several) extra.push(el("span", { class: "module", text: environmentText(overview.environments[test.environment]) }));
  return el("div", null, button, ...extra);
}

function barCell(test) {
  if (test.peak === undefined) return "–";
  const known = [test.peak, test.baseline || 0, test.limit || 0];
  const scale = state.scale === "common" || !(test.baseline || test.limit) ? highest : Math.max(...known);
  const said = [`peak ${size(test.peak)}`];
  if (test.limit !== undefined) said.push(`limit ${size(test.limit)}`);
  if (test.baseline !== undefined) said.push(`baseline ${size(test.baseline)}`);
  const parts = CATEGORIES.map((name, i) => (test.composition[i] ? `${name} ${size(test.composition[i])}` : null)).filter(Boolean);
  return bar(test.composition, test.peak, scale, [
    { bytes: test.baseline, kind: "baseline" }, { bytes: test.limit, kind: "limit" },
  ], `${said.join(", ")}${parts.length ? `; ${parts.join(", ")}` : ""}`);
}

function limitCell(test) {
  if (test.limit === undefined) return "–";
  return el("span", null, size(test.limit), el("small", { text: percent(test.peak, test.limit) }));
}

function baselineCell(test) {
  if (test.baseline === undefined) return "–";
  const difference = grown(test);
  const word = difference === 0 ? "equal" : difference === undefined ? "" : change(difference);
  return el("span", null, size(test.baseline),
    el("small", { class: difference > 0 ? "more" : difference < 0 ? "less" : null, text: word }));
}

function rowOf(index) {
  if (!rows.has(index)) {
    const test = tests[index];
    const row = el("tr", { role: "row", class: `test ${test.status}`, id: `test-${index}` });
    for (const column of COLUMNS) {
      const cell = el(column.kind === "name" ? "th" : "td", {
        role: column.kind === "name" ? "rowheader" : "cell", scope: column.kind === "name" ? "row" : null,
        class: column.kind, "data-title": column.title,
      });
      cell.append(column.cell(test, index));
      cell.classList.toggle("none", cell.textContent === "–");
      row.append(cell);
    }
    rows.set(index, { row, detail: null });
  }
  return rows.get(index);
}

function matching() {
  const found = [];
  tests.forEach((test, index) => {
    if (state.hidden.has(test.status) || (state.only && !state.only.has(index))) return;
    test.text ??= `${test.id} ${test.status} ${test.why || ""} ${reasons.get(index) || ""} ${environmentText(overview.environments[test.environment])}`.toLowerCase();
    if (state.words.every((word) => test.text.includes(word))) found.push(index);
  });
  const sort = SORTS[state.sort];
  const sign = state.down ? -1 : 1;
  const by = sort.compare
    ? (a, b) => -sign * sort.compare(tests[a], tests[b])
    : (a, b) => sign * compared(sort.key(tests[a]), sort.key(tests[b]));
  return found.sort((a, b) => by(a, b) || a - b);
}

function compared(a, b) {
  const [left, right] = [unknownLast(a), unknownLast(b)];
  return left < right ? -1 : left > right ? 1 : 0;
}

function paint() {
  const found = matching();
  const nodes = [];
  for (const index of found.slice(0, state.shown)) {
    const { row, detail } = rowOf(index);
    nodes.push(row);
    if (detail) nodes.push(detail);
  }
  byId("rows").replaceChildren(...nodes);
  const shown = Math.min(found.length, state.shown);
  byId("count").replaceChildren(
    found.length === tests.length ? `${tests.length} ${tests.length === 1 ? "test" : "tests"}` : `${found.length} of ${tests.length} tests`,
    ...(state.only ? [" of one cause ", el("button", { type: "button", onclick: () => { state.only = null; paint(); }, text: "show all" })] : []));
  const more = byId("more");
  more.hidden = shown === found.length;
  more.textContent = `Show ${found.length - shown} more`;
  for (const cell of byId("heading").children) {
    if (cell.dataset.sort) cell.setAttribute("aria-sort", cell.dataset.sort !== state.sort ? "none" : state.down ? "descending" : "ascending");
  }
}

function sortBy(name) {
  state.down = state.sort === name ? !state.down : true;
  state.sort = name;
  byId("sort").value = name;
  paint();
}

async function toggle(index, open) {
  const entry = rowOf(index);
  const button = entry.row.querySelector("button.open");
  if (entry.detail && open !== true) {
    entry.detail.remove();
    entry.detail = null;
    button.setAttribute("aria-expanded", "false");
    return;
  }
  if (entry.detail) return;
  const cell = el("td", { role: "cell", colspan: COLUMNS.length }, el("p", { text: "opening…" }));
  entry.detail = el("tr", { role: "row", class: "detail", id: `detail-${index}` }, cell);
  button.setAttribute("aria-expanded", "true");
  entry.row.after(entry.detail);
  try {
    const data = await detailAt(index);
    cell.replaceChildren();
    showDetail(cell, data, overview.environments[tests[index].environment], tests[index]);
  } catch (error) {
    cell.replaceChildren(el("p", { class: "problem", text: `The details cannot be shown: ${error.message}. They need a browser from 2023 or later.` }));
  }
}

function walk(event, index) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape" && rows.get(index).detail) toggle(index);
  if (!step) return;
  event.preventDefault();
  const buttons = [...byId("rows").querySelectorAll("button.open")];
  const next = buttons[buttons.indexOf(event.currentTarget) + step];
  if (next) next.focus();
}

function showCauses() {
  byId("causes").hidden = overview.causes.length === 0;
  byId("cause-list").append(...overview.causes.map((cause) => {
    const count = cause.tests.length;
    const words = cause.words.map((word) => (CATEGORIES.includes(word) ? named(word) : el("span", { text: word })));
    const first = cause.tests.slice(0, count > 4 ? 3 : 4).map((index) => el("li", null, el("a", {
      href: `#test-${index}`, text: tests[index].id, onclick: (event) => { event.preventDefault(); visit(index); },
    })));
    if (count > 4) first.push(el("li", null, el("button", { type: "button", text: `all ${count} of them`, onclick: () => {
      state.only = new Set(cause.tests); state.shown = AT_ONCE; paint(); byId("tests").focus();
    } })));
    return el("li", null, el("p", { class: "cause" }, el("strong", { text: `${count} ${count === 1 ? "test" : "tests"}` }),
      cause.size ? el("span", { class: "size", text: cause.size }) : null, ...words), el("ul", null, ...first));
  }));
}

async function visit(index) {
  if (!rowOf(index).row.isConnected) {
    Object.assign(state, { words: [], only: null, shown: Infinity });
    state.hidden.clear();
    byId("find").value = "";
    for (const box of byId("statuses").querySelectorAll("input")) box.checked = true;
    paint();
  }
  await toggle(index, true);
  const { row } = rowOf(index);
  row.scrollIntoView({ block: "start" });
  row.querySelector("button.open").focus({ preventScroll: true });
}

function showHeader() {
  const counts = ORDER.map((status) => [status, tests.filter((test) => test.status === status).length]).filter((pair) => pair[1]);
  byId("environment").textContent = overview.environments.map(environmentText).join(" · ") || "no test was measured";
  byId("totals").append(...counts.map(([status, count]) => el("span", { class: `total ${status}` }, el("strong", { text: String(count) }), ` ${status}`)));
  const top = tests.reduce((best, test) => ((test.peak || 0) > (best.peak || 0) ? test : best), {});
  if (top.peak) byId("totals").append(el("span", { class: "total" }, "highest peak ", el("strong", { text: size(top.peak) })));
  byId("statuses").append(...counts.map(([status, count]) => el("label", { title: overview.statuses[status] },
    el("input", { type: "checkbox", checked: true, onchange: (event) => {
      if (event.target.checked) state.hidden.delete(status); else state.hidden.add(status);
      paint();
    } }), `${status} (${count})`)));
  const used = CATEGORIES.filter((name, i) => tests.some((test) => test.composition && test.composition[i]));
  byId("legend").append(...used.map((category) => el("li", null, named(category))),
    el("li", null, el("span", { class: "key limit" }), "limit"), el("li", null, el("span", { class: "key baseline" }), "baseline"));
  byId("heading").append(...COLUMNS.map((column) => {
    const cell = el("th", { role: "columnheader", scope: "col", class: column.kind, "data-sort": column.sort });
    cell.append(column.sort ? el("button", { type: "button", onclick: () => sortBy(column.sort), text: column.title }) : column.title);
    return cell;
  }));
  byId("sort").append(...Object.entries(SORTS).filter(([, sort]) => !sort.off).map(([name, sort]) => el("option", { value: name, text: sort.title })));
}

function listen() {
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("find").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    state.shown = AT_ONCE;
    paint();
  });
  byId("sort").addEventListener("change", (event) => { state.sort = event.target.value; state.down = true; paint(); });
  byId("scale").addEventListener("change", (event) => {
    state.scale = event.target.value;
    for (const [index, { row }] of rows) row.querySelector("td.bars").replaceChildren(barCell(tests[index]));
  });
  byId("more").addEventListener("click", () => { state.shown = Infinity; paint(); });
  addEventListener("beforeprint", () => { state.shown = Infinity; paint(); });
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      event.preventDefault();
      byId("find").focus();
    }
  });
}

showHeader();
showCauses();
showUsage();
listen();
paint();
const firstFailed = [...rows.keys()].find((index) => rank(tests[index]) === ORDER.indexOf("failed"));
if (firstFailed !== undefined) toggle(firstFailed, true);
