/* Controls: a slider for each knob of numbers, a list for any other; then what they choose. */
function control(knob, at) {
  const line = document.createElement("p"), label = line.appendChild(document.createElement("label"));
  const id = `knob-${at}`, output = document.createElement("output");
  line.className = "knob";
  label.htmlFor = output.htmlFor = id;
  label.textContent = knob.name;
  label.title = knob.says;
  if (knob.learning) label.appendChild(document.createElement("small")).textContent = " changes learning";
  const field = line.appendChild(knob.numeric ? slider(knob) : list(knob));
  field.id = id;
  field.addEventListener("input", () => choose(knob, Number(field.value)));
  if (knob.numeric) line.append(output);
  knob.show = (row) => {
    const value = valueOf(knob, row);
    field.disabled = value === ABSENT;
    field.value = value === ABSENT ? wished.get(knob) ?? 0 : value;
    const text = value === ABSENT ? "no effect" : labelOf(knob, row);
    output.textContent = text;
    if (knob.numeric) field.setAttribute("aria-valuetext", text);
  };
  return line;
}

function slider(knob) {
  const field = document.createElement("input");
  Object.assign(field, { type: "range", min: 0, max: knob.values.length - 1, step: 1 });
  return field;
}

function list(knob) {
  const field = document.createElement("select");
  field.append(...knob.values.map((value, at) => new Option(value.label, at)));
  return field;
}

function choose(knob, value) {
  const row = nearest(knob, value);
  if (row !== ABSENT) show(row, [knob]);
}

/* Shows a candidate; `chosen`: the knobs that the reader set, unlike those that follow. */
function show(row, chosen) {
  const followed = chosen.length ? changedBetween(shown, row, chosen) : [];
  const says = followed.map((knob) => `${knob.name} ${labelOf(knob, shown)} → ${labelOf(knob, row)}`).join(", ");
  shown = row;
  remember(row);
  for (const knob of varying) knob.show(row);
  const verdict = document.getElementById("verdict");
  verdict.textContent = verdictOf(row);
  verdict.className = `headline ${CLASSES[MAP.fits[row]]}`;
  document.getElementById("followed").textContent = says && `Changed with it: ${says}`;
  showMemory(row);
  if (varying.length > 1) showHeat();
  showTexts(row);
  document.body.dataset.row = row;
}

function showTexts(row) {
  const present = MAP.knobs.filter((knob) => valueOf(knob, row) !== ABSENT);
  document.getElementById("yaml").textContent = present.map((knob) => knob.values[valueOf(knob, row)].yaml).join("");
  const words = present.filter((knob) => varying.includes(knob)).map((knob) => knob.values[valueOf(knob, row)].set);
  document.getElementById("command").textContent = [MAP.command[0], ...words, MAP.command[1]].filter(Boolean).join(" ");
}

document.getElementById("knobs").append(...varying.map(control));
document.getElementById("to-start").addEventListener("click", () => show(MAP.start, []));
const toBest = document.getElementById("to-best");
toBest.disabled = MAP.best === ABSENT;
toBest.addEventListener("click", () => show(MAP.best, []));
if (varying.length > 1) {
  const axes = firstAxes();
  [across, down].forEach((field, at) => {
    field.append(...varying.map((knob, number) => new Option(knob.name, number)));
    field.value = varying.indexOf(axes[at]);
    field.addEventListener("change", () => {
      if (across.value === down.value) swapTo(field);
      showHeat();
    });
  });
} else document.getElementById("heat-section").hidden = true;

/* Gives the other axis another knob: both were the same. */
function swapTo(field) {
  const other = field === across ? down : across;
  other.value = (Number(field.value) + 1) % varying.length;
}
show(MAP.start, []);
