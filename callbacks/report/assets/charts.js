// Charts: redrawn for the visible steps, with a readout at the pointer and a cursor in every chart.
const page = JSON.parse(document.getElementById("data").textContent);
const view = { first: page.first, last: page.last };
const hidden = { runs: new Set() };
const showsAll = () => view.first === page.first && view.last === page.last;
const SVG = "http://www.w3.org/2000/svg";

function unpack({ steps, values }) {
  let step = 0;
  return steps.map((difference, i) => [step += difference, values[i]]);
}

function element(name, className, text = "") {
  const created = document.createElement(name);
  created.className = className;
  created.textContent = text;
  return created;
}

class Plot {
  constructor(figure) {
    this.figure = figure;
    const data = page.charts[figure.dataset.chart];
    this.log = data.log;
    this.curves = data.curves.map((curve, i) => ({
      ...curve, points: unpack(curve), rolledBack: (curve.rolled_back ?? []).map(unpack),
      trend: curve.trend ? unpack(curve.trend) : [],
      color: curveColor(curve, i, data.curves.length),
    }));
    for (const name of ["svg", ".ys", ".xs", ".cursor", ".brush", ".readout"])
      this[name.replace(".", "")] = figure.querySelector(name);
    this.original = ["svg", "ys", "xs"].map((name) => [name, this[name].innerHTML]);
    this.isDrawn = this.svg.querySelector(".grid") !== null; // the comparison page has empty charts
  }

  get shown() { return this.curves.filter((curve) => !hidden.runs.has(curve.run)); }
  x(step) { return (step - view.first) / (view.last - view.first); }
  y(value) {
    const [low, high] = this.isLog ? this.range.map(Math.log10) : this.range;
    const fraction = ((this.isLog ? Math.log10(Math.max(value, 1e-300)) : value) - low) / (high - low);
    return 1 - Math.min(9, Math.max(-9, fraction));
  }

  // The visible points, and their neighbors on both sides, so that lines reach the edges.
  inside(points) {
    return points.filter(([step], i) => step >= view.first && step <= view.last
      || points[i + 1]?.[0] >= view.first && step < view.first || points[i - 1]?.[0] <= view.last && step > view.last);
  }

  measure() {
    const values = this.shown.flatMap((curve) => [...withinView(curve.points, this.log)]);
    this.isLog = this.log && values.every((value) => value > 0);
    this.range = axisRange(values, this.isLog);
  }

