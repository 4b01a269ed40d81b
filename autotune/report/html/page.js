/* Draws every figure in the page's own colours, and again when the reader switches to the dark. */
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function ink() {
  return getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
}
function draw(id) {
  const figure = FIGURES[id];
  const layout = { ...figure.layout, font: { ...figure.layout.font, color: ink() } };
  return Plotly.react(id, figure.data, layout, { responsive: true, displayModeBar: false });
}
function drawAll() {
  return Promise.all(Object.keys(FIGURES).map(draw)).then(() => { document.body.dataset.drawn = Object.keys(FIGURES).length; });
}
dark.addEventListener("change", drawAll);
drawAll();
