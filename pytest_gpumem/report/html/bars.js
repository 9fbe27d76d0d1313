// Bars of categories. Each is one element with a gradient, so that thousands can be drawn fast.

const overview = JSON.parse(document.getElementById("overview").textContent);
const CATEGORIES = overview.categories;

function categoryColor(category) {
  const index = CATEGORIES.indexOf(category);
  return `var(--category-${index < 0 ? CATEGORIES.length - 1 : index})`;
}

function swatch(category) {
  const mark = el("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = categoryColor(category);
  return mark;
}

function named(category) {
  return el("span", { class: "category" }, swatch(category), category);
}

// `parts` are bytes in the order of CATEGORIES; the rest of the bar is grey.
function filling(parts, total) {
  const stops = [];
  let done = 0;
  parts.forEach((bytes, index) => {
    if (bytes <= 0 || total <= 0) return;
    const from = 100 * done / total;
    done = Math.min(done + bytes, total);
    stops.push(`var(--category-${index}) ${from}% ${100 * done / total}%`);
  });
  if (done < total) stops.push(`var(--unknown) ${100 * done / Math.max(total, 1)}% 100%`);
  return stops.length ? `linear-gradient(to right, ${stops.join(", ")})` : "none";
}

function partsOf(composition) {
  return CATEGORIES.map((category) => (composition || {})[category] || 0);
}

// `marks` are {bytes, kind, name}: a limit or a baseline, drawn across the bar.
function bar(parts, total, scale, marks, label) {
  const fill = el("div", { class: "fill" });
  fill.style.width = `${scale > 0 ? Math.min(100, 100 * total / scale) : 0}%`;
  fill.style.backgroundImage = filling(parts, total);
  const track = el("div", { class: "bar", role: "img", "aria-label": label, title: label }, fill);
  for (const mark of marks) {
    if (mark.bytes === null || mark.bytes === undefined || mark.bytes > scale) continue;
    const line = el("div", { class: `mark ${mark.kind}` });
    line.style.left = `${scale > 0 ? 100 * mark.bytes / scale : 0}%`;
    track.append(line);
  }
  return track;
}

function describedParts(composition) {
  return CATEGORIES.filter((category) => (composition || {})[category])
    .map((category) => `${category} ${size(composition[category])}`).join(", ");
}