  draw() {
    this.measure();
    if (showsAll() && this.isDrawn) {
      for (const [name, html] of this.original) this[name].innerHTML = html;
      return;
    }
    const paths = [["grid", "", this.ticks.map((tick) => `M0 ${this.units(tick)}H1000`).join("")], ...this.markPaths()];
    for (const curve of page.runs ? [...this.shown].reverse() : this.shown) for (const [kind, pointLists] of this.layers(curve)) {
      const [lines, dots] = this.lines(pointLists);
      paths.push([`${kind} ${curve.color.css}`, curve.color.style, lines, curve.run],
        [`${kind} dots ${curve.color.css}`, curve.color.style, dots, curve.run]);
    }
    this.svg.replaceChildren(...paths.filter(([, , d]) => d).map(([css, style, d, run]) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", css);
      path.setAttribute("d", d);
      if (style) path.setAttribute("style", style);
      if (run !== undefined) path.dataset.run = run;
      return path;
    }));
    this.label();
  }

  // The layers of a curve: points faintly below their trend, as long as enough of the trend is visible.
  layers(curve) {
    const trend = this.inside(curve.trend), hasTrend = trend.length > 8;
    return [["rolled-back", curve.rolledBack], [hasTrend ? "curve noisy" : "curve", [curve.points]], ["trend", hasTrend ? [trend] : []]];
  }

  get ticks() { return this.isLog ? logTicks(...this.range) : linearTicks(...this.range); }
  units(value) { return Math.round(this.y(value) * 10000) / 10; }

  lines(pointLists) {
    let lines = "", dots = "";
    for (const points of pointLists) {
      let segment = [], before = -Infinity;
      const end = () => {
        if (segment.length > 1) lines += `M${segment[0]}L${segment.slice(1).join(" ")}`;
        else if (segment.length) dots += `M${segment[0]}h0`;
        segment = [];
      };
      for (const [step, value] of this.inside(points)) {
        if (value === null || step < before) end();
        if (value !== null) segment.push(`${Math.round(this.x(step) * 10000) / 10} ${this.units(value)}`);
        before = step;
      }
      end();
    }
    return [lines, dots];
  }

  markPaths() {
    const paths = new Map(), at = (step) => Math.round(this.x(step) * 10000) / 10;
    for (const [step, event, fromStep] of page.marks) {
      const add = (kind, d) => paths.set(`${kind} e-${event}`, (paths.get(`${kind} e-${event}`) ?? new Set()).add(d));
      if (fromStep && fromStep >= view.first && step <= view.last)
        add("band", `M${Math.max(0, at(step))} 0H${Math.min(1000, at(fromStep))}V1000H${Math.max(0, at(step))}Z`);
      if (step >= view.first && step <= view.last) add("mark", `M${at(step)} 0V1000`);
    }
    return [...paths].map(([css, places]) => [css, "", [...places].join("")]);
  }

  label() {
    const spans = (css, side, ticks, place) => tickLabels(ticks).map((text, i) => {
      const span = element("span", css, text);
      span.style[side] = `${100 * place(ticks[i])}%`;
      return span;
    });
    const steps = linearTicks(view.first, view.last, this.svg.clientWidth < 420 ? 5 : 6).filter((t) => Number.isInteger(+t.toFixed(6)));
    this.ys.replaceChildren(...spans("y", "top", this.ticks, (tick) => this.y(tick)));
    this.xs.replaceChildren(...spans("x", "left", steps, (tick) => this.x(tick)));
  }

  // The point of each curve nearest to a step; of several runs, sorted by distance to the pointer.
  nearestPoints(wanted, height) {
    const all = this.shown.filter((curve) => curve.points.length).map((curve) => {
      const point = nearest(curve.points, wanted);
      return { curve, point, distance: point[1] === null ? 9 : Math.abs(this.y(point[1]) - height) };
    });
    if (page.runs) all.sort((a, b) => a.distance - b.distance);
    return all;
  }

  show(fraction, height) {
    const wanted = view.first + Math.min(1, Math.max(0, fraction)) * (view.last - view.first);
    const all = this.nearestPoints(wanted, height);
    if (!all.length) return;
    const step = all.reduce((a, b) => (Math.abs(b.point[0] - wanted) < Math.abs(a.point[0] - wanted) ? b : a)).point[0];
    this.step = step;
    const closest = all[0].curve.run;
    const listed = all.slice(0, 12);
    if (page.runs) listed.sort((a, b) => (b.point[1] ?? -Infinity) - (a.point[1] ?? -Infinity));
    const near = (6 / this.svg.clientWidth) * (view.last - view.first);
    const marks = page.marks.filter(([at, event]) => Math.abs(at - step) <= near && !hidden[event]);
    this.readout.replaceChildren(
      row("", "step", stepLabel(step)),
      ...listed.map(({ curve, point }) => row(
        `key ${curve.color.css}${curve.run === closest && page.runs ? " closest" : ""}`,
        curve.name + (point[0] === step ? "" : ` at ${stepLabel(point[0])}`), valueLabel(point[1]), curve.color.style)),
      ...(all.length > listed.length ? [row("", `and ${all.length - listed.length} more`, "")] : []),
      ...marks.slice(0, 6).map(([at, event, fromStep]) => row(`event e-${event}`, event.replaceAll("_", " "),
        fromStep ? `from ${stepLabel(fromStep)} back to ${stepLabel(at)}` : `step ${stepLabel(at)}`)),
    );
    for (const plot of plots) plot.readout.hidden = plot !== this;
    const width = this.svg.clientWidth, x = this.x(step) * width, room = this.readout.offsetWidth + 12;
    this.readout.style.left = `${x + room > width ? Math.max(-40, x - room) : x + 12}px`;
    if (page.runs) page.highlight?.(closest);
    for (const plot of plots) plot.point(step);
  }

  point(step) {
    const at = this.x(step);
    this.cursor.hidden = step === null || at < 0 || at > 1;
    this.cursor.style.left = `${100 * at}%`;
  }

  hide() {
    this.readout.hidden = true;
    for (const plot of plots) plot.point(null);
    if (page.runs) page.highlight?.(null);
  }
}

function row(css, left, right, style = "") {
  const created = element("div", "");
  const name = created.appendChild(element("span", css, left));
  if (style) name.setAttribute("style", style);
  created.appendChild(element("span", "", right));
  return created;
}

// The visible values: of points, and of lines where they cross the edges of the visible range.
function* withinView(points, log) {
  const edges = showsAll() ? [] : [view.first, view.last];
  for (const [i, [step, value]] of points.entries()) {
    if (value === null) continue;
    if (step >= view.first && step <= view.last) yield value;
    const [next, then] = points[i + 1] ?? [step, null];
    if (then === null) continue;
    for (const edge of edges) if (step < edge && edge < next) {
      const part = (edge - step) / (next - step);
      yield log && value > 0 && then > 0 ? value * (then / value) ** part : value + part * (then - value);
    }
  }
}

function nearest(points, step) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - step) <= Math.abs(best[0] - step)) best = point;
  return best;
}

function curveColor(curve, i, count) {
  const run = page.runs?.[curve.run];
  const hue = run ? run.hue : count > 8 ? Math.round(250 - (230 * i) / (count - 1)) : null;
  return hue === null || hue === undefined ? { css: run ? run.css : `c${i}`, style: "" } : { css: "ramp", style: `--hue:${hue}` };
}

const plots = [...document.querySelectorAll(".chart[data-chart]")].map((figure) => new Plot(figure));
