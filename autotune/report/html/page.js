/* Draws the figures: the part of plotly's figure format that this page uses, as SVG of the page's own width and colours. */
const NARROW = 600, ROW = 22, LINE = 16;
const pen = document.createElement("canvas").getContext("2d");
pen.font = "13px system-ui, sans-serif";
const widthOf = (texts) => Math.max(0, ...texts.map((text) => pen.measureText(text).width));

/* The text, cut to a width in pixels. */
function fitted(text, room) {
  pen.font = "600 13px system-ui, sans-serif";
  let shown = text;
  while (shown && pen.measureText(shown === text ? text : shown + "…").width > room) shown = shown.slice(0, -1);
  pen.font = "13px system-ui, sans-serif";
  return shown === text ? text : shown + "…";
}

function add(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

/* 1. Axes: positions of categories, or a range of numbers with round ticks. */
const keysOf = (values) => Array.isArray(values[0]) ? values[0].map((outer, at) => [outer, values[1][at]]) : values.map((one) => [one]);
const keyOf = (parts) => parts.join("\u0000");

function categories(lists) {
  const groups = new Map();
  for (const values of lists) for (const parts of keysOf(values)) {
    const outer = parts.length > 1 ? parts[0] : "";
    if (!groups.has(outer)) groups.set(outer, new Map());
    groups.get(outer).set(keyOf(parts), String(parts[parts.length - 1]));
  }
  const slots = [];
  for (const [outer, inner] of groups) {
    if (outer) slots.push({ label: outer, heading: true });
    for (const [key, label] of inner) slots.push({ key, label });
  }
  const index = new Map(slots.map((slot, at) => [slot.key, at]));
  return { slots, share: (parts) => (index.get(keyOf(parts)) + 0.5) / slots.length, step: 1 / slots.length };
}

function numbers(values, fromZero) {
  let low = fromZero ? Math.min(0, ...values) : Math.min(...values), high = Math.max(...values);
  const spread = (high - low || Math.abs(high) || 1) * 0.06;
  if (!fromZero || low < 0) low -= spread;
  high += spread;
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(Math.abs(at) < step / 1e6 ? 0 : at);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = (at) => at.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
  return { ticks: ticks.map((at) => [(at - low) / (high - low), text(at)]), share: ([value]) => (value - low) / (high - low) };
}

/* Ends of every bar along its axis, stacked on those before it. */
function stacked(traces) {
  const tops = new Map(), ends = new Map();
  for (const trace of traces.filter((one) => one.type === "bar")) {
    const [at, sizes] = trace.orientation === "h" ? [trace.y, trace.x] : [trace.x, trace.y];
    ends.set(trace, keysOf(at).map((parts, number) => {
      const from = tops.get(keyOf(parts)) || 0, to = from + (sizes[number] || 0);
      tops.set(keyOf(parts), to);
      return [from, to];
    }));
  }
  return ends;
}

/* The error bar of a point: what is below and above its value; null without one. */
function spreadOf(trace, letter) {
  const spread = trace["error_" + letter];
  if (!spread || spread.visible === false) return null;
  return (at) => [(spread.arrayminus || spread.array)[at], spread.array[at]];
}

function scaleOf(axis, letter, traces, layout, ends) {
  const lists = traces.map((one) => one[letter]), spec = layout[axis] || {};
  const words = lists.some((values) => Array.isArray(values[0]) || typeof values[0] === "string");
  if (words || spec.type === "category") return categories(lists);
  const bars = [...ends.entries()].filter(([one]) => (one.orientation === "h") === (letter === "x")).flatMap(([, spans]) => spans.flat());
  const errors = traces.filter((one) => spreadOf(one, letter)).flatMap((one) => one[letter].flatMap(
    (value, at) => { const [below, above] = spreadOf(one, letter)(at); return [value + above, value - below]; }));
  const limits = letter === "x" ? (layout.shapes || []).map((shape) => shape.x0) : [];
  const seen = [...lists.flat(), ...bars, ...errors, ...limits].filter((value) => Number.isFinite(value));
  return numbers(seen.length ? seen : [0, 1], bars.length > 0 || spec.rangemode === "tozero");
}

/* 2. Panels: one pair of axes each, beside or above each other; on a narrow screen above each other. */
function panelsOf(figure, width, height) {
  const suffixes = Object.keys(figure.layout).filter((name) => /^xaxis\d*$/.test(name)).map((name) => name.slice(5)).sort();
  const all = suffixes.length ? suffixes : [""], beside = all.some((one) => ((figure.layout["xaxis" + one] || {}).domain || [0])[0] > 0);
  const one = (suffix, at) => {
    const x = (figure.layout["xaxis" + suffix] || {}).domain || [0, 1], y = (figure.layout["yaxis" + suffix] || {}).domain || [0, 1];
    if (beside && width < NARROW) return { suffix, left: 0, width, top: at * height, height };
    return { suffix, left: x[0] * width, width: (x[1] - x[0]) * width, top: (1 - y[1]) * height, height: (y[1] - y[0]) * height };
  };
  return { panels: all.map(one), height: beside && width < NARROW ? all.length * height : height };
}

/* 3. Marks. */
const SHAPES = {
  "circle": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0Z", "diamond": "M0,-6L5,0L0,6L-5,0Z",
  "x": "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0Z",
  "star": "M0,-9L2.4,-3L9,-2.8L3.8,1.2L5.6,7.6L0,3.8L-5.6,7.6L-3.8,1.2L-9,-2.8L-2.4,-3Z",
};
const DASHES = { dash: "7 4", dot: "2 4" };

function mark(parent, trace, at) {
  const marker = trace.marker || {}, symbol = marker.symbol || "circle", open = symbol.endsWith("-open"), rim = marker.line;
  const drawn = { d: SHAPES[symbol.replace("-open", "")] || SHAPES.circle, transform: `translate(${at[0]},${at[1]})` };
  if (open) return add(parent, "path", { ...drawn, fill: "none", stroke: marker.color, "stroke-width": 2 });
  return add(parent, "path", { ...drawn, fill: marker.color, ...(rim ? { stroke: rim.color, "stroke-width": rim.width } : {}) });
}

function legend(place, traces) {
  const list = place.appendChild(document.createElement("ul"));
  list.className = "legend";
  for (const trace of traces.filter((one) => one.name && one.showlegend !== false)) {
    const item = list.appendChild(document.createElement("li"));
    const swatch = add(item, "svg", { width: 18, height: 18, viewBox: "-9 -9 18 18" });
    if (trace.type === "bar") add(swatch, "rect", { x: -6, y: -6, width: 12, height: 12, fill: trace.marker.color, opacity: trace.marker.opacity ?? 1 });
    else if (trace.mode === "lines") add(swatch, "path", { d: "M-8,0H8", stroke: trace.line.color, "stroke-width": 2, "stroke-dasharray": DASHES[trace.line.dash] || "none" });
    else mark(swatch, trace, [0, 0]);
    item.append(trace.name);
  }
  if (!list.children.length) list.remove();
}

function panel(svg, figure, { suffix, left, top, width, height }) {
  const layout = figure.layout, traces = figure.data.filter((one) => (one.xaxis || "x") === "x" + suffix);
  const shared = (layout["xaxis" + suffix] || {}).matches || Object.keys(layout).some((name) => /^xaxis/.test(name) && layout[name].matches);
  const ends = stacked(traces), ySpec = layout["yaxis" + suffix] || {}, xSpec = layout["xaxis" + suffix] || {};
  const x = scaleOf("xaxis" + suffix, "x", shared ? figure.data : traces, layout, shared ? stacked(figure.data) : ends);
  const y = scaleOf("yaxis" + suffix, "y", traces, layout, ends), hidden = ySpec.visible === false;
  // 1. Room for the labels.
  const xTitle = (xSpec.title || {}).text, yTitle = (ySpec.title || {}).text, xLabels = xSpec.showticklabels !== false;
  const longest = widthOf(y.slots ? y.slots.filter((slot) => !slot.heading).map((slot) => slot.label) : y.ticks.map(([, text]) => text));
  const gap = shared ? 64 : hidden ? 8 : Math.min(longest + 12 + (yTitle ? LINE : 0), width * 0.45);
  const x0 = left + gap, x1 = left + width - 14, y0 = top + (layout.shapes ? LINE : 6), y1 = top + height - (xLabels ? LINE + 6 : 4) - (xTitle ? LINE : 0);
  const px = (parts) => x0 + x.share(parts) * (x1 - x0);
  const py = (parts) => y.slots ? y0 + y.share(parts) * (y1 - y0) : y1 - y.share(parts) * (y1 - y0);
  // 2. Grid, ticks and titles.
  const few = (ticks, room) => ticks.filter((_, at) => at % Math.ceil(ticks.length / Math.max(1, room)) === 0);
  const label = (attributes, text, name) => add(svg, "text", { fill: "currentColor", class: name, ...attributes }, text);
  const across = x.slots ? x.slots.map((slot) => [x.share([slot.key]), slot.label]) : x.ticks;
  const widest = widthOf(across.map(([, text]) => text)) + 10;
  for (const [share, text] of few(across, Math.floor((x1 - x0) / widest))) {
    const at = x0 + share * (x1 - x0);
    if (!x.slots) add(svg, "path", { d: `M${at},${y0}V${y1}`, class: "grid" });
    if (xLabels) label({ x: at, y: y1 + LINE, "text-anchor": "middle" }, text, "xtick");
  }
  if (y.slots) y.slots.forEach((slot, at) => {
    const middle = y0 + (at + 0.5) * y.step * (y1 - y0) + 4;
    if (slot.heading) add(label({ x: left, y: middle, "font-weight": 600 }, fitted(slot.label, width - 4), "ytick"), "title", {}, slot.label);
    else label({ x: x0 - 6, y: middle, "text-anchor": "end" }, slot.label, "ytick");
  });
  else if (!hidden) for (const [share, text] of y.ticks) {
    const at = y1 - share * (y1 - y0);
    add(svg, "path", { d: `M${x0},${at}H${x1}`, class: "grid" });
    label({ x: x0 - 6, y: at + 4, "text-anchor": "end" }, text, "ytick");
  }
  if (xTitle) label({ x: (x0 + x1) / 2, y: y1 + 2 * LINE + 2, "text-anchor": "middle" }, xTitle, "title");
  if (yTitle && !hidden) label({ transform: `translate(${left + 12},${(y0 + y1) / 2}) rotate(-90)`, "text-anchor": "middle" }, yTitle, "title");
  for (const shape of layout.shapes || []) {
    const at = px([shape.x0]);
    add(svg, "path", { d: `M${at},${y0}V${y1}`, stroke: "#888888", "stroke-width": 2, "stroke-dasharray": DASHES.dash });
    if (top < LINE) label({ x: at - 4, y: y0 - 4, "text-anchor": "end" }, "limit", "note");
  }
  // 3. Data.
  const tip = (node, trace, at, words) => { node.dataset.tip = (trace.hovertext || [])[at] || words; };
  for (const trace of traces) {
    const xs = keysOf(trace.x), ys = keysOf(trace.y);
    if (trace.type === "bar") for (const [at, [from, to]] of ends.get(trace).entries()) {
      if (to <= from) continue;
      const lying = trace.orientation === "h", scale = lying ? y : x, thick = scale.step * (lying ? y1 - y0 : x1 - x0) * 0.75;
      const [a, b, middle] = lying ? [px([from]), px([to]), py(ys[at])] : [py([to]), py([from]), px(xs[at])];
      const place = lying ? { x: a, y: middle - thick / 2, width: b - a, height: thick } : { x: middle - thick / 2, y: a, width: thick, height: b - a };
      const words = (trace.hovertext || [])[at];
      tip(add(svg, "rect", { ...place, fill: trace.marker.color, opacity: trace.marker.opacity ?? 1 }), { hovertext: [] }, at,
        `${trace.name}: ${(to - from).toPrecision(4)}${words ? "<br>" + words : ""}`);
    } else if (trace.mode === "lines") {
      const points = xs.map((value, at) => [px(value), py(ys[at])]), bend = (trace.line || {}).shape;
      const d = points.map(([a, b], at) => at === 0 ? `M${a},${b}` : bend === "hv" ? `H${a}V${b}` : bend === "vh" ? `V${b}H${a}` : `L${a},${b}`).join("");
      add(svg, "path", { d, fill: "none", stroke: trace.line.color, "stroke-width": trace.line.width || 2, "stroke-dasharray": DASHES[trace.line.dash] || "none" });
    } else xs.forEach((value, at) => {
      const point = [px(value), py(ys[at])], wide = spreadOf(trace, "x"), high = spreadOf(trace, "y");
      const bar = (d) => add(svg, "path", { class: "spread", d, stroke: trace.marker.color });
      if (wide) bar(`M${px([value[0] - wide(at)[0]])},${point[1]}H${px([value[0] + wide(at)[1]])}`);
      if (high) bar(`M${point[0]},${py([ys[at][0] - high(at)[0]])}V${py([ys[at][0] + high(at)[1]])}`);
      tip(mark(svg, trace, point), trace, at, [...value, ...ys[at]].map((one) => typeof one === "number" ? one.toPrecision(4) : one).join(", "));
    });
  }
}

function draw(id) {
  const figure = FIGURES[id], place = document.getElementById(id);
  place.replaceChildren();
  legend(place, figure.data);
  const slots = Math.max(...figure.data.map((one) => Array.isArray(one.y[0]) ? new Set(one.y[0]).size : 0));
  const width = place.clientWidth, sized = panelsOf(figure, width, figure.layout.height - 40 + slots * ROW);
  const svg = add(place, "svg", { class: "figure-svg", width, height: sized.height, viewBox: `0 0 ${width} ${sized.height}` });
  for (const one of sized.panels) panel(svg, figure, one);
}

/* What is under the pointer, or was touched. */
const note = document.body.appendChild(document.createElement("div"));
note.className = "tip";
note.hidden = true;
document.addEventListener("pointerover", (event) => {
  const words = event.target.dataset && event.target.dataset.tip;
  note.hidden = !words;
  if (!words) return;
  note.replaceChildren(...words.split("<br>").map((line) => {
    const row = document.createElement("div");
    row.textContent = line.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&quot;/g, '"').replace(/&#x27;/g, "'").replace(/&amp;/g, "&");
    return row;
  }));
  note.style.left = `${Math.max(4, Math.min(event.pageX + 12, document.documentElement.clientWidth - note.offsetWidth - 8))}px`;
  note.style.top = `${event.pageY + 14}px`;
});

function drawAll() {
  Object.keys(FIGURES).forEach(draw);
  document.body.dataset.drawn = Object.keys(FIGURES).length;
}
let known = 0;
new ResizeObserver(() => {
  const width = document.documentElement.clientWidth;
  if (width > 100 && width !== known) { known = width; drawAll(); }  // not before the page has its size
}).observe(document.documentElement);
