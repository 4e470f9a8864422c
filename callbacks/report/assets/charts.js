// Charts, drawn by uPlot. `page.charts` has one entry per figure, by its data-chart:
//   {kind: "steps", log, curves: [{name, color, steps, values, rolled_back, trend, run}]}   steps are differences
//   {kind: "lines", log, log_x, curves: [{name, color, x, values}], marks: [[x, name]]}
//   {kind: "stack", curves: [{name, color, values}], places, labels: [[place from 0 to 1, text]], limit}
//   {kind: "parallel", curves: [{name, color, run, values}]}   values from 0 to 1, one per axis
// Charts over steps share the visible steps (page.first to page.last at first), the cursor and page.marks:
// [[step, event, step that a rollback came from]]. The comparison page has page.runs: [{color, text}].
const page = JSON.parse(document.getElementById("data").textContent);
const view = { first: page.first, last: page.last };
const hidden = { runs: new Set(), events: new Set() };
const DASHES = { spike: [5, 3], skip: [1, 3], lr_backoff: [8, 3, 2, 3], resume: [2, 2] };
const MAX_BRANCHES = 50, MIN_TREND = 8, MAX_READ = 12;
// On a page of so many lines, charts outside the window are drawn when they come near.
const IS_LARGE = page.charts.reduce((count, chart) => count + chart.curves.length, 0) > 400;
let highlighted = null;

// Canvas has no style sheet: colors are looked up, again when the page turns dark.
const palette = new Map();
function lookUp(key, find) {
  if (!palette.has(key)) palette.set(key, find());
  return palette.get(key);
}
const css = (name) => lookUp(name, () => getComputedStyle(document.documentElement).getPropertyValue(name).trim());
const paint = (color) => typeof color === "number"
  ? `hsl(${color} ${css("--ramp-color")} ${css("--ramp-light")})` : css(color === "none" ? "--soft" : `--${color}`);
const eventColor = (event) => lookUp(`event ${event}`, () => {
  const button = [...document.querySelectorAll("[data-event]")].find((each) => each.dataset.event === event);
  return button ? getComputedStyle(button).getPropertyValue("--event").trim() : css("--c3");
});

const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });
function tickLabel(v) {
  if (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e15)) return Number(v.toPrecision(3)).toExponential().replace("e+", "e");
  return Math.abs(v) < 1e4 ? String(Number(v.toPrecision(4))) : compact.format(v).replace("K", "k");
}
// In a narrow range far from zero, short labels would be equal: show all digits that differ.
function tickLabels(ticks) {
  const known = ticks.filter((t) => t !== null), short = known.map(tickLabel);
  const label = new Set(short).size === short.length ? tickLabel
    : (t) => t.toLocaleString("en-US", { maximumSignificantDigits: 9 });
  return ticks.map((t) => (t === null ? "" : label(t)));
}
function valueLabel(v) {
  if (v === null) return "not finite";
  if (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e12)) return Number(v.toPrecision(5)).toExponential();
  return v.toLocaleString("en-US", Math.abs(v) >= 1e4 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 5 });
}
const stepLabel = (step) => Math.round(step).toLocaleString("en-US");

function element(name, className, text = "") {
  const created = document.createElement(name);
  created.className = className;
  created.textContent = text;
  return created;
}

// The lines of a curve: it is split where a rollback returned to an earlier step, as positions must ascend.
function branches({ steps, values }) {
  const found = [];
  let step = 0;
  steps.forEach((difference, i) => {
    step += difference;
    if (!i || difference <= 0) found.push([[], []]);
    found.at(-1)[0].push(step);
    found.at(-1)[1].push(values[i]);
  });
  if (found.length <= MAX_BRANCHES) return found;
  const points = found.flatMap(([xs, ys]) => xs.map((x, i) => [x, ys[i]])).sort((a, b) => a[0] - b[0]);
  return [[points.map(([x]) => x), points.map(([, y]) => y)]];
}

function yRange(low, high, log) {
  if (low === null) return log ? [1, 10] : [0, 1];
  [low, high] = [Math.max(low, log ? 1e-300 : -1e300), Math.min(high, 1e300)]; // beyond, the length of an axis is no number
  if (log) return high / low > 1.5 ? [low / 1.15, high * 1.15] : [low / 1.05, high * 1.05];
  const bottom = low >= 0 && low < 0.3 * high ? 0 : low; // close enough to zero to include it
  const margin = 0.05 * (high - bottom) || 0.05 * Math.abs(high) || 0.5;
  return [bottom === 0 ? 0 : bottom - margin, high + margin];
}

