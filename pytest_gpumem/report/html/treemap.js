// The treemap of a peak.

const TREEMAP_HEIGHT = 300;

function siteName(site) {
  return [site.site, site.operator].filter(Boolean).join(" ") || site.module || site.category;
}

function treemap(sites, caption) {
  const tree = { name: "", children: [] };
  const child = (node, name) => {
    let found = node.children.find((one) => one.name === name);
    if (!found) node.children.push(found = { name, children: [] });
    return found;
  };
  for (const site of sites) {
    if (site.bytes <= 0) continue;
    child(child(tree, site.category), site.module || site.function || "outside modules")
      .children.push({ name: siteName(site), site, bytes: site.bytes });
  }
  const width = 1000;
  const root = d3.hierarchy(tree).sum((node) => node.bytes || 0).sort((a, b) => b.value - a.value);
  d3.treemap().size([width, TREEMAP_HEIGHT]).paddingInner(1).round(false)(root);
  const note = el("p", { class: "hovered", text: "Point at a tile to read it; the table below holds the same numbers." });
  const box = el("div", { class: "treemap", role: "img", "aria-label": `${caption}; the table of sites holds the same numbers` });
  let pinned = null;
  for (const leaf of root.leaves()) {
    if (!leaf.data.site) continue;
    const site = leaf.data.site;
    const said = `${size(site.bytes)}, ${percent(site.bytes, root.value)}: ${site.category}, ${leaf.parent.data.name}, ${siteName(site)}`;
    const tile = el("div", { class: "tile", title: said });
    tile.style.cssText = `left:${100 * leaf.x0 / width}%;top:${leaf.y0}px;width:${100 * (leaf.x1 - leaf.x0) / width}%;height:${leaf.y1 - leaf.y0}px`;
    tile.style.background = categoryColor(site.category);
    if (leaf.x1 - leaf.x0 > 70 && leaf.y1 - leaf.y0 > 16) {
      tile.append(el("b", { text: size(site.bytes) }));
      if (leaf.y1 - leaf.y0 > 32) tile.append(el("span", { text: site.operator || site.category }));
      if (leaf.y1 - leaf.y0 > 48) tile.append(el("span", { text: leaf.parent.data.name }));
      if (leaf.y1 - leaf.y0 > 64 && site.site) tile.append(el("span", { text: site.site }));
    }
    tile.addEventListener("mouseenter", () => { if (!pinned) note.textContent = said; });
    tile.addEventListener("click", () => {
      if (pinned) pinned.classList.remove("pinned");
      pinned = pinned === tile ? null : tile;
      if (pinned) pinned.classList.add("pinned");
      note.textContent = said;
    });
    box.append(tile);
  }
  box.style.height = `${TREEMAP_HEIGHT}px`;
  return el("div", null, box, note);
}
