// The read-out under the pointer: nearest point of each curve, and the events close by.
const page = JSON.parse(document.getElementById("points").textContent);
const number = (v) =>
  v === null ? "not finite" : v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(2)
  : v.toLocaleString("en-US", { maximumSignificantDigits: Math.abs(v) >= 1e5 ? 9 : 5, maximumFractionDigits: Math.abs(v) >= 1e4 ? 0 : 20, roundingPriority: "lessPrecision" });

function line(className, left, right) {
  const row = document.createElement("div");
  const name = row.appendChild(document.createElement("span"));
  name.className = className;
  name.textContent = left;
  row.appendChild(document.createElement("span")).textContent = right;
  return row;
}

function nearest(points, step) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
  return best;
}

for (const figure of document.querySelectorAll(".chart")) {
  const { first, last, curves } = page.charts[figure.dataset.chart];
  const svg = figure.querySelector("svg");
  const cursor = figure.querySelector(".cursor");
  const readout = figure.querySelector(".readout");

  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const fraction = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const wanted = first + fraction * (last - first);
    const found = curves.map((curve) => nearest(curve.points, wanted));
    const step = found.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a))[0];
    const at = (step - first) / (last - first);
    const near = (6 / box.width) * (last - first);
    cursor.setAttribute("d", `M${1000 * at} 0V1000`);
    readout.replaceChildren(
      line("", "step", step.toLocaleString("en-US")),
      ...found.map((point, i) => line(`key c${i}`,
        curves[i].metric + (point[0] === step ? "" : ` at ${point[0].toLocaleString("en-US")}`), number(point[1]))),
      ...page.marks.filter((mark) => Math.abs(mark[0] - wanted) <= near).slice(0, 6)
        .map((mark) => line("event", mark[1], `step ${mark[0].toLocaleString("en-US")}`)),
    );
    readout.hidden = false;
    const x = at * box.width;
    const room = readout.offsetWidth + 12;
    readout.style.left = `${x + room > box.width ? Math.max(-40, x - room) : x + 12}px`;
  };
  const hide = () => { readout.hidden = true; cursor.setAttribute("d", ""); };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
