/* Memory by phase against the limit: in use, kept in torch's cache, possibly more. */
function showMemory(row) {
  const [limit, ...numbers] = MAP.profiles[MAP.profile[row]];
  const phases = numbers.map((number, at) => [MAP.phase_names[at], MAP.phases[number]]).filter(([, sizes]) => sizes);
  const widest = Math.max(limit, ...phases.map(([, sizes]) => sizes[2])) * 1.02;
  const share = (mib) => `${100 * Math.max(0, mib) / widest}%`;
  const body = document.getElementById("phases");
  body.style.setProperty("--limit", share(limit));
  body.replaceChildren(...phases.map(([name, [live, peak, high]]) => {
    const line = document.createElement("tr"), bar = document.createElement("div");
    bar.className = "bar";
    for (const [kind, size] of [["use", live], ["cache", peak - live], ["more", high - peak]]) {
      const part = bar.appendChild(document.createElement("span"));
      part.className = kind;
      part.style.width = share(size);
    }
    const heading = line.appendChild(document.createElement("th"));
    heading.scope = "row";
    heading.textContent = name;
    line.appendChild(document.createElement("td")).append(bar);
    for (const size of [live, peak]) line.appendChild(document.createElement("td")).textContent = sizeOf(size);
    return line;
  }));
  document.getElementById("limit").textContent = sizeOf(limit);
}
