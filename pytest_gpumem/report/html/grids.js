// Sections and tables of the holders of bytes.

// Unpack a text to bytes; this needs a browser from 2023 or later.
async function unpack(text) {
  const letters = atob(text.trim());
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

function section(title, ...children) {
  return el("section", null, heading(3, title), ...children);
}

const PLACE = [
  { title: "Category", of: (row) => named(row.category || "other") },
  { title: "Line", of: (row) => row.site || "", kind: "code", optional: (row) => row.site },
  { title: "Function", of: (row) => row.function || "", kind: "code", optional: (row) => row.function },
  { title: "Operator", of: (row) => row.operator || "", kind: "code", optional: (row) => row.operator },
  { title: "Module", of: (row) => row.module || "", kind: "code", optional: (row) => row.module },
  { title: "Blocks", of: (row) => blocks(row), number: true },
  { title: "Largest", of: (row) => shape(row), kind: "code", optional: (row) => row.shape || row.dtype },
  { title: "Held by", of: (row) => row.held_by || "", kind: "code", optional: (row) => row.held_by },
];

function blocks(row) {
  const count = row.count || 1;
  const mean = size(Math.floor(Math.abs(row.bytes) / count));
  return row.each === null ? `${count.toLocaleString("en-US")}, ${mean} in the mean` : `${count.toLocaleString("en-US")} × ${mean}`;
}

function shape(row) {
  return [row.shape ? `[${row.shape.join(", ")}]` : "", row.dtype || ""].filter(Boolean).join(" ");
}

const FIRST_ROWS = 10;

function longGrid(caption, columns, rows, rowClass) {
  const box = el("div", null, grid(caption, columns, rows.slice(0, FIRST_ROWS), rowClass));
  if (rows.length > FIRST_ROWS) {
    const rest = rows.slice(FIRST_ROWS).reduce((sum, row) => sum + row.bytes, 0);
    box.append(el("button", { type: "button", class: "all", text: `show ${rows.length - FIRST_ROWS} more, ${size(rest)} together`,
      onclick: () => box.replaceChildren(grid(caption, columns, rows, rowClass)) }));
  }
  return box;
}

function sites() {
  return [{ title: "Bytes", of: (row) => size(row.bytes), number: true, header: true }, ...PLACE];
}
