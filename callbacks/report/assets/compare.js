// Runs: one is lit on the whole page while it is pointed at, any is hidden by its key, the table sorts by a heading.
const rules = document.head.appendChild(document.createElement("style"));
let lit = null;

function restyle() {
  const away = [...hidden.runs].map((run) => `[data-run="${run}"]`);
  const rest = away.length ? `:is(.across-runs path, .bar-row):is(${away}) { display: none; }
    :is(tr, .keys button):is(${away}) { opacity: .45; }` : "";
  rules.textContent = rest + (lit === null ? "" : `
    :is(.chart .curve, .thread, .bar-row):not([data-run="${lit}"]) { opacity: .13; }
    .chart .curve[data-run="${lit}"], .thread[data-run="${lit}"] { stroke-width: 2.6; }
    tr[data-run="${lit}"] > td, .keys button[data-run="${lit}"] { background: var(--tint); }`);
}

page.light = (run) => {
  const next = run === undefined || run === null || hidden.runs.has(run) ? null : run;
  if (next === lit) return;
  lit = next;
  restyle();
  for (const line of document.querySelectorAll(".told"))
    line.textContent = lit === null ? "\u00a0" : page.runs[lit].told;
};

function show(run, isShown) {
  hidden.runs[isShown ? "delete" : "add"](run);
  for (const key of document.querySelectorAll(`[data-toggle="${run}"]`)) key.setAttribute("aria-pressed", String(isShown));
}

document.addEventListener("pointerover", (event) => {
  const at = event.target.closest?.("[data-run]");
  if (at) page.light(Number(at.dataset.run));
  else if (!event.target.closest?.(".plot")) page.light(null);
});

for (const key of document.querySelectorAll("[data-toggle]"))
  key.addEventListener("click", () => {
    const run = Number(key.dataset.toggle);
    show(run, hidden.runs.has(run));
    page.light(null);
    restyle();
    redraw();
  });

for (const button of document.querySelectorAll("[data-show]"))
  button.addEventListener("click", () => {
    page.runs.forEach((_, run) => show(run, run < Number(button.dataset.show)));
    restyle();
    redraw();
  });

// What a cell is sorted by: its number, else its words; cells without a value stay last.
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