// Powers of ten, or 1, 2, 5 times them on a short axis; uPlot's own ticks of a log axis end at 1e-32.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), stride = Math.ceil((last - first) / 5);
  const ticks = [];
  for (let e = first; e <= last; e += stride) for (const m of last - first > 3 ? [1] : [1, 2, 5]) ticks.push(m * 10 ** e);
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 1 ? inside : [low, high];
}

class Plot {
  constructor(figure) {
    this.chart = page.charts[figure.dataset.chart];
    this.curves = this.chart.curves;
    this.kind = this.chart.kind;
    this.box = figure.querySelector(".plot");
    this.lines = this.kind === "steps" ? this.stepLines() : this.kind === "stack" ? this.stackLines() : this.curves.map(
      (curve) => ({ curve, css: "curve", data: [curve.x ?? curve.values.map((_, i) => i), curve.values] }));
    for (const curve of this.curves) curve.points = this.lines.filter((line) => line.curve === curve && line.css === "curve")
      .flatMap(({ data: [xs, ys] }) => xs.map((x, i) => [x, ys[i]]));
    if (page.runs) this.lines.reverse(); // the best run on top
    this.readout = this.box.appendChild(element("div", "readout"));
    this.readout.hidden = true;
    this.isNear = !IS_LARGE;
  }

  get u() { return this.drawn ??= this.build(); }

  build() {
    const data = uPlot.join([[this.ends], ...this.lines.map((line) => line.data)]);
    const places = new Map(data[0].map((x, i) => [x, i]));
    for (const line of this.lines) line.dots = line.data[1].flatMap(
      (y, i, all) => (y !== null && (all[i - 1] ?? null) === null && (all[i + 1] ?? null) === null ? [places.get(line.data[0][i])] : []));
    const u = new uPlot(this.options(), data, this.box);
    new ResizeObserver(() => u.setSize(this.size)).observe(this.box);
    this.drawn = u;
    listen(this);
    return u;
  }

  get size() { return { width: this.box.clientWidth, height: this.box.clientHeight }; }
  get ends() {
    if (this.kind === "steps") return [page.first, page.last];
    if (this.kind === "stack") return [0, this.chart.places.length];
    if (this.kind === "parallel") return [0, this.curves[0].values.length - 1];
    const xs = this.curves.flatMap((curve) => curve.x), [low, high] = [Math.min(...xs), Math.max(...xs)];
    if (!xs.length) return [0, 1];
    return low < high ? [low, high] : this.chart.log_x ? [low / 2, high * 2] : [low - 1, high + 1];
  }

  stepLines() {
    return this.curves.flatMap((curve) => [
      ...(curve.rolled_back ?? []).flatMap(branches).map((data) => ({ curve, css: "rolled-back", data })),
      ...branches(curve).map((data) => ({ curve, css: "curve", data })),
      ...(curve.trend?.steps.length ? [{ curve, css: "trend", data: branches(curve.trend)[0] }] : []),
    ]);
  }

  // Each area reaches from zero to the sum of the values up to its own; the highest is painted first.
  stackLines() {
    const sums = this.chart.places.map(() => 0), [, last] = this.ends;
    const areas = this.curves.map((curve) => {
      curve.values.forEach((value, i) => { sums[i] += value; });
      return { curve, css: "area", data: [[...sums.keys(), last], [...sums, sums.at(-1)]] };
    });
    const limit = { css: "limit", data: [[0, last], [this.chart.limit, this.chart.limit]] };
    return [...areas.reverse(), ...(this.chart.limit === null ? [] : [limit])];
  }

