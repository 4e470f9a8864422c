// Axes and numbers, as in charts/axis.py and charts/series.py: round ticks, short labels, ranges that include a near zero.
function linearTicks(low, high, maxTicks = 6) {
  const exponent = Math.floor(Math.log10((high - low) / maxTicks));
  for (const e of [exponent, exponent + 1]) for (const m of [1, 2, 5]) {
    const step = m * 10 ** e, first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    if (last - first + 1 <= maxTicks) return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  }
  return [];
}

function logTicks(low, high, maxTicks = 5) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / maxTicks)), ticks = [];
  for (let exponent = first; exponent <= last; exponent += stride) ticks.push(10 ** exponent);
  return ticks.length > 1 ? ticks : linearTicks(low, high);
}

function tickLabel(value) {
  const size = Math.abs(value), digits = (v, n) => String(Number(v.toPrecision(n)));
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  for (const [limit, scale, letter] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return digits(value / scale, 4) + letter;
  return digits(value, 4);
}

// In a narrow range far from zero, short labels would be equal: show all digits that differ.
function tickLabels(ticks) {
  const short = ticks.map(tickLabel);
  return new Set(short).size === short.length ? short
    : ticks.map((t) => t.toLocaleString("en-US", { maximumSignificantDigits: 9 }));
}

function valueLabel(v) {
  if (v === null) return "not finite";
  if (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e12)) return Number(v.toPrecision(5)).toExponential();
  return v.toLocaleString("en-US", Math.abs(v) >= 1e4 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 5 });
}

const stepLabel = (step) => Math.round(step).toLocaleString("en-US");

function axisRange(values, log) {
  let low = Infinity, high = -Infinity;
  for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
  if (low > high) [low, high] = log ? [1, 10] : [0, 1];
  if (log && low > 0) return high / low > 1.5 ? [low / 1.15, high * 1.15] : [low / 1.05, high * 1.05];
  if (low >= 0 && low < 0.3 * high) low = 0;
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 0.5;
  return [low === 0 ? 0 : low - margin, high + margin];
}
