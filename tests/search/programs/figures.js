() => [...document.querySelectorAll(".js-plotly-plot")].filter(plot => plot.querySelector(".gtitle")).map(plot => {
  const box = (part) => plot.querySelector(part)?.getBoundingClientRect();
  const panel = plot.parentElement.getBoundingClientRect();
  return {
    name: plot.querySelector(".gtitle").textContent, title: box(".gtitle").bottom, legend: box(".legend")?.top ?? null,
    beyond: box(".main-svg").bottom - panel.bottom,
  };
})