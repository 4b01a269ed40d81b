/* The candidates, in the columns that map_data.py writes, and which of them is shown. */
const MAP = JSON.parse(document.getElementById("data").textContent);
const ABSENT = -1, DOES_NOT_FIT = 0, FITS = 1, UNDECIDED = 2, STOPS = 3;
const varying = MAP.knobs.filter((knob) => knob.values.length > 1);
const valueOf = (knob, row) => typeof knob.column === "number" ? knob.column : knob.column[row];
const labelOf = (knob, row) => knob.values[valueOf(knob, row)].label;
const verdictOf = (row) => MAP.verdict[row].map((part) => MAP.texts[part]).join("; ");
const thousands = (count) => count.toLocaleString("en-US");
const sizeOf = (mib) => mib >= 1024 ? `${Number((mib / 1024).toPrecision(3))} GiB` : `${mib} MiB`;
const speedOf = (row) => MAP.speed[row] === ABSENT ? "speed not known" : `${thousands(MAP.speed[row])} tokens/s`;

/* A value of each varying knob: that of the candidate shown, or the last one before the knob was without effect. */
const wished = new Map();
let shown = MAP.start;

function remember(row) {
  for (const knob of varying) if (valueOf(knob, row) !== ABSENT) wished.set(knob, valueOf(knob, row));
}
if (MAP.best !== ABSENT) remember(MAP.best);
remember(shown);

/* How far a candidate is from the wished values: first in what it learns, then in other knobs, then in steps of a knob. */
function distance(row, free) {
  let total = 0;
  for (const knob of varying) {
    const value = valueOf(knob, row), wish = wished.has(knob) ? wished.get(knob) : value;
    if (value === wish || value === ABSENT || free.includes(knob)) continue;
    total += (knob.learning ? 100 : 1) + Math.abs(value - wish) / 100;
  }
  return total;
}

/* The candidate with this value of a knob that is nearest to the others' wished values. */
function nearest(knob, value) {
  let best = ABSENT, least = Infinity;
  for (let row = 0; row < MAP.fits.length; row++) {
    if (valueOf(knob, row) !== value) continue;
    const far = distance(row, [knob]);
    if (far < least) [best, least] = [row, far];
  }
  return best;
}

/* Knobs in which two candidates differ and that both have, without some. */
const changedBetween = (before, after, without) => varying.filter((knob) =>
  !without.includes(knob) && valueOf(knob, before) !== valueOf(knob, after)
  && valueOf(knob, before) !== ABSENT && valueOf(knob, after) !== ABSENT);
