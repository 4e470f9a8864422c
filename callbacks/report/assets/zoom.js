// Zoom: choose the visible steps of all charts at once, by dragging, pinching, keys and buttons.
const bar = document.querySelector(".zoom");
let waiting = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const plot of plots) plot.draw();
    if (!bar) return;
    bar.querySelector("output").textContent = `steps ${stepLabel(view.first)} – ${stepLabel(view.last)}`;
    for (const button of bar.querySelectorAll("[data-zoom]")) button.disabled = showsAll() && button.dataset.zoom !== "in";
  });
}

function showSteps(first, last) {
  const whole = page.last - page.first, width = Math.min(whole, Math.max(Math.min(2, whole), last - first));
  const middle = (first + last) / 2;
  view.first = Math.min(Math.max(page.first, middle - width / 2), page.last - width);
  view.last = view.first + width;
  if (width > 0.999 * whole) [view.first, view.last] = [page.first, page.last];
  for (const plot of plots) plot.hide();
  redraw();
}

function zoom(action, around = (view.first + view.last) / 2) {
  const width = view.last - view.first, before = (around - view.first) / width;
  if (action === "all") showSteps(page.first, page.last);
  else if (action === "earlier" || action === "later") {
    const by = (action === "later" ? 0.5 : -0.5) * width;
    showSteps(view.first + by, view.last + by);
  } else {
    const next = action === "in" ? width / 2 : width * 2;
    showSteps(around - before * next, around + (1 - before) * next);
  }
}

function listen(plot) {
  const { svg, brush } = plot;
  const touches = new Map();
  let began = null;
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  const stepAt = (fraction) => view.first + Math.min(1, Math.max(0, fraction)) * (view.last - view.first);

  svg.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    if (event.pointerType === "touch") {
      touches.set(event.pointerId, stepAt(x));
    } else if (event.button === 0) {
      began = x;
      svg.setPointerCapture(event.pointerId);
    }
    plot.show(x, y);
  });
  svg.addEventListener("mousedown", (event) => event.preventDefault()); // no focus, no selection of text
  svg.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (touches.size === 2 && touches.has(event.pointerId)) return pinch(event, x);
    if (began !== null) {
      const [a, b] = [began, x].map((v) => Math.min(1, Math.max(0, v))).sort((p, q) => p - q);
      brush.hidden = (b - a) * svg.clientWidth < 5;
      Object.assign(brush.style, { left: `${100 * a}%`, width: `${100 * (b - a)}%` });
    }
    plot.show(x, y);
  });
  svg.addEventListener("pointerup", (event) => {
    touches.delete(event.pointerId);
    if (began === null) return;
    const [a, b] = [stepAt(began), stepAt(place(event)[0])].sort((p, q) => p - q);
    const isDrag = !brush.hidden;
    began = null;
    brush.hidden = true;
    if (isDrag) showSteps(a, b);
  });
  svg.addEventListener("pointercancel", (event) => { touches.delete(event.pointerId); began = null; brush.hidden = true; });
  svg.addEventListener("pointerleave", (event) => { if (began === null && event.pointerType !== "touch") plot.hide(); });
  svg.addEventListener("blur", () => plot.hide());
  svg.addEventListener("dblclick", () => zoom("all"));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const action = { "+": "in", "=": "in", "-": "out", Escape: "all" }[event.key];
    if (by) plot.show(plot.x(neighborStep(plot, by)), 0.5);
    else if (action) zoom(action, plot.step);
    else return;
    event.preventDefault();
  });

  // Keep the steps that were under the two fingers under them.
  function pinch(event, x) {
    const [other] = [...touches].filter(([id]) => id !== event.pointerId);
    const moving = touches.get(event.pointerId), fixed = other[1], at = (fixed - view.first) / (view.last - view.first);
    if (Math.abs(x - at) < 0.05 || moving === fixed) return;
    const width = Math.abs((moving - fixed) / (x - at));
    showSteps(fixed - at * width, fixed + (1 - at) * width);
  }
}

function neighborStep(plot, by) {
  const points = plot.shown[0].points.filter(([step]) => step >= view.first && step <= view.last);
  const now = points.findIndex(([step]) => step >= (plot.step ?? view.first));
  return points[Math.min(points.length - 1, Math.max(0, now + by))]?.[0] ?? view.first;
}

for (const plot of plots) {
  if (!plot.isDrawn) plot.draw();
  plot.measure();
  listen(plot);
}
document.addEventListener("pointerdown", (event) => { // close a readout that a finger opened
  if (!event.target.closest?.(".plot svg")) for (const plot of plots) plot.hide();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !showsAll()) zoom("all"); });
for (const button of bar?.querySelectorAll("[data-zoom]") ?? [])
  button.addEventListener("click", () => zoom(button.dataset.zoom));
for (const button of document.querySelectorAll("[data-event]"))
  button.addEventListener("click", () => {
    const event = button.dataset.event;
    hidden[event] = !hidden[event];
    button.setAttribute("aria-pressed", String(!hidden[event]));
    document.body.classList.toggle(`without-${event}`, hidden[event]);
  });
if (bar) bar.hidden = false;
redraw();
