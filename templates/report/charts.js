// Draws each chart when it comes near the window, and again when the colour scheme changes.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(`--${name}`).trim();
  const series = [1, 2, 3, 4, 5].map((number) => colour(`series-${number}`));
  const text = { labelColor: colour("faint"), titleColor: colour("faint") };
  return {
    aria: false, // the place of a chart has a label, its thousands of points need none
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { ...text, domainColor: colour("line"), gridColor: colour("line"), gridOpacity: 0.6, tickColor: colour("line"),
      titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12 },
    legend: { ...text, labelColor: colour("ink"), labelFontSize: 12, labelLimit: 300, symbolOpacity: 1 },
    mark: { color: series[0] },
    range: { category: series },
    rule: { color: colour("faint") },
    text: { color: colour("faint") },
  };
}

async function draw(place) {
  const made = page.specs[place.dataset.spec];
  const spec = { ...made, datasets: { ...made.datasets, variants: page.rows[place.dataset.rows] } };
  const options = { mode: "vega-lite", actions: false, renderer: "svg", config: theme(),
    tooltip: { theme: dark.matches ? "dark" : "light" } };
  const drawn = await vegaEmbed(place, spec, options);
  place.vega?.finalize();
  place.vega = drawn;
  place.dataset.drawn = "yes";
}

const places = [...document.querySelectorAll(".chart")];
const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    draw(target);
  }
}, { rootMargin: "600px" });
places.forEach((place) => watcher.observe(place));
dark.addEventListener("change", () => places.filter((place) => place.vega).forEach(draw));
