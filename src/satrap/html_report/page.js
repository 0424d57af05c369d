"use strict";
// Shows the values of the curves at the pointer. The data is the JSON block behind each chart.
for (const plot of document.querySelectorAll(".plot")) {
  const block = plot.querySelector("script");
  if (!block) continue;
  const data = JSON.parse(block.textContent);
  const svg = plot.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const tip = plot.appendChild(document.createElement("div"));
  tip.className = "tip";
  const text = (value) => value === null ? "not finite" : value.toLocaleString("en-US", {maximumSignificantDigits: Number.isInteger(value) ? 15 : 6});
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const share = ((event.clientX - box.left) * scale - data.begin) / (data.end - data.begin);
    const at = data.low + Math.min(1, Math.max(0, share)) * (data.high - data.low);
    const found = data.series.map((series) => [series, series.y.reduce((best, y, index) =>
      y !== null && (best < 0 || Math.abs(series.x[index] - at) < Math.abs(series.x[best] - at)) ? index : best, -1)])
      .filter(([, index]) => index >= 0);
    if (!found.length) return;
    const near = found.map(([series, index]) => series.x[index]).sort((a, b) => Math.abs(a - at) - Math.abs(b - at))[0];
    const lines = found.map(([series, index]) => (data.series.length > 1 ? series.name + ": " : "") + text(series.y[index]));
    tip.textContent = ["step " + text(near), ...lines].join("\n");
    const place = data.begin + (near - data.low) / (data.high - data.low) * (data.end - data.begin);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.style.visibility = tip.style.visibility = "visible";
    const left = place / scale;
    tip.style.left = (left > box.width / 2 ? Math.max(0, left - tip.offsetWidth - 10) : Math.min(left + 10, box.width - tip.offsetWidth)) + "px";
  });
  svg.addEventListener("pointerleave", () => { cursor.style.visibility = tip.style.visibility = "hidden"; });
}
