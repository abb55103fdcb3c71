// Tables: a press on a column sorts by it, and a text leaves the rows that contain it.

// A number with its unit: "1,024", "12.5%", "1.92x [1.86, 2.02]". A name such as "0.conv1" is none.
const NUMBER = /^-?[\d,]*\.?\d+(e[-+]?\d+)?(%|x?( \[.*\])?)$/;

function numberIn(text) {
  return NUMBER.test(text) ? parseFloat(text.replaceAll(",", "")) : null;
}

// Numbers, the largest first; a column that has other texts as well goes by these, from A to Z.
function orderOf(texts) {
  const told = texts.filter((text) => text && text !== "-");
  if (!told.length || !told.every((text) => numberIn(text) !== null)) {
    return { first: "ascending", compared: (a, b) => a.localeCompare(b, "en", { numeric: true }) };
  }
  return { first: "descending", compared: (a, b) => (numberIn(b) ?? -Infinity) - (numberIn(a) ?? -Infinity) };
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => header.firstElementChild.addEventListener("click", () => {
    const text = (row) => row.cells[column].textContent.trim();
    const { first, compared } = orderOf([...body.rows].map(text));
    const turned = header.getAttribute("aria-sort") === first;
    for (const other of headers) other.removeAttribute("aria-sort");
    const second = first === "ascending" ? "descending" : "ascending";
    header.setAttribute("aria-sort", turned ? second : first);
    body.append(...[...body.rows].sort((a, b) => (turned ? -1 : 1) * compared(text(a), text(b))));
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
