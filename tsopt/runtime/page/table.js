// Tables: a press on a column sorts by it, and a text leaves the rows that contain it.

// The number at the start of a cell; text that begins with none is compared as text.
function numberIn(text) {
  const found = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(found) ? null : found;
}

function compared(a, b) {
  const [x, y] = [numberIn(a), numberIn(b)];
  if (x === null || y === null) return (x === null) - (y === null) || a.localeCompare(b);
  return y - x; // the largest first
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => header.firstElementChild.addEventListener("click", () => {
    const turned = header.getAttribute("aria-sort") === "descending";
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", turned ? "ascending" : "descending");
    const text = (row) => row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => (turned ? -1 : 1) * compared(text(a), text(b)));
    body.append(...rows);
  }));
  document.getElementById("filter").addEventListener("input", ({ target }) => {
    const wanted = target.value.trim().toLowerCase();
    let left = 0;
    for (const row of body.rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      left += !row.hidden;
    }
    document.getElementById("rows").textContent = wanted ? `${left} of ${body.rows.length} rows` : "";
  });
}
