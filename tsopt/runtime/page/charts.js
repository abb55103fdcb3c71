"use strict";
// The charts of a page, by uPlot: logarithmic axes, a series for each engine, and what the nearest point is.

const CHART_HEIGHT = 320, COLOURS = 8;

// Read again for each drawing, because the browser's colour scheme can change.
function colour(name) {
  return () => getComputedStyle(document.documentElement).getPropertyValue(name);
}

function short(value) {
  return value === null ? "" : value.toLocaleString("en", { maximumSignificantDigits: 3, notation: "compact" });
}

// Lines at powers of ten only.
function powers(_, splits) {
  return splits.map((value) => (value > 0 && Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6) ? value : null));
}

function drawChart(figure, chart) {
  const holder = figure.querySelector(".plot"), told = figure.querySelector(".pointed");
  // All points in one list by x; each series has gaps where the points are those of others.
  const points = chart.series.flatMap((series, number) => series.points.map(([x, y, said]) => ({ x, y, said, number })));
  points.sort((a, b) => a.x - b.x);
  const columns = chart.series.map((_, number) => points.map((point) => (point.number === number ? point.y : null)));
  const series = chart.series.map(({ name, line }, number) => ({
    label: name,
    stroke: colour(`--series-${(number % COLOURS) + 1}`),
    width: 1.5,
    dash: number >= COLOURS ? [6, 3] : undefined,
    spanGaps: true,
    paths: line ? undefined : () => null,
    points: { show: true, size: 6, fill: colour("--page") },
  }));
  const axis = (label) => ({
    label,
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1, filter: powers },
    ticks: { stroke: colour("--line"), width: 1, filter: powers },
    values: (_, splits) => splits.map(short),
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
  });
  const plot = new uPlot({
    width: holder.clientWidth,
    height: CHART_HEIGHT,
    scales: { x: { time: false, distr: 3 }, y: { distr: 3 } },
    axes: [axis(chart.x), { ...axis(chart.y), size: 64 }],
    series: [{}, ...series],
    legend: { live: false },
    cursor: { drag: { x: false, y: false } },
    hooks: {
      setCursor: [(drawn) => {
        const { left, top } = drawn.cursor;
        const away = ({ x, y }) => Math.hypot(drawn.valToPos(x, "x") - left, drawn.valToPos(y, "y") - top);
        const near = left < 0 ? [] : points.filter((point) => away(point) < 20).sort((a, b) => away(a) - away(b));
        told.textContent = near.length ? `${near[0].said}` : "\u00a0";
      }],
    },
  }, [points.map(({ x }) => x), ...columns], holder);
  const canvas = holder.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", holder.dataset.label);
  new ResizeObserver(() => plot.setSize({ width: holder.clientWidth, height: CHART_HEIGHT })).observe(holder);
  for (const media of ["(prefers-color-scheme: dark)", "print"]) { // on paper, colours are those of the light scheme
    matchMedia(media).addEventListener("change", () => plot.redraw());
  }
}

const charts = JSON.parse(document.getElementById("charts").textContent);
document.querySelectorAll("figure.plot-of").forEach((figure, number) => drawChart(figure, charts[number]));