  options() {
    const { kind, chart } = this, isParallel = kind === "parallel";
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--rule"), width: 1 }, ticks: { show: false },
      font: "11.5px system-ui, sans-serif", show: !isParallel, gap: 6 };
    const x = { ...axis, size: 24, space: 64, grid: { show: false }, values: (u, ticks) => tickLabels(ticks) };
    const y = { ...axis, space: 30, values: (u, ticks) => tickLabels(ticks),
      size: (u, labels) => 12 + 6.5 * Math.max(3, ...(labels ?? []).map((label) => label.length)) };
    const log = { splits: (u, i, low, high) => logTicks(low, high), filter: (u, ticks) => ticks };
    if (chart.log) Object.assign(y, log);
    if (chart.log_x) Object.assign(x, log);
    if (kind === "steps") x.filter = (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick : null));
    if (kind === "stack") Object.assign(x, {
      splits: () => chart.labels.map(([place]) => place * chart.places.length), values: () => chart.labels.map(([, text]) => text) });
    return {
      ...this.size, legend: { show: false }, pxAlign: IS_LARGE ? 1 : 0, padding: isParallel ? [0, 0, 0, 0] : [8, 14, 0, 0],
      scales: {
        x: { time: false, distr: chart.log_x ? 3 : 1, range: () => (kind === "steps" ? [view.first, view.last] : this.ends) },
        y: { distr: chart.log ? 3 : 1, range: (u, low, high) => (isParallel ? [0, 1] : yRange(low, high, chart.log)) },
      },
      axes: [x, y],
      series: [{}, ...this.lines.map((line) => this.series(line))],
      cursor: { y: false, points: { show: false }, drag: { x: kind === "steps", setScale: false },
        bind: { dblclick: () => () => (kind === "steps" ? zoom("all") : null) } },
      hooks: {
        drawAxes: [() => this.drawMarks()],
        setCursor: [({ cursor }) => (cursor.left < 0 ? hideReadouts() : this.show(this.u.posToVal(cursor.left, "x"), cursor.top))],
        setSelect: [(u) => this.select(u)],
      },
    };
  }

  series(line) {
    const color = () => (line.css === "limit" ? css("--bad") : paint(line.curve.color));
    const dash = { "rolled-back": [2, 2], limit: [6, 4] }[line.css];
    const shared = { stroke: color, dash, auto: line.css !== "rolled-back" && line.css !== "trend" };
    if (line.css === "area") return { ...shared, width: 0, fill: color, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
    return { ...shared, points: { show: false, filter: () => (line.dots.length ? line.dots : null), size: 5, width: 0, fill: color } };
  }

  // How strongly each line is drawn: points faintly below their trend, as long as enough of the trend is visible.
  style() {
    const trends = this.lines.filter((line) => line.css === "trend" && line.data[0].filter((x) => x >= view.first && x <= view.last).length > MIN_TREND);
    const withTrend = new Set(trends.map((line) => line.curve));
    this.lines.forEach((line, i) => {
      const series = this.u.series[i + 1], isFaint = line.css === "curve" && withTrend.has(line.curve), run = line.curve?.run;
      series.show = !hidden.runs.has(run) && (line.css !== "trend" || withTrend.has(line.curve));
      series.alpha = line.css === "rolled-back" ? 0.4 : isFaint ? 0.38 : 1;
      series.width = line.css === "area" ? 0 : line.css === "rolled-back" || isFaint ? 1 : 1.6;
      if (highlighted === null || run === undefined) return;
      if (run === highlighted) series.width = 2.6;
      else series.alpha = 0.13;
    });
  }

  // Redraw for the visible steps, with a y axis for the values among them; once the chart is near the window.
  draw() {
    this.isStale = !this.isNear;
    if (this.isStale) return;
    this.style();
    this.u.batch(() => {
      this.u.redraw(true, true);
      if (this.kind === "steps") this.u.setScale("x", { min: view.first, max: view.last });
    });
  }

  highlight() {
    this.isStale ||= !this.isNear;
    if (this.isStale) return;
    this.style();
    this.u.redraw(false);
  }

  drawMarks() {
    const { ctx, bbox } = this.u, at = (x) => this.u.valToPos(x, "x", true), drawn = new Set();
    const upright = (x, color, dash = []) => {
      if (drawn.has(`${color} ${x}`)) return;
      drawn.add(`${color} ${x}`);
      ctx.strokeStyle = color;
      ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    };
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 1, bbox.top, bbox.width + 2, bbox.height);
    if (this.kind !== "parallel") ctx.clip();
    ctx.lineWidth = devicePixelRatio;
    ctx.globalAlpha = 0.75;
    if (this.kind === "parallel") for (let i = 0; i <= this.ends[1]; i++) upright(at(i), css("--rule"));
    for (const [x] of this.chart.marks ?? []) upright(at(x), css("--c3"));
    for (const [step, event, fromStep] of this.kind === "steps" ? page.marks : []) {
      if (hidden.events.has(event)) continue;
      upright(at(step), eventColor(event), DASHES[event]);
      if (!fromStep) continue;
      ctx.globalAlpha = 0.08;
      ctx.fillStyle = eventColor(event);
      ctx.fillRect(at(step), bbox.top, at(fromStep) - at(step), bbox.height);
      ctx.globalAlpha = 0.75;
    }
    ctx.restore();
  }

  select(u) {
    const { left, width } = u.select;
    if (width >= 5) showSteps(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // The point of each visible curve nearest to a position; of several runs, sorted by distance to the pointer.
  nearestPoints(x, top) {
    const all = this.curves.filter((curve) => curve.points.length && !hidden.runs.has(curve.run)).map((curve) => {
      const point = nearest(curve.points, x);
      return { curve, point, distance: point[1] === null ? Infinity : Math.abs(this.u.valToPos(point[1], "y") - top) };
    });
    return page.runs ? all.sort((a, b) => a.distance - b.distance) : all;
  }

  show(x, top) {
    if (this.kind === "parallel") return this.showRun(x, top);
    const rows = this.kind === "stack" ? this.readStack(x) : this.readPoints(x, top);
    if (!rows) return;
    this.readout.replaceChildren(...rows);
    hideReadouts(this);
    this.readout.hidden = false;
    const { left, width } = this.u.over.getBoundingClientRect(), offset = left - this.box.getBoundingClientRect().left;
    const at = offset + this.u.valToPos(this.kind === "steps" ? this.step : x, "x"), room = this.readout.offsetWidth + 12;
    this.readout.style.left = `${at + room > offset + width ? Math.max(-4, at - room) : at + 12}px`;
    if (this.kind !== "steps") return;
    for (const plot of stepPlots.filter((each) => each.isNear)) {
      const place = this.step < view.first || this.step > view.last ? -10 : plot.u.valToPos(this.step, "x");
      plot.u.setCursor({ left: place, top: 0 }, false);
    }
  }

  readStack(x) {
    const i = Math.min(this.chart.places.length - 1, Math.max(0, Math.floor(x)));
    const total = this.curves.reduce((sum, curve) => sum + curve.values[i], 0);
    return [row("", this.chart.places[i], valueLabel(total)), ...this.curves.toReversed().map(
      (curve) => row("key", curve.name, valueLabel(curve.values[i]), curve.color))];
  }

  readPoints(x, top) {
    const all = this.nearestPoints(x, top);
    if (!all.length) return null;
    const isSteps = this.kind === "steps", label = isSteps ? stepLabel : valueLabel;
    const step = all.reduce((a, b) => (Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a)).point[0];
    this.step = step;
    const closest = all[0].curve.run, listed = all.slice(0, MAX_READ);
    if (page.runs) {
      listed.sort((a, b) => (b.point[1] ?? -Infinity) - (a.point[1] ?? -Infinity));
      page.highlight(closest);
    }
    const near = this.u.posToVal(6, "x") - this.u.posToVal(0, "x");
    const marks = isSteps ? page.marks.filter(([at, event]) => Math.abs(at - step) <= near && !hidden.events.has(event)) : [];
    return [
      row("", isSteps ? "step" : "at", label(step)),
      ...listed.map(({ curve, point }) => row(`key${page.runs && curve.run === closest ? " closest" : ""}`,
        curve.name + (point[0] === step ? "" : ` at ${label(point[0])}`), valueLabel(point[1]), curve.color)),
      ...(all.length > listed.length ? [row("", `and ${all.length - listed.length} more`, "")] : []),
      ...marks.slice(0, 6).map(([at, event, fromStep]) => row(`event e-${event}`, event.replaceAll("_", " "),
        fromStep ? `from ${stepLabel(fromStep)} back to ${stepLabel(at)}` : `step ${stepLabel(at)}`)),
    ];
  }

  // Of a parallel coordinates plot: highlight the run whose line is nearest to the pointer.
  showRun(x, top) {
    const i = Math.min(this.ends[1] - 1, Math.max(0, Math.floor(x)));
    const [best] = this.curves.filter((curve) => !hidden.runs.has(curve.run)).map((curve) => {
      const value = curve.values[i] + (x - i) * (curve.values[i + 1] - curve.values[i]);
      return [Math.abs(this.u.valToPos(value, "y") - top), curve.run];
    }).sort(([a], [b]) => a - b);
    page.highlight(best && best[0] < 12 ? best[1] : null);
  }
}

function row(className, left, right, color) {
  const created = element("div", "");
  const name = created.appendChild(element("span", className, left));
  if (color !== undefined) name.style.setProperty("--color", paint(color));
  created.appendChild(element("span", "", right));
  return created;
}

function nearest(points, x) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) <= Math.abs(best[0] - x)) best = point;
  return best;
}

