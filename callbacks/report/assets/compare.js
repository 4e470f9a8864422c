// Runs: highlight a run on the whole page while the pointer is on it, hide runs, sort the table by a heading.
const rules = document.head.appendChild(document.createElement("style"));

function restyle() {
  const off = [...hidden.runs].map((run) => `[data-run="${run}"]`);
  const hiding = off.length ? `.bar-row:is(${off}) { display: none; } :is(tr, .keys button):is(${off}) { opacity: .45; }` : "";
  rules.textContent = hiding + (highlighted === null ? "" : `
    .bar-row:not([data-run="${highlighted}"]) { opacity: .13; }
    tr[data-run="${highlighted}"] > td, .keys button[data-run="${highlighted}"] { background: var(--tint); }`);
}

page.highlight = (run) => {
  const next = run === undefined || run === null || hidden.runs.has(run) ? null : run;
  if (next === highlighted) return;
  highlighted = next;
  restyle();
  for (const plot of plots) plot.highlight();
  for (const line of document.querySelectorAll(".run-text"))
    line.textContent = highlighted === null ? "\u00a0" : page.runs[highlighted].text;
};

function show(run, isShown) {
  hidden.runs[isShown ? "delete" : "add"](run);
  for (const key of document.querySelectorAll(`[data-toggle="${run}"]`)) key.setAttribute("aria-pressed", String(isShown));
}

document.addEventListener("pointerover", (event) => {
  const at = event.target.closest?.("[data-run]");
  if (at) page.highlight(Number(at.dataset.run));
  else if (!event.target.closest?.(".plot")) page.highlight(null);
});

for (const key of document.querySelectorAll("[data-toggle]"))
  key.addEventListener("click", () => {
    const run = Number(key.dataset.toggle);
    show(run, hidden.runs.has(run));
    page.highlight(null);
    restyle();
    redraw();
  });

for (const button of document.querySelectorAll("[data-show]"))
  button.addEventListener("click", () => {
    page.runs.forEach((_, run) => show(run, run < Number(button.dataset.show)));
    restyle();
    redraw();
  });

// Compare two cells as numbers if both are, else as text; cells without a value always come last.
function compare(a, b, sign) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [p, q] = [Number(a), Number(b)];
  return sign * (Number.isNaN(p) || Number.isNaN(q) ? a.localeCompare(b, "en", { numeric: true }) : p - q);
}

for (const head of document.querySelectorAll(".runs th"))
  head.querySelector("button").addEventListener("click", () => {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const now = head.getAttribute("aria-sort");
    const ascends = now ? now === "descending" : head.dataset.first === "asc";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", ascends ? "ascending" : "descending");
    const rows = [...body.rows];
    rows.sort((a, b) => compare(a.cells[column].dataset.v, b.cells[column].dataset.v, ascends ? 1 : -1));
    body.append(...rows);
  });
