/* Heat map of two knobs: in each cell the candidate nearest to the one shown, coloured by fit and speed. */
const across = document.getElementById("across"), down = document.getElementById("down");
const WORDS = { [DOES_NOT_FIT]: "does not fit", [FITS]: "fits", [UNDECIDED]: "can't be decided", [STOPS]: "would stop with an error" };
const CLASSES = { [DOES_NOT_FIT]: "no", [FITS]: "yes", [UNDECIDED]: "open", [STOPS]: "no" };

/* Row of the candidate in each cell, by the values of both knobs. */
function cellsOf(x, y) {
  const cells = new Map();
  for (let row = 0; row < MAP.fits.length; row++) {
    if (valueOf(x, row) === ABSENT || valueOf(y, row) === ABSENT) continue;
    const key = `${valueOf(x, row)},${valueOf(y, row)}`, far = distance(row, [x, y]);
    if (!cells.has(key) || far < cells.get(key).far) cells.set(key, { row, far });
  }
  return cells;
}

/* The knob with the most values, and the one that makes the most cells with it. */
function firstAxes() {
  const present = varying.filter((knob) => valueOf(knob, MAP.start) !== ABSENT);
  const most = (knobs, count) => knobs.reduce((best, knob) => count(knob) > count(best) ? knob : best, knobs[0]);
  const x = most(present, (knob) => knob.values.length);
  return [x, most(present.filter((knob) => knob !== x).reverse(), (knob) => cellsOf(x, knob).size)];
}

function cell(x, y, place, [slowest, fastest]) {
  const data = document.createElement("td");
  if (!place) {
    data.textContent = "–";
    data.className = "none";
    return data;
  }
  const row = place.row, button = data.appendChild(document.createElement("button"));
  const moved = changedBetween(shown, row, [x, y]).map((knob) => `${knob.name} ${labelOf(knob, row)}`);
  const fast = MAP.speed[row] === ABSENT ? 0 : MAP.speed[row];
  const fails = CLASSES[MAP.fits[row]] === "no", stops = MAP.fits[row] === STOPS;
  button.type = "button";
  button.dataset.row = row;
  button.className = CLASSES[MAP.fits[row]];
  button.style.setProperty("--share", `${10 + 45 * (fast - slowest) / Math.max(1, fastest - slowest)}%`);
  button.append(fails ? "✕" : MAP.speed[row] === ABSENT ? "fits" : thousands(fast));
  button.appendChild(document.createElement("small")).textContent = stops ? "stops" : sizeOf(MAP.peak[row]);
  button.title = [`${x.name} ${labelOf(x, row)}`, `${y.name} ${labelOf(y, row)}`, ...moved].join(", ")
    + `: ${WORDS[MAP.fits[row]]}${fails ? "" : `, ${speedOf(row)}`}, peak ${sizeOf(MAP.peak[row])}`;
  button.setAttribute("aria-label", button.title);
  button.setAttribute("aria-pressed", row === shown);
  button.tabIndex = -1;
  button.addEventListener("click", () => { show(row, []); focusShown(); });
  return data;
}

function showHeat() {
  const x = varying[across.value], y = varying[down.value], cells = cellsOf(x, y);
  const speeds = [...cells.values()].filter(({ row }) => MAP.fits[row] === FITS).map(({ row }) => MAP.speed[row]);
  const range = [Math.min(...speeds), Math.max(...speeds)];
  const table = document.getElementById("heat"), head = document.createElement("tr");
  head.append(document.createElement("td"), ...x.values.map((value) => headingOf(value.label, "col")));
  table.replaceChildren(head, ...y.values.map((value, down) => {
    const line = document.createElement("tr");
    line.append(headingOf(value.label, "row"));
    x.values.forEach((_, across) => line.append(cell(x, y, cells.get(`${across},${down}`), range)));
    return line;
  }));
  document.getElementById("across-name").textContent = `${x.name} →`;
  document.getElementById("down-name").textContent = `${y.name} ↓`;
  const entry = table.querySelector("[aria-pressed=true]") || table.querySelector("button");
  if (entry) entry.tabIndex = 0;
}

function headingOf(text, scope) {
  const heading = document.createElement("th");
  heading.scope = scope;
  heading.textContent = text;
  return heading;
}

function focusShown() {
  const pressed = document.querySelector("#heat [aria-pressed=true]");
  if (pressed) pressed.focus();
}

/* Arrow keys move between cells; Enter shows the cell's candidate. */
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
document.getElementById("heat").addEventListener("keydown", (event) => {
  const step = STEPS[event.key], start = event.target.closest("td");
  if (!step || !start) return;
  event.preventDefault();
  const lines = [...document.getElementById("heat").rows];
  let line = lines.indexOf(start.parentElement), column = start.cellIndex;
  for (;;) {
    [line, column] = [line + step[0], column + step[1]];
    const next = lines[line] && lines[line].cells[column];
    if (!next) return;
    const button = next.querySelector("button");
    if (!button) continue;
    event.target.tabIndex = -1;
    button.tabIndex = 0;
    button.focus();
    return;
  }
});