function hideReadouts(except = null) {
  for (const plot of plots) if (plot !== except) plot.readout.hidden = true;
  if (except) return;
  for (const plot of stepPlots) plot.drawn?.setCursor({ left: -10, top: -10 }, false);
  if (page.runs) page.highlight(null);
}

// Zoom: choose the visible steps of all charts at once, by dragging, pinching, keys and buttons.
const bar = document.querySelector(".zoom");
const showsAll = () => view.first === page.first && view.last === page.last;
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
  hideReadouts();
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

// uPlot listens to the mouse; fingers and keys are ours.
function listen(plot) {
  const { over } = plot.drawn, touches = new Map();
  over.tabIndex = 0;
  over.setAttribute("role", "img");
  over.setAttribute("aria-label", `${plot.chart.title}${plot.kind === "steps" ? " by step" : ""}`);
  const place = (event) => [event.clientX - over.getBoundingClientRect().left, event.clientY - over.getBoundingClientRect().top];
  over.addEventListener("mousedown", (event) => event.preventDefault()); // no focus, no selection of text
  over.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch") return;
    const [left, top] = place(event);
    touches.set(event.pointerId, plot.u.posToVal(left, "x"));
    plot.u.setCursor({ left, top });
  });
  over.addEventListener("pointermove", (event) => {
    if (plot.kind === "steps" && touches.size === 2 && touches.has(event.pointerId)) pinch(event);
  });
  for (const end of ["pointerup", "pointercancel"]) over.addEventListener(end, (event) => touches.delete(event.pointerId));
  over.addEventListener("blur", () => hideReadouts());
  over.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const action = { "+": "in", "=": "in", "-": "out", Escape: "all" }[event.key];
    if (plot.kind !== "steps" || !(by || action)) return;
    if (by) plot.show(neighborStep(plot, by), 0);
    else zoom(action, plot.step);
    event.preventDefault();
  });

  // Keep the steps that were under the two fingers under them.
  function pinch(event) {
    const [other] = [...touches].filter(([id]) => id !== event.pointerId), x = place(event)[0] / over.clientWidth;
    const moving = touches.get(event.pointerId), fixed = other[1], at = (fixed - view.first) / (view.last - view.first);
    if (Math.abs(x - at) < 0.05 || moving === fixed) return;
    const width = Math.abs((moving - fixed) / (x - at));
    showSteps(fixed - at * width, fixed + (1 - at) * width);
  }
}

function neighborStep(plot, by) {
  const shown = plot.curves.find((curve) => !hidden.runs.has(curve.run))?.points ?? [];
  const points = shown.filter(([step]) => step >= view.first && step <= view.last);
  const now = points.findIndex(([step]) => step >= (plot.step ?? view.first));
  return points[Math.min(points.length - 1, Math.max(0, now + by))]?.[0] ?? view.first;
}

page.highlight = () => {}; // see compare.js
const plots = [...document.querySelectorAll(".chart[data-chart]")].map((figure) => new Plot(figure));
const stepPlots = plots.filter((plot) => plot.kind === "steps");
if (IS_LARGE) {
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const plot = plots.find((each) => each.box === target);
      plot.isNear = isIntersecting;
      if (plot.isStale) plot.draw();
    }
  }, { rootMargin: "200px" });
  for (const plot of plots) near.observe(plot.box);
  addEventListener("beforeprint", () => plots.forEach((plot) => { plot.isNear = true; plot.draw(); }));
}
document.addEventListener("pointerdown", (event) => { // close a readout that a finger opened
  if (!event.target.closest?.(".plot")) hideReadouts();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !showsAll()) zoom("all"); });
for (const button of bar?.querySelectorAll("[data-zoom]") ?? [])
  button.addEventListener("click", () => zoom(button.dataset.zoom));
for (const button of document.querySelectorAll("[data-event]"))
  button.addEventListener("click", () => {
    const { event } = button.dataset, isHidden = !hidden.events.delete(event);
    if (isHidden) hidden.events.add(event);
    button.setAttribute("aria-pressed", String(!isHidden));
    redraw();
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette.clear(); redraw(); });
if (bar) bar.hidden = false;
redraw();
